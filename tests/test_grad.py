"""grad and value_and_grad, alone and pmapped: structure, ownership, argnums, aux, wrappers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcpar as fp
from funcpar._differentiate import by_autograd
from funcpar._graph import GradientHook
from tests.strategies import Pair, Record, random_tensor

F64 = torch.float64
W, X = random_tensor((3,), F64, 1), random_tensor((13, 3), F64, 2)


def loss(w, x):
    return ((x @ w).tanh() ** 2).mean()


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


PARAMS = Record({"w": W, "unused": torch.ones(2)}, Pair([torch.arange(3), None, 0.5], W.to(torch.complex128)))


def tree_loss(params, x):
    weight = params.x["w"] * params.y.first[2] + params.y.second.abs() + params.y.first[0]
    return loss(weight, x)


@pytest.mark.parametrize("transform", [lambda g: g, fp.pmap], ids=["alone", "pmapped"])
def test_gradients_have_the_structure_of_the_parameters(devices, transform):
    grads = transform(fp.grad(tree_loss))(PARAMS, X)
    assert isinstance(grads, Record)
    assert isinstance(grads.y, Pair)
    assert grads.y.first == [None, None, None]
    assert torch.equal(grads.x["unused"], torch.zeros(2))
    close(grads.x["w"], torch.func.grad(lambda w: tree_loss(Record({"w": w}, PARAMS.y), X))(W))
    assert grads.y.second.dtype is torch.complex128


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), (0, 1, 2), [2]])
def test_every_argnums_gives_what_the_plain_gradient_gives(devices, argnums):
    fun = lambda w, x, scale: loss(w * scale, x)
    scale = torch.tensor(2.0, dtype=F64)
    expected = fp.grad(fun, argnums)(W, X, scale)
    close(fp.pmap(fp.grad(fun, argnums), in_axes=(None, 0, None))(W, X, scale), expected)
    close(fp.grad(fp.pmap(fun, in_axes=(None, 0, None)), argnums)(W, X, scale), expected)
    leaves = [W.clone(), X.clone(), scale.clone()]
    fun(*[leaf.requires_grad_() for leaf in leaves]).backward()
    plain = [leaves[n].grad for n in (argnums if isinstance(argnums, (tuple, list)) else [argnums])]
    close(list(expected) if isinstance(expected, tuple) else [expected], plain)


def test_a_differentiated_argument_may_be_passed_by_name(devices):
    expected = fp.grad(loss, 1)(W, X)
    close(fp.grad(loss, 1)(w=W, x=X), expected)
    close(fp.pmap(fp.grad(loss, 1))(x=X, w=W), expected)


def test_gradients_of_arguments_split_elsewhere_are_joined_there(devices):
    fun = lambda w, x: loss(w, x.T)
    expected = fp.grad(fun, 1)(W, X.T)
    close(fp.pmap(fp.grad(fun, 1), in_axes=(None, -1))(W, X.T), expected)


@pytest.mark.parametrize("has_value", [True, False])
def test_aux_is_merged_by_its_own_spec(devices, has_value):
    fun = lambda w, x: (loss(w, x), {"rows": x @ w, "gram": x.T @ x, "n": x.new_tensor(len(x))})
    transform = fp.value_and_grad if has_value else fp.grad
    spec = {"rows": 0, "gram": "sum", "n": "stack"}
    found = fp.pmap(transform(fun, has_aux=True), out_axes=("mean", spec))(W, X)
    (value, aux), grads = found if has_value else ((None, found[1]), found[0])
    close(grads, fp.grad(loss)(W, X))
    close([aux["rows"], aux["gram"]], [X @ W, X.T @ X])
    assert aux["n"].shape == (len(devices),)
    assert aux["n"].sum() == 13
    if has_value:
        close(value, loss(W, X))
        assert not any(t.requires_grad for t in (value, *aux.values()))


def test_a_sum_value_has_the_gradient_of_the_sum(devices):
    total = lambda w, x: ((x @ w) ** 2).sum()
    found = fp.pmap(fp.value_and_grad(total, (0, 1)), out_axes="sum")(W, X)
    close(found, fp.value_and_grad(total, (0, 1))(W, X))


@pytest.mark.parametrize("spec", ["stack", "shards", None, 0, ("mean", "mean"), {"a": "mean"}])
def test_a_value_that_is_no_mean_or_sum_is_refused(spec):
    with pytest.raises(ValueError, match=r"asks for a value that is neither a mean nor a sum over shards"):
        fp.pmap(fp.value_and_grad(loss), out_axes=spec)


def test_specs_for_value_and_aux_are_asked_for_by_name():
    counting = fp.value_and_grad(lambda w, x: (loss(w, x), (x @ w > 0.3).sum()), has_aux=True)
    fix = r'out_axes=\("mean", "sum"\)\.$'
    with pytest.raises(ValueError, match=rf"is like what value_and_grad\(.*\) returns.*\nGive each.*{fix}"):
        fp.pmap(counting, out_axes=(("mean", "sum"), "auto"))
    with pytest.raises(ValueError, match=rf"aux differs between .*\nSay how.* Value and aux each.*{fix}"):
        fp.pmap(counting, devices=3)(W, X)
    (value, count), grads = fp.pmap(counting, devices=3, out_axes=("mean", "sum"))(W, X)
    close(((value, count), grads), counting(W, X))


def check_step(step, *args):
    close(fp.pmap(step)(*args), fp.value_and_grad(loss)(W, X))


def test_partial_and_wraps_around_a_gradient_function_survive(devices):
    step = fp.value_and_grad(lambda w, x, scale=2.0: loss(w, x) * scale)
    check_step(functools.partial(step, scale=1.0), W, X)

    @functools.wraps(step)
    def logged(*args, **kwargs):
        return step(*args, **kwargs)

    check_step(functools.partial(functools.partial(logged), scale=1.0), W, X)
    bound = functools.partial(fp.value_and_grad(loss), W)
    close(fp.pmap(bound, in_axes=0)(X), fp.value_and_grad(loss)(W, X))


def test_a_wrapper_that_changes_what_it_passes_or_returns_is_right_or_refused(devices):
    step = fp.value_and_grad(loss, (0, 1))

    @functools.wraps(step)
    def in_double(w, x):
        value, grads = step(w.double(), x.double())
        return value * 2, grads

    value, grads = in_double(W, X)
    try:
        found = fp.pmap(in_double)(W, X.float())
    except (TypeError, ValueError) as error:
        assert "in_double" in str(error) or "loss" in str(error)
    else:
        close(found, (value, grads), atol=1e-6)


def test_a_pmap_of_a_pmap_of_a_gradient_is_the_gradient_or_refused(devices):
    try:
        found = fp.pmap(fp.pmap(fp.grad(loss)))(W, X)
    except ValueError as error:
        assert "pmap(fp.grad(f))" in str(error) or "differs between shards" in str(error)
    else:
        close(found, fp.grad(loss)(W, X))


def test_the_same_gradient_function_inside_a_body_is_the_local_gradient(devices):
    local = fp.grad(loss)
    stacked = fp.pmap(lambda w, x: local(w, x) * len(x), out_axes="stack")(W, X)
    close(stacked.sum(0) / 13, local(W, X))


OWN = [fp.grad(loss), fp.pmap(fp.grad(loss)), fp.grad(fp.pmap(loss))]


@pytest.mark.parametrize("grad", OWN, ids=["plain", "pmap(grad)", "grad(pmap)"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradients_are_plain_writable_tensors_that_own_their_storage(devices, grad, requires_grad):
    fun = lambda w, x: (w["a"] + w["b"]).sum() * x.mean() + w["c"].sum()
    make = {0: fp.grad, 1: lambda f: fp.pmap(fp.grad(f)), 2: lambda f: fp.grad(fp.pmap(f))}[OWN.index(grad)]
    params = {name: W.clone().requires_grad_(requires_grad) for name in "abc"}
    with torch.no_grad():
        found = make(fun)(params, X)
    assert all(type(g) is torch.Tensor and g.is_leaf and not g.requires_grad for g in found.values())
    assert len({g.untyped_storage().data_ptr() for g in found.values()}) == 3
    expected = found["b"].clone()
    found["a"] += 1
    assert torch.equal(found["b"], expected)
    assert all(g.stride() == (1,) for g in found.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_whatever_the_callers_mode(devices, mode):
    expected = fp.value_and_grad(loss)(W, X)
    with mode():
        close(fp.value_and_grad(loss)(W, X), expected)
        close(fp.pmap(fp.value_and_grad(loss))(W, X), expected)
        close(fp.value_and_grad(fp.pmap(loss))(W, X), expected)
        assert not fp.pmap(loss)(W.clone().requires_grad_(), X).requires_grad


def test_gradients_are_part_of_the_callers_graph_only_where_something_requires_one(devices):
    w = W.clone().requires_grad_()
    assert not fp.pmap(fp.grad(loss))(W, X).requires_grad
    assert fp.pmap(fp.grad(loss))(w, X).requires_grad
    assert w.grad is None


MISUSE = [
    (lambda w, x: 3.0, TypeError, r"the function returned a float, not a tensor"),
    (lambda w, x: x @ w, ValueError, r"returned a tensor of shape \(\d+,\).*not a real scalar"),
    (lambda w, x: torch.tensor(3), ValueError, r"dtype torch\.int64, not a real scalar"),
    (lambda w, x: (x @ w).sum() * 1j, ValueError, r"dtype torch\.complex128, not a real scalar"),
]


@pytest.mark.parametrize("transform", [lambda g: g, fp.pmap], ids=["alone", "pmapped"])
@pytest.mark.parametrize(("fun", "error", "message"), MISUSE)
def test_what_has_no_gradient_is_refused(fun, error, message, transform):
    with pytest.raises(error, match=r"grad\(<lambda>\): .*" + message):
        transform(fp.grad(fun))(W, X)


def test_wrong_arguments_of_grad_are_refused():
    with pytest.raises(TypeError, match=r"grad: 3 is not callable"):
        fp.grad(3)
    with pytest.raises(TypeError, match=r"value_and_grad\(loss\): argnums='w' is not an integer"):
        fp.value_and_grad(loss, "w")
    with pytest.raises(ValueError, match=r"argnums=2, and the call has 2 positional arguments"):
        fp.grad(loss, 2)(W, X)
    with pytest.raises(TypeError, match=r"must return a pair \(value, aux\)"):
        fp.grad(loss, has_aux=True)(W, X)


def test_the_same_tensor_in_two_arguments_has_two_gradients(devices):
    fun = lambda a, b, x: loss(a * b + a, x)
    expected = (fp.grad(loss)(W * W + W, X) * (W + 1), fp.grad(loss)(W * W + W, X) * W)
    axes = (None, None, 0)
    for w in (W, W.clone().requires_grad_()):
        close(fp.grad(fun, (0, 1))(w, w, X), expected)
        close(fp.pmap(fp.grad(fun, (0, 1)), in_axes=axes)(w, w, X), expected)
        close(fp.grad(fp.pmap(fun, in_axes=axes), (0, 1))(w, w, X), expected)


def test_tied_weights_have_one_summed_gradient(devices):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(3, 3, dtype=F64), torch.nn.Linear(3, 3, dtype=F64)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(self.inner(x).tanh())

    module = Tied()
    apply, params = fp.functionalize(module)
    fun = lambda params, x: apply(params, x).square().mean()
    grads = fp.pmap(fp.grad(fun))(params, X)
    module(X).square().mean().backward()
    close(grads, {name: p.grad for name, p in module.named_parameters()})
    assert sorted(grads) == ["inner.bias", "inner.weight", "outer.bias"]


def test_an_argument_is_named_once_in_argnums():
    with pytest.raises(ValueError, match=r"argnums=\(0, -2\) names one argument twice\.\nName each"):
        fp.grad(lambda w, x: (w * x).sum(), argnums=(0, -2))(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("rows", [12, 13])
def test_rows_that_are_inference_tensors_get_gradients_of_their_own(rows, devices):
    fun = fp.grad(loss, argnums=(0, 1))
    expected = fun(W, X[:rows])
    with torch.inference_mode():
        found = fp.pmap(fun)(W.clone(), X[:rows].clone())
    close(found, expected)


def test_aux_that_depends_on_a_tensor_outside_keeps_its_graph():
    p = torch.tensor(1.0, requires_grad=True)
    (_, aux), _ = fp.value_and_grad(lambda w: ((w**2).sum(), p * 3), has_aux=True)(torch.ones(2))
    aux.backward()
    assert p.grad == 3


def test_a_value_that_is_an_entry_of_an_argument_has_memory_of_its_own():
    w = torch.tensor([2.0, 3.0])
    value, _ = fp.value_and_grad(lambda w: w[0])(w)
    value.add_(5)
    assert w.tolist() == [2, 3]


class RunsABackward(torch.autograd.Function):
    """x, with a backward that differentiates the square of the leaf it was given as well."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.clone()

    @staticmethod
    def backward(ctx, cotangent):
        (w,) = ctx.saved_tensors
        with torch.enable_grad():
            (inner,) = torch.autograd.grad(w.square().sum(), w)
        return cotangent + inner


def test_a_hook_is_told_no_gradient_of_a_backward_within_the_backward():
    told = []
    hook = GradientHook(lambda grad, _: told.append(grad))
    _, _, grads = by_autograd(lambda w: (RunsABackward.apply(w).sum() + w.sum(), None), [W], None, [hook])
    close(grads[0], 2 + 2 * W)
    assert len(told) == 1 and told[0] is grads[0]


def test_a_reentrant_checkpoint_does_not_make_a_gradient_zero_in_silence():
    w, x = (torch.ones(3, requires_grad=True) for _ in range(2))
    hidden = lambda w, x: checkpoint(lambda x: torch.tanh(x * w), x, use_reentrant=True).sum()
    for loss in (fp.grad(hidden), fp.pmap(fp.grad(hidden), out_axes="sum")):
        with pytest.raises(RuntimeError, match=r"use_reentrant"):
            loss(w, x)
