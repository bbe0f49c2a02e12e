"""donate_argnums: what results and graphs need of donated tensors stays what it was."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcpar as fp


def check_same(fun, *args, **options):
    """Check that a call returns the same with the first two arguments donated, and that it lives."""
    wanted = fp.tree.leaves(fp.pmap(fun, **options)(*fp.tree.map(torch.clone, list(args))))
    found = fp.tree.leaves(fp.pmap(fun, donate_argnums=(0, 1), **options)(*args))
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is torch.Tensor
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "in_axes", "out_axes"),
    [
        (size, in_axes, out_axes)
        for size in (1, 2, 4)
        for in_axes in (0, (None, None, 0))
        for out_axes in ("auto", 0, None, "mean", "sum", "stack")
        if not (size > 1 and in_axes == 0 and out_axes is None)  # Rows are not equal on all shards.
    ],
)
def test_a_donated_tensor_that_is_returned_is_not_written_to(size, in_axes, out_axes):
    given = torch.ones(4, 1), torch.arange(4.0)[:, None].clone(), torch.ones(4)
    check_same(
        lambda a, b, x: (2 * a - b, a, a), *given, in_axes=in_axes, out_axes=out_axes, devices=size
    )  # fmt: skip


@pytest.mark.parametrize("in_axes", [0, (None, None, 0)])
def test_a_donated_tensor_that_compiled_code_returns_is_not_written_to(in_axes):
    given = torch.ones(4, 1), torch.zeros(4, 1), torch.ones(4)
    check_same(lambda a, b, x: (2 * a - b, a), *given, in_axes=in_axes, devices=1, compile=True)


def test_a_value_is_not_written_to_a_parameter_that_aux_returns(devices):
    fun = fp.value_and_grad(lambda p, q, x: (p * x.mean() + q, (p, q)), has_aux=True)
    check_same(fun, torch.tensor(3.0), torch.tensor(5.0), torch.arange(4.0), in_axes=(None, None, 0))


def test_a_gradient_is_not_written_to_a_parameter_that_aux_returns(devices):
    fun = fp.value_and_grad(lambda p, q, x: ((p * q).sum() * x.mean(), (p, {"q": q})), has_aux=True)
    given = torch.arange(3.0), torch.ones(3), torch.arange(4.0)
    check_same(fun, *given, in_axes=(None, None, 0))


def test_nothing_is_written_while_the_function_still_runs(devices):
    inner = fp.value_and_grad(lambda p, q, x: p * x.mean() + q)

    def around(p, q, x):
        value, _ = inner(p, q, x)  # The value of all shards.
        return value + 10 * p + 100 * q

    check_same(around, torch.tensor(3.0), torch.tensor(5.0), torch.arange(12.0), in_axes=(None, None, 0))


def test_rows_that_one_shard_returns_twice_are_two_results_one_in_the_old_memory():
    x = torch.ones(4)
    before = x.data_ptr()
    one, other = fp.pmap(lambda x: (x.add_(1), x), in_axes=0, devices=1, donate_argnums=0)(x)
    assert one.data_ptr() == before
    assert other.data_ptr() != before
    assert torch.equal(one, other)


@pytest.mark.parametrize("nested", [False, True])
def test_parts_that_are_a_donated_argument_live_on(nested, devices):
    out_axes = ["shards", None] if nested else "shards"
    out = fp.pmap(lambda p, x: [p, p + 1] if nested else p, out_axes=out_axes, donate_argnums=0)(
        torch.ones(2), torch.ones(4)
    )
    for part in (out[0] if nested else out).parts:
        assert type(part) is torch.Tensor
        assert torch.equal(part, torch.ones(2))


class Product(torch.autograd.Function):
    """A product whose backward, in Python, has what it saved in both ways."""

    @staticmethod
    def forward(ctx, w, p):
        ctx.save_for_backward(p)
        ctx.w = w
        return w * p

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        return grad * p.reshape(p.shape), grad * ctx.w


PRODUCTS = {
    "torch's": lambda w, p: w * p,
    "a custom function's": Product.apply,
    "a checkpoint's": lambda w, p: checkpoint(torch.mul, w, p, use_reentrant=False),
}


@pytest.mark.parametrize(
    ("kind", "compiled"), [*((kind, False) for kind in PRODUCTS), ("torch's", True), ("a checkpoint's", True)]
)
def test_a_graph_that_saved_a_donated_tensor_has_it_in_backward(kind, compiled):
    for size in (1,) if compiled else (1, 3):
        w, p = torch.ones(1, requires_grad=True), torch.full((1,), 3.0)
        fun = fp.pmap(
            lambda p, w, x: ((x * PRODUCTS[kind](w, p)).sum(1), p * 2, p),
            in_axes=(None, None, 0), devices=size, donate_argnums=0, compile=compiled,
        )  # fmt: skip
        out, _, same = fun(p, w, torch.ones(4, 2))
        with pytest.raises(RuntimeError, match="p was donated to this call"):
            p.sum()
        out.sum().backward()
        assert w.grad.item() == 24
        assert same.item() == 3


def test_a_graph_beside_the_results_keeps_what_it_saved(devices):
    w, p, kept = torch.ones(2, requires_grad=True), torch.full((2,), 3.0), []

    def fun(p, x):
        with torch.enable_grad():
            kept.append((w.detach().requires_grad_(), p))
            kept.append((kept[-1][0] * p).sum())
            return (2 * p).detach()

    out = fp.pmap(fun, out_axes=None, devices=1, donate_argnums=0)(p, torch.ones(4))
    kept[1].backward()
    assert torch.equal(kept[0][0].grad, torch.full((2,), 3.0))
    assert torch.equal(out, torch.full((2,), 6.0))


def test_what_was_donated_cannot_be_given_again():
    step = fp.pmap(lambda p, x: fp.tree.map(lambda t: 2 * t, p), out_axes=None, donate_argnums=0)
    p, x = {"w": torch.ones(2), "b": torch.ones(3)}, torch.ones(4)
    step(p, x)
    with pytest.raises(
        RuntimeError, match=r"to an earlier call:\n  p\['w'\]  as .*\n  p\['b'\]  as p\['b'\], to"
    ):
        step(p, x)
    with pytest.raises(
        RuntimeError, match=r"\n  q  as p\['w'\], to pmap\(<lambda>\)\nUse what the call returned"
    ):
        fp.pmap(lambda x, q: x * q, in_axes=(0, None), donate_argnums=0)(x, p["w"])


def test_a_tensor_that_is_closed_over_and_donated_later_says_so_in_the_next_call():
    w = torch.ones(4)
    fun = fp.pmap(lambda x: x * w.sum(), in_axes=0, donate_argnums=0)
    fun(torch.ones(4))
    fun(w)
    with pytest.raises(
        RuntimeError, match=r"x was donated to this call.*\n.* closes over this must take as an"
    ):
        fun(torch.ones(4))


def test_what_a_failed_merge_had_used_says_that_the_call_failed():
    fun = fp.pmap(
        lambda x: (2 * x, fp.axis_index() + x.mean()),
        in_axes=0,
        out_axes=(0, None),
        donate_argnums=0,
        devices=2,
    )
    x = torch.ones(4)
    with pytest.raises(fp.ReplicaMismatchError):
        fun(x)
    with pytest.raises(RuntimeError, match=r"x was donated to this call, which failed when.*\nMake it again"):
        x.sum()


def seconds(size: int, **options) -> float:
    fun = fp.pmap(lambda p, x: p, out_axes=None, devices=2, **options)
    found = []
    for _ in range(5):
        p, x = [torch.ones(1) for _ in range(size)], torch.ones(2)
        start = time.process_time()
        fun(p, x)
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize("donated", [(), 0])
def test_returned_parameters_cost_what_they_are_many(donated):
    # A cost of their square would be 16 times as much.
    assert seconds(1600, donate_argnums=donated) < 8 * seconds(400, donate_argnums=donated)
