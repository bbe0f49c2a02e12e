"""What went wrong with jax.pmap and its kin: how calls are bound, split, nested and repeated."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def message_of(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# What a call says when its arguments do not fit.


def test_other_rows_are_told_by_path_size_and_fix():  # JX-01
    params = {"dense": {"kernel": rand(3, 2), "bias": rand(2)}}
    told = message_of(lambda: fp.pmap(lambda x, params: x, in_axes=0)(rand(8, 3), params))
    assert told.splitlines()[1:] == [
        "  x                          in_axes=0  8 rows",
        "  params['dense']['kernel']  in_axes=0  3 rows",
        "  params['dense']['bias']    in_axes=0  2 rows",
        "Give every mapped leaf the same size there, or replicate it with in_axes=None.",
    ]


@pytest.mark.parametrize("wrong", [0, 57, 99])
def test_one_leaf_of_a_hundred_is_named_in_a_short_message(wrong):  # JX-01
    batch = {f"leaf{k}": rand(7 if k == wrong else 8, 1) for k in range(100)}
    told = message_of(lambda: fp.pmap(lambda batch: batch, in_axes=0)(batch))
    assert len(told.splitlines()) < 30
    assert f"batch['leaf{wrong}']" in told
    assert "7 rows" in told and "8 rows" in told


def test_scalars_are_replicated_and_a_missing_dimension_is_named():  # JX-02
    x = rand(5)
    assert_close(fp.pmap(lambda x, k: x * k, in_axes=0)(x, 10), x * 10)
    assert_close(fp.pmap(lambda x, k: x * k, in_axes=(0, 1))(x, torch.tensor(10)), x * 10)
    told = message_of(lambda: fp.pmap(lambda w, b: w, in_axes=(None, 1))(x, {"y": [x]}))
    assert "b['y'][0] has 1 dimensions, and in_axes splits it along dimension 1" in told
    assert "from -1 to 0, or None" in told


def test_names_and_positions_fail_with_the_same_words():  # JX-03
    mapped = fp.pmap(lambda x, y: x + y, in_axes=0)
    for y, kind in ((rand(4), ValueError), (np.ones(5), TypeError), ({"a": {1, 2}}, TypeError)):
        by_position = message_of(lambda y=y: mapped(rand(5), y), kind)
        assert by_position == message_of(lambda y=y: mapped(rand(5), y=y), kind)
        assert by_position == message_of(lambda y=y: mapped(y=y, x=rand(5)), kind)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        mapped(x=rand(5))


def test_five_rows_need_no_five_devices(devices):  # JX-03, JX-21
    x = rand(5, 3)
    assert_close(fp.pmap(lambda x: x * 2, in_axes=0)(x=x), x * 2)
    ten, w, scale = rand(10, 3), rand(3), torch.tensor(2.0, dtype=torch.float64)
    fun = lambda w, x, scale, *, shift: (x @ w) * scale + shift
    mapped = fp.pmap(fun, in_axes={"w": None, "x": 0, "scale": None, "shift": None})
    assert_close(mapped(w, ten, scale, shift=rand(1) * 0 + 3), fun(w, ten, scale, shift=3))


@pytest.mark.parametrize("rows", [1, 2, 6, 31, 107])
def test_metrics_of_a_partial_last_batch_need_no_padding(devices, rows):  # JX-04
    model = nn.Linear(3, 4).double()
    apply, params = fp.functionalize(model)

    def evaluate(params: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = apply(params, x)
        hits = logits.argmax(1) == y
        return {
            "loss": nn.functional.cross_entropy(logits, y),
            "accuracy": hits.double().mean(),
            "hits": hits,
        }

    x, y = rand(rows, 3), torch.arange(rows) % 4
    assert_close(fp.pmap(evaluate)(params, x, y), evaluate(params, x, y))


def test_a_call_without_rows_runs_once_per_named_device_or_says_how():  # JX-05
    seen: list[int] = []
    ones = lambda **kwargs: (seen.append(1), torch.ones(3))[1]
    assert_close(fp.pmap(ones, devices=3)(), torch.ones(3))
    assert len(seen) == 3
    assert fp.pmap(ones, devices=3, out_axes="stack")().shape == (3, 3)
    for call in (fp.pmap(ones), fp.pmap(lambda a: a, in_axes=0), fp.pmap(lambda a: a, in_axes=None)):
        args = () if call.__wrapped__ is ones else ({"empty": {}, "none": None, "number": 3},)
        assert "nothing is mapped" in message_of(lambda call=call, args=args: call(*args))
    tree = {"empty": {}, "none": None, "x": rand(5)}
    out = fp.pmap(lambda tree: tree, in_axes=0)(tree)
    assert out["empty"] == {} and out["none"] is None
    assert_close(out["x"], tree["x"])


def test_in_axes_mean_the_same_by_name_and_by_position(devices):  # JX-07
    fun = lambda a, x, *rest, scale=1.0, **more: (x.T * a.sum() * scale).T
    a, x = rand(4), rand(5, 2)
    expected = fun(a, x)
    assert_close(fp.pmap(fun, in_axes=(None, 0))(a, x), expected)
    plain = lambda a, x, scale=1.0: fun(a, x, scale=scale)
    for in_axes in ((None, 0, None), {"x": 0, "a": None}, {"a": None}, "auto", [None, 0, 0]):
        mapped = fp.pmap(plain, in_axes=in_axes)
        assert_close(mapped(a, x=x), expected)
        assert_close(mapped(x=x, a=a), expected)
        assert_close(mapped(a, x, scale=1.0), expected)
    assert_close(fp.pmap(partial(plain, a), in_axes=0)(x), expected)
    assert_close(fp.pmap(partial(plain, scale=2.0))(a, x), 2 * expected)
    columns = fp.pmap(plain, in_axes={"x": -1}, out_axes=1)
    assert_close(columns(a, x=x.T), plain(a, x.T))


@pytest.mark.parametrize("static", [1, (1,), [1]])
def test_static_arguments_go_whole_by_name_or_position_and_count_in_in_axes(devices, static):  # JX-08
    def fun(w: Tensor, config: Any, x: Tensor) -> Tensor:
        assert config is given
        return (x @ w) ** config["power"]

    given = {"power": 2, "table": np.ones(99), "rows": rand(99)}
    w, x = rand(3), rand(5, 3)
    expected = (x @ w) ** 2
    for in_axes in ("auto", (None, None, 0), (None, 0, 0)):
        mapped = fp.pmap(fun, in_axes=in_axes, static_broadcasted_argnums=static)
        assert_close(mapped(w, given, x), expected)
        assert_close(mapped(w, config=given, x=x), expected)
    mode = fp.pmap(lambda w, x, mode: (x @ w) if mode == "linear" else x.sum(1))  # No list is needed.
    assert_close(mode(w, x, mode="linear"), x @ w)


# Gradients.


def test_the_gradient_of_an_output_that_is_equal_everywhere_is_counted_once(devices):  # JX-09
    fun = lambda w, x: (w.square().sum(), torch.tanh(x @ w))
    mapped = fp.pmap(fun, out_axes=(None, 0))
    w, x = rand(3).requires_grad_(), rand(7, 3).requires_grad_()
    assert torch.autograd.gradcheck(mapped, (w, x))

    def mixed(f: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def product(w: Tensor) -> Tensor:
            one, rows = f(w, x)
            return one * rows.mean()

        return product

    for transform in (fp.grad, torch.func.grad):
        assert_close(transform(mixed(mapped))(w), transform(mixed(fun))(w))


def test_gradient_outside_inside_and_plain_agree(devices):  # JX-19, JX-10
    loss = lambda w, x: (x @ w).square().mean() + torch.tanh(x).sum(1).mean()
    w, x = rand(3), rand(13, 3)
    expected = fp.grad(loss, argnums=(0, 1))(w, x)
    assert_close(fp.pmap(fp.grad(loss, argnums=(0, 1)))(w, x), expected)
    assert_close(fp.grad(fp.pmap(loss), argnums=(0, 1))(w, x), expected)


def test_an_argument_given_twice_is_one_leaf_and_nothing_given_is_written(devices):  # JX-18
    w, x = rand(7, 3).requires_grad_(), rand(7, 3)
    before = [w.detach().clone(), x.clone()]
    fun = lambda a, b, x: (a.mean() * b * x).sum(1).mean()
    mapped = fp.pmap(fun)
    got, expected = (torch.autograd.grad(f(w, w, x), w)[0] for f in (mapped, fun))
    assert_close(got, expected)
    step = fp.pmap(lambda w, x: w - 0.1 * x.mean(), out_axes="mean")
    new = step(w.detach(), x)
    new += 1
    assert_close([w.detach(), x], before)


def test_params_keep_their_shapes_inside_and_come_back_as_one_copy(devices):  # JX-25
    def step(params: Any, x: Tensor) -> Any:
        assert {name: tuple(p.shape) for name, p in params.items()} == {"w": (3, 2), "b": (2,)}
        return (x @ params["w"] + params["b"]).square().mean()

    params = {"w": rand(3, 2), "b": rand(2)}
    grads = fp.pmap(fp.grad(step))(params, rand(7, 3))
    assert {name: g.shape for name, g in grads.items()} == {name: p.shape for name, p in params.items()}


# Nesting and repeating.


@pytest.mark.parametrize("in_axes", [0, (None, 0), (0, None), (-1, 0)])
def test_an_inner_call_may_close_over_rows_of_the_outer(devices, in_axes):  # JX-17
    def outer(a: Tensor, b: Tensor) -> Tensor:
        inner = fp.pmap(lambda c: c * a.sum(0, keepdim=True), in_axes=0)  # a is what the outer shard has.
        return inner(b) if a.shape[1] == b.shape[1] else inner(b[:, :1]).sum(1, keepdim=True)

    a, b = rand(6, 6), rand(6, 6)
    fun = lambda a, b: torch.stack([outer(a, row[None]) for row in b])[:, 0]
    if in_axes == (None, 0):
        assert_close(fp.pmap(outer, in_axes=in_axes)(a, b), fun(a, b))
        loss = lambda a, b: outer(a, b).square().mean()
        expected = fp.grad(lambda a, b: (b * a.sum(0)).square().mean(), argnums=(0, 1))(a, b)
        assert_close(fp.pmap(fp.grad(loss, argnums=(0, 1)), in_axes=in_axes)(a, b), expected)
        return
    kept = fp.pmap(outer, in_axes=in_axes, out_axes="shards")(a, b)
    cut = lambda x, axis: [x] * len(devices) if axis is None else list(x.tensor_split(len(devices), axis))
    axes = (in_axes, in_axes) if isinstance(in_axes, int) else in_axes
    for part, mine, theirs in zip(kept.parts, cut(a, axes[0]), cut(b, axes[1]), strict=True):
        assert_close(part, outer(mine, theirs))


def test_many_calls_from_many_threads_neither_hang_nor_mix():  # JX-20
    mapped = fp.pmap(fp.value_and_grad(lambda w, x: (x * w).square().mean()))
    wrong: list[int] = []

    def work(seed: int) -> None:
        w, x = torch.tensor(float(seed), dtype=torch.float64), torch.full((9,), 2.0, dtype=torch.float64)
        for _ in range(60):
            value, grad = mapped(w, x)
            if abs(value - 4 * seed**2) > 1e-9 or abs(grad - 8 * seed) > 1e-9:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_masks_differ_between_shards_and_a_seed_given_inside_is_the_same_in_all():  # JX-23
    x = torch.ones(4, 64)
    masks = fp.pmap(lambda x: nn.functional.dropout(x, 0.5), in_axes=0)(x)
    assert len({tuple(row.tolist()) for row in masks}) == 4

    def shared(x: Tensor) -> Tensor:
        return x * torch.rand(64, generator=torch.Generator().manual_seed(3)).round()

    same = fp.pmap(shared, in_axes=0)(x)
    assert_close(same, shared(x))
    assert len({tuple(row.tolist()) for row in same}) == 1
