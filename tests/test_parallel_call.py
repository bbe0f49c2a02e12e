"""parallel_call runs any functions on any trees at once, as one differentiable function."""

import threading
from typing import Any

import pytest
import torch

import funcpar as fp

WEIGHT = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
ROWS = torch.linspace(-1.0, 1.0, 39, dtype=torch.float64).reshape(13, 3)


def test_functions_and_structures_may_differ() -> None:
    out = fp.parallel_call(
        [
            lambda tree: {"sum": tree["a"] + tree["b"][0]},
            lambda x, y: [x, y, None],
            lambda: "nothing",
            lambda x: x.shape,
        ],
        [{"a": torch.ones(2), "b": [torch.ones(2)]}, (torch.zeros(1), 3), (), torch.ones(4, 5)],
    )
    assert torch.equal(out[0]["sum"], torch.full((2,), 2.0))
    assert torch.equal(out[1][0], torch.zeros(1))
    assert out[1][1:] == [3, None]
    assert out[2:] == ["nothing", torch.Size([4, 5])]


def test_tuple_is_unpacked_and_anything_else_is_one_argument() -> None:
    count = lambda *args: len(args)
    inputs = [(1, 2, 3), [1, 2, 3], {"a": 1}, torch.ones(3), (), ((1, 2),), None, "text"]
    assert fp.parallel_call(count, inputs) == [3, 1, 1, 1, 0, 1, 1, 1]


def test_one_function_serves_all_shards_and_a_tuple_of_functions_is_a_sequence() -> None:
    assert fp.parallel_call(abs, [-1, -2]) == [1, 2]
    assert fp.parallel_call((abs, str), [-1, -2]) == [1, "-2"]


def test_no_shards_give_an_empty_list() -> None:
    assert fp.parallel_call(abs, []) == []
    assert fp.parallel_call([], []) == []


def test_devices_are_taken_again_from_the_first_where_there_are_fewer(devices) -> None:
    names = fp.parallel_call(lambda: threading.current_thread().name, [()] * 6)
    size = len(devices)
    want = [f"funcpar-cpu-{k % size}" + (f".{k // size}" if k // size else "") for k in range(6)]
    assert names == want


def test_named_devices_are_used_in_order() -> None:
    names = fp.parallel_call(lambda: threading.current_thread().name, [()] * 3, ["cpu:3", 0, 0])
    assert names == ["funcpar-cpu-3", "funcpar-cpu-0", "funcpar-cpu-0.1"]


def test_tensor_that_shards_share_gets_the_sum_of_their_gradients(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    funs = [torch.sin, torch.exp, lambda w: w**3]
    (got,) = torch.autograd.grad(sum(out.sum() for out in fp.parallel_call(funs, [leaf] * 3)), leaf)
    torch.testing.assert_close(got, WEIGHT.cos() + WEIGHT.exp() + 3 * WEIGHT**2)


def test_only_shards_that_are_used_run_backward_and_unused_inputs_have_no_gradient(devices) -> None:
    leaves = [WEIGHT.clone().requires_grad_() for _ in range(3)]
    outs = fp.parallel_call([torch.sin] * 3, leaves)
    outs[1].sum().backward()
    assert leaves[0].grad is None
    assert leaves[2].grad is None
    assert torch.equal(leaves[1].grad, WEIGHT.cos())


def test_one_tensor_twice_in_a_tree_and_closed_over_counts_every_time(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    outs = fp.parallel_call(lambda tree: tree["a"] * tree["b"] * leaf, [{"a": leaf, "b": leaf}] * 2)
    (got,) = torch.autograd.grad((outs[0] + outs[1]).sum(), leaf)
    torch.testing.assert_close(got, 6 * WEIGHT**2)


def test_results_may_be_inputs_integers_and_no_tensors_at_all(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    same, index, detached = fp.parallel_call(
        [lambda w: w, lambda w: w.argmax(), lambda w: w.detach()], [leaf] * 3
    )
    assert torch.equal(torch.autograd.grad(same.sum(), leaf)[0], torch.ones_like(leaf))
    assert index.item() == 2
    assert not detached.requires_grad


def mixed(w: torch.Tensor, parallel: bool) -> torch.Tensor:
    """A function of `w` in which shards differ, share, chain, and meet nonlinear code outside."""

    def call(funs: Any, inputs: Any) -> Any:
        if parallel:
            return fp.parallel_call(funs, inputs)
        return [fun(*args) for fun, args in zip(funs, inputs, strict=True)]

    funs = [lambda w, x: (x @ w).sin(), lambda w, x: (x @ w**2).cos().mean(), lambda w: w.exp()]
    a, b, c = call(funs, [(w, ROWS[:4]), (w, ROWS[4:]), (w,)])
    d, e = call([lambda a, c: a.sum() * c, lambda b: b**2], [(a, c), (b,)])
    return (d * e).sum() + a.square().sum()


def test_mixed_shards_have_the_gradients_of_plain_code(devices) -> None:
    want = fp.value_and_grad(lambda w: mixed(w, False))(WEIGHT)
    got = fp.value_and_grad(lambda w: mixed(w, True))(WEIGHT)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    got = torch.func.grad_and_value(lambda w: mixed(w, True))(WEIGHT)
    torch.testing.assert_close(got[::-1], want, rtol=1e-12, atol=1e-12)


def second(loss: torch.Tensor, leaf: torch.Tensor, with_loss: bool) -> torch.Tensor:
    """Return the gradient of a gradient penalty, with or without the loss itself in it."""
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    penalty = grad.square().sum() + (loss if with_loss else 0)
    return torch.autograd.grad(penalty, leaf)[0]


@pytest.mark.parametrize("with_loss", [False, True])
def test_second_order_without_retain_graph_is_that_of_plain_code(with_loss: bool, devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    want = second(mixed(leaf, False), leaf, with_loss)
    got = second(mixed(leaf, True), leaf, with_loss)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_loss", [False, True])
def test_second_order_of_pmap_without_retain_graph_is_that_of_plain_code(with_loss: bool, devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    plain = lambda w, x: (x @ w).sin()
    want = second(plain(leaf, ROWS).square().mean(), leaf, with_loss)
    got = second(fp.pmap(plain)(leaf, ROWS).square().mean(), leaf, with_loss)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_second_backward_without_retain_graph_is_refused_as_in_plain_code(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    loss = sum(out.sum() for out in fp.parallel_call(torch.sin, [leaf, 2 * leaf]))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_graph_lives_for_as_many_backwards_as_are_retained(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    loss = sum(out.sum() for out in fp.parallel_call(torch.sin, [leaf, leaf]))
    grads = [torch.autograd.grad(loss, leaf, retain_graph=k < 2)[0] for k in range(3)]
    assert all(torch.equal(grad, 2 * WEIGHT.cos()) for grad in grads)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_argument_of_an_outer_grad_that_shards_close_over_has_its_gradient(
    requires_grad: bool, devices
) -> None:
    leaf = WEIGHT.clone().requires_grad_(requires_grad)

    def by_closure(w: torch.Tensor) -> torch.Tensor:
        return sum(out.mean() for out in fp.parallel_call(lambda x: (x @ w).sin(), [ROWS[:6], ROWS[6:]]))

    def by_argument(w: torch.Tensor) -> torch.Tensor:
        return sum((x @ w).sin().mean() for x in (ROWS[:6], ROWS[6:]))

    torch.testing.assert_close(fp.grad(by_closure)(leaf), fp.grad(by_argument)(leaf))


def test_closed_over_tensor_between_leaf_and_shards_is_never_left_out_in_silence(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    hidden = 2 * leaf
    outs = fp.parallel_call(lambda x: (x @ hidden).sin(), [ROWS[:6], ROWS[6:]])
    sum(out.sum() for out in outs).backward()
    want = (ROWS @ hidden.detach()).cos() @ ROWS
    torch.testing.assert_close(leaf.grad, 2 * want)
    outs = fp.parallel_call(lambda x: (x @ hidden).sin(), [ROWS[:6], ROWS[6:]])
    (got,) = torch.autograd.grad(sum(out.sum() for out in outs), hidden)
    torch.testing.assert_close(got, want)
    if len(devices) > 1:
        hidden.retain_grad()
        with pytest.raises(ValueError, match="has a hook or retains its gradient"):
            fp.parallel_call(lambda x: (x @ hidden).sin(), [ROWS[:6], ROWS[6:]])


def test_hook_of_a_closed_over_tensor_sees_the_whole_gradient_once_or_is_refused(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    hidden = 2 * leaf
    hidden.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    (want,) = torch.autograd.grad((ROWS @ hidden).sin().sum(), leaf, retain_graph=True)
    try:
        outs = fp.parallel_call(lambda x: (x @ hidden).sin(), [ROWS[:6], ROWS[6:]])
        (got,) = torch.autograd.grad(sum(out.sum() for out in outs), leaf)
    except ValueError as error:
        assert "Pass it as an argument" in str(error)
    else:
        torch.testing.assert_close(got, want)


def test_hook_of_a_closed_over_leaf_is_refused(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    leaf.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    with pytest.raises(ValueError, match=r"closes over a tensor of shape \(3,\) .* and has a hook"):
        fp.parallel_call(lambda x: x @ leaf, [ROWS[:6], ROWS[6:]])


def test_no_graph_is_made_where_the_caller_makes_none(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    with torch.no_grad():
        assert not any(out.requires_grad for out in fp.parallel_call(torch.sin, [leaf, leaf]))
    with torch.inference_mode():
        assert all(out.is_inference() for out in fp.parallel_call(torch.sin, [leaf, leaf]))


@pytest.mark.parametrize(
    ("funs", "inputs", "devices_given", "kind", "message"),
    [
        (
            [abs, abs],
            [1, 2, 3],
            None,
            ValueError,
            r"^parallel_call: 2 functions and 3 argument trees.\nGive one argument tree per function.$",
        ),
        ([], [1], None, ValueError, r"0 functions and 1 argument trees"),
        (
            abs,
            torch.ones(3),
            None,
            TypeError,
            r"^parallel_call: inputs is a Tensor, not a sequence.\n"
            r"Give a list with one argument tree per shard.$",
        ),
        (abs, {0: 1}, None, TypeError, r"inputs is a dict, not a sequence"),
        (abs, "ab", None, TypeError, r"inputs is a str, not a sequence"),
        (abs, 3, None, TypeError, r"inputs is a int, not a sequence"),
        (
            abs,
            [1, 2, 3],
            2,
            ValueError,
            r"^parallel_call: 3 argument trees and 2 devices.\nName one device per argument tree.$",
        ),
        (abs, [1], 5, ValueError, r"^parallel_call: devices=5 asks for 5 devices"),
        (3, [1], None, TypeError, r"^parallel_call: "),
        ([abs, 3], [1, 2], None, TypeError, r"^parallel_call: "),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_runs(
    funs: Any, inputs: Any, devices_given: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        fp.parallel_call(funs, inputs, devices_given)


def test_failure_has_a_note_that_names_the_shard() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fp.parallel_call(lambda x: 1 // x, [1, 2, 0])
    assert caught.value.__notes__ == ["raised in shard 2 of 3 on cpu[2], in parallel_call"]


def test_closed_over_function_of_an_argument_is_never_left_out_in_silence(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    hidden = 2 * leaf
    scale = hidden.sum()
    want = torch.autograd.grad(((ROWS @ hidden) * scale).sum(), hidden, retain_graph=True)
    try:
        outs = fp.parallel_call(lambda h, x: (x @ h) * scale, [(hidden, ROWS[:6]), (hidden, ROWS[6:])])
        got = torch.autograd.grad(sum(out.sum() for out in outs), hidden)
    except (ValueError, RuntimeError) as error:
        assert "argument" in str(error)
    else:
        torch.testing.assert_close(got, want)


def test_weights_are_those_of_pmean_and_one_per_shard() -> None:
    inputs = [torch.tensor(1.0), torch.tensor(4.0)]
    means = fp.parallel_call(fp.pmean, inputs, weights=[3, 1])
    assert [mean.item() for mean in means] == [1.75, 1.75]
    with pytest.raises(ValueError, match=r"parallel_call: 2 argument trees and 1 weights\.\nGive one weight"):
        fp.parallel_call(fp.pmean, inputs, weights=[1])


def test_a_tensor_that_shards_share_is_not_written_to_in_silence() -> None:
    shared = torch.ones(3)
    with pytest.raises(ValueError, match=r"shape \(3,\), which the shards share, was written to in place"):
        fp.parallel_call(lambda w, x: w.mul_(0.5) * x, [(shared, 1.0), (shared, 2.0)])
    named = fp.pmap(lambda params, x: params["w"].mul_(0.5) * x.sum(), devices=2)
    with pytest.raises(ValueError, match=r"pmap\(<lambda>\): params\['w'\], which the shards share"):
        named({"w": torch.ones(3)}, torch.ones(4))
