"""Derivatives of collectives are exact, of every order, kind and dtype, wherever they are taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import funcpar as fp
from funcpar import tree

# Torch's own, where forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

# On a shard's vector of one entry per shard.
COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": fp.psum,
    "pmean": fp.pmean,
    "all_gather": fp.all_gather,
    "all_gather tiled": lambda x: fp.all_gather(x, tiled=True),
    "psum_scatter": lambda x: fp.psum_scatter(x)[None],
    "psum_scatter tiled": lambda x: fp.psum_scatter(x, tiled=True),
    "all_to_all": fp.all_to_all,
    "all_to_all tiled": lambda x: fp.all_to_all(x, tiled=True),
    "ppermute": lambda x: fp.ppermute(x, perm=[(0, 1)]),
    "pshuffle": lambda x: fp.pshuffle(x, perm=list(range(fp.axis_size()))[::-1]),
    "pswapaxes": fp.pswapaxes,
    "pbroadcast": lambda x: fp.pbroadcast(x, source=1),
}
every_collective = pytest.mark.parametrize("call", COLLECTIVES.values(), ids=COLLECTIVES)
GRADS = {"fp": fp.grad, "torch.func": torch.func.grad}
every_grad = pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)


def rows(size: int) -> Tensor:
    """Return one row for each of `size` shards."""
    return torch.linspace(0.1, 1.3, size * size, dtype=torch.float64).reshape(size, size)


def curved(call: Callable[[Tensor], Tensor], size: int) -> Callable[[Tensor], Tensor]:
    """Return a nonlinear function of all rows around a collective."""
    return fp.pmap(
        lambda x: (call(x[0].sin()) ** 2 * (1 + fp.axis_index()))[None], in_axes=0, out_axes=0, devices=size
    )


@pytest.mark.parametrize("size", [2, 3])
@every_collective
def test_derivatives_agree_with_finite_differences(call: Callable[[Tensor], Tensor], size: int):
    mapped, x = curved(call, size), rows(size).requires_grad_()
    assert gradcheck(mapped, (x,), check_forward_ad=True, check_batched_grad=False)
    assert gradgradcheck(mapped, (x,))


@every_collective
def test_a_hessian_by_torch_func_is_that_by_autograd(call: Callable[[Tensor], Tensor]):
    mapped, x = curved(call, 2), rows(2)
    loss = lambda x: mapped(x).sum()
    expected = torch.autograd.functional.hessian(loss, x)
    for found in (torch.func.hessian(loss)(x), torch.func.jacrev(torch.func.jacrev(loss))(x)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every_grad
@every_collective
def test_a_gradient_inside_is_that_of_the_sum_of_all_losses(call: Callable[[Tensor], Tensor], grad: Any):
    def loss(x: Tensor) -> Tensor:
        return (call(x.sin()) ** 2).sum() * (1 + fp.axis_index())

    inside = fp.pmap(lambda x: grad(loss)(x[0])[None], in_axes=0, out_axes=0, devices=3)
    total = fp.pmap(lambda x: loss(x[0]), in_axes=0, out_axes="sum", devices=3)
    expected = fp.grad(total)(rows(3))
    torch.testing.assert_close(inside(rows(3)), expected, rtol=1e-12, atol=1e-12)


@every_grad
@every_collective
def test_a_second_derivative_inside_agrees_by_both_ways(call: Callable[[Tensor], Tensor], grad: Any):
    def slope(x: Tensor) -> Tensor:
        return (grad(lambda a: (call(a.sin()) ** 2).sum())(x) ** 2).sum()

    inside = fp.pmap(lambda x: grad(slope)(x[0])[None], in_axes=0, out_axes=0, devices=2)
    outside = fp.grad(fp.pmap(lambda x: slope(x[0]), in_axes=0, out_axes="sum", devices=2))
    torch.testing.assert_close(inside(rows(2)), outside(rows(2)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "turns"), [(fp.psum, 50), (torch.sum, 300)], ids=["with a collective", "alone"]
)
def test_a_tangent_inside_is_right_every_time(call: Callable[[Tensor], Tensor], turns: int, hurried):
    # Torch's level of forward mode is one for the process: a shard that leaves it leaves it for all.
    def body(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda a: call(a.sin()) * a, (x,), (torch.ones_like(x),))[1]

    x = rows(4)[0]
    total, slope = (x.sin(), x.cos()) if call is torch.sum else (x.sin().sum(), x.cos().sum())
    for _ in range(turns):
        torch.testing.assert_close(fp.pmap(body, in_axes=0, out_axes=0)(x), total + x * slope)


# The law holds through collectives: rows are normalised by the statistics of all of them.
def sync_norm_loss(w: Tensor, x: Tensor) -> Tensor:
    mean = fp.pmean(x.mean(0))
    variance = fp.pmean(((x - mean) ** 2).mean(0))
    return ((((x - mean) / (variance + 1e-3).sqrt()) @ w).tanh() ** 2).mean()


def norm_loss(w: Tensor, x: Tensor) -> Tensor:
    return ((((x - x.mean(0)) / (x.var(0, correction=0) + 1e-3).sqrt()) @ w).tanh() ** 2).mean()


GAMMA = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)
BATCH = torch.linspace(-3, 3, 39, dtype=torch.float64).sin().reshape(13, 3)


@pytest.mark.parametrize("num_rows", [2, 4, 7, 13])
def test_a_loss_with_collectives_has_the_gradient_of_the_whole_batch(devices, num_rows: int):
    w, x = GAMMA, BATCH[:num_rows]
    expected = fp.grad(norm_loss, (0, 1))(w, x)
    ways = {
        "fused": fp.pmap(fp.grad(sync_norm_loss, (0, 1))),
        "fp": fp.grad(fp.pmap(sync_norm_loss), (0, 1)),
        "torch.func": torch.func.grad(fp.pmap(sync_norm_loss), (0, 1)),
    }
    for name, way in ways.items():
        for found, wanted in zip(way(w, x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("outer", GRADS.values(), ids=GRADS)
def test_a_loss_with_collectives_has_the_second_derivative_of_the_whole_batch(devices, outer: Any):
    plain = torch.func.grad(lambda w: (torch.func.grad(norm_loss)(w, BATCH) ** 2).sum())(GAMMA)
    inner = {
        "outside": (torch.func.grad if outer is torch.func.grad else fp.grad)(fp.pmap(sync_norm_loss)),
        "fused": fp.pmap(fp.grad(sync_norm_loss)),
    }
    for name, slope in inner.items():
        if outer is torch.func.grad and name == "fused" and len(devices) > 1:
            with pytest.raises(
                RuntimeError, match=r"Take the outer derivative with fp.grad or .backward\(\)"
            ):
                outer(lambda w: (slope(w, BATCH) ** 2).sum())(GAMMA)
            continue
        found = outer(lambda w: (slope(w, BATCH) ** 2).sum())(GAMMA)
        torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-12, msg=name)


def test_backward_runs_as_often_as_it_is_asked_to():
    x = rows(3).requires_grad_()
    out = curved(fp.psum, 3)(x).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@every_grad
@pytest.mark.parametrize("reader", [0, 1, 2])
def test_a_shard_whose_loss_does_not_use_a_collective_still_serves_the_others(grad: Any, reader: int):
    def loss(x: Tensor) -> Tensor:
        total = fp.psum((x**3).sum())
        return total * x.sum() if fp.axis_index() == reader else x.sum()

    x = rows(3)
    y = x.clone().requires_grad_()
    parts = y.sum(1)
    expected = torch.autograd.grad((y**3).sum() * parts[reader] + parts.sum() - parts[reader], y)[0]
    if grad is fp.grad:  # torch.func offers no way to run what a shard does not need itself.
        inside = fp.pmap(lambda x: grad(loss)(x[0])[None], in_axes=0, out_axes=0, devices=3)
        torch.testing.assert_close(inside(x), expected, rtol=1e-12, atol=1e-12)
    outside = grad(fp.pmap(lambda x: loss(x[0]), in_axes=0, out_axes="sum", devices=3))
    torch.testing.assert_close(outside(x), expected, rtol=1e-12, atol=1e-12)
    fused = fp.pmap(fp.grad(lambda x: loss(x[0])), in_axes=0, out_axes="sum", devices=3)
    torch.testing.assert_close(fused(x), expected, rtol=1e-12, atol=1e-12)


def test_an_unused_collective_costs_no_gradient():
    x = rows(2)
    inside = fp.pmap(fp.grad(lambda x: (fp.psum(x), x.sum())[1]), in_axes=0, out_axes="sum", devices=2)
    assert torch.equal(inside(x), torch.ones_like(x))


def test_only_some_leaves_and_some_shards_require_gradients():
    def loss(x: Tensor) -> Tensor:
        given = {"a": x, "b": torch.ones(2, dtype=x.dtype), "c": None, "k": torch.tensor([3])}
        if fp.axis_index() == 1:
            given["a"] = x.detach()
        out = fp.psum(given)
        return (out["a"] * out["b"]).sum() * out["k"][0]

    x = rows(2)
    found = fp.pmap(fp.grad(lambda x: loss(x[0])), in_axes=0, out_axes="sum", devices=2)(x)
    assert torch.equal(found, torch.tensor([[24.0, 24.0], [0.0, 0.0]], dtype=torch.float64))


def _block(x: Tensor) -> Tensor:
    return (x - fp.pmean(x.mean(0))).sin() * fp.psum((x**2).sum())


@pytest.mark.parametrize("way", ["fused", "inside", "outside"])
def test_checkpointing_in_the_body_changes_nothing(devices, way: str):
    def gradient(block: Callable[[Tensor], Tensor]) -> Tensor:
        loss = lambda x: (block(x) ** 2).mean()
        if way == "outside":
            return fp.grad(fp.pmap(loss, in_axes=0))(BATCH)
        if way == "fused":
            return fp.pmap(fp.grad(loss), in_axes=0)(BATCH)
        return fp.pmap(lambda x: fp.grad(loss)(x), in_axes=0, out_axes=0)(BATCH)  # noqa: PLW0108

    kept = gradient(lambda x: checkpoint(_block, x, use_reentrant=False))
    torch.testing.assert_close(kept, gradient(_block), rtol=1e-12, atol=1e-12)


def test_a_reentrant_checkpoint_is_refused_and_frees_every_shard():
    loss = lambda x: (checkpoint(_block, x, use_reentrant=True) ** 2).mean()
    with pytest.raises(RuntimeError, match=r"use_reentrant=True.*incompatible with .grad\(\)"):
        fp.pmap(fp.grad(loss), in_axes=0)(BATCH)
    assert fp.pmap(fp.psum, in_axes=0, out_axes=None)(torch.ones(4)).tolist() == [4.0]


def test_a_checkpoint_that_one_shard_alone_recomputes_is_a_mismatch():
    def loss(x: Tensor) -> Tensor:
        out = checkpoint(_block, x, use_reentrant=False)
        return out.sum() if fp.axis_index() == 0 else x.sum()

    with pytest.raises(
        fp.ReplicaMismatchError, match=r"shard 0 called pmean.*\n.*called the transpose of psum"
    ):
        fp.pmap(fp.grad(loss), in_axes=0)(BATCH)


@every_collective
def test_vmap_in_the_body_is_one_call_of_the_batch(call: Callable[[Tensor], Tensor]):
    x = torch.arange(18.0).reshape(3, 2, 3)  # Shard, batch, entry.
    batched = fp.pmap(lambda x: torch.func.vmap(call)(x[0])[None], in_axes=0, out_axes=0, devices=3)
    single = fp.pmap(lambda x: call(x[0])[None], in_axes=0, out_axes=0, devices=3)
    expected = torch.stack([single(x[:, k]) for k in range(2)], 1)
    assert torch.equal(batched(x), expected)
    over_last = fp.pmap(
        lambda x: torch.func.vmap(call, in_dims=1, out_dims=-1)(x[0])[None], in_axes=0, out_axes=0, devices=3
    )
    assert torch.equal(over_last(x.mT), expected.movedim(1, -1))


@every_collective
def test_per_sample_gradients_in_the_body_pass_through_collectives(call: Callable[[Tensor], Tensor]):
    slope = torch.func.grad(lambda a: (call(a.sin()) ** 2).sum())
    x = torch.linspace(0, 1, 18, dtype=torch.float64).reshape(3, 2, 3)
    batched = fp.pmap(lambda x: torch.func.vmap(slope)(x[0])[None], in_axes=0, out_axes=0, devices=3)
    single = fp.pmap(lambda x: slope(x[0])[None], in_axes=0, out_axes=0, devices=3)
    expected = torch.stack([single(x[:, k]) for k in range(2)], 1)
    torch.testing.assert_close(batched(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
@every_collective
def test_gradients_keep_the_dtype(call: Callable[[Tensor], Tensor], dtype: torch.dtype):
    x = torch.tensor([[1, 2], [3, 4]], dtype=dtype)
    x = x * (1 + 1j) if dtype.is_complex else x

    def loss(x: Tensor) -> Tensor:
        out = call(x[0])
        return torch.view_as_real(out).sum() if dtype.is_complex else out.sum()

    found = fp.pmap(fp.grad(loss), in_axes=0, out_axes="sum", devices=2)(x)
    outside = fp.grad(fp.pmap(loss, in_axes=0, out_axes="sum", devices=2))(x)
    under = torch.func.grad(fp.pmap(loss, in_axes=0, out_axes="sum", devices=2))(x)
    assert found.dtype == outside.dtype == under.dtype == dtype
    assert torch.equal(found, outside)
    assert torch.equal(found, under)
    wide = fp.pmap(fp.grad(lambda x: call(x[0]).sum()), in_axes=0, out_axes="sum", devices=2)(rows(2))
    assert torch.equal(found.real.to(torch.float64), wide)


def test_a_tree_of_all_kinds_of_leaves_is_communicated_whole():
    def body(x: Tensor) -> Any:
        rank = fp.axis_index()
        given = {
            "half": torch.full((2,), 1.5 + rank, dtype=torch.bfloat16),
            "complex": torch.full((2,), rank * 1j),
            "int": torch.full((2,), rank, dtype=torch.int8),
            "bool": torch.tensor([True, rank == 0]),
            "none": None,
            "number": 2,
            "float": 0.5,
            "nested": [(x, None), []],
        }
        return {name: fp.psum(given)[name] for name in given}

    found = fp.pmap(body, in_axes=0, out_axes=None, devices=3)(torch.ones(3))
    assert found["half"].dtype == torch.bfloat16
    assert found["half"].tolist() == [7.5, 7.5]
    assert found["complex"].tolist() == [3j, 3j]
    assert (found["int"].dtype, found["int"].tolist()) == (torch.int8, [3, 3])
    assert (found["bool"].dtype, found["bool"].tolist()) == (torch.int64, [3, 1])
    assert found["none"] is None
    assert (found["number"], type(found["number"])) == (6, int)
    assert (found["float"], type(found["float"])) == (1.5, float)
    assert tree.leaves(found["nested"])[0].tolist() == [3.0]
    assert found["nested"] == [(found["nested"][0][0], None), []]


@every_grad
def test_dicts_agree_by_key_whatever_their_order(grad: Any):
    def loss(x: Tensor) -> Tensor:
        pairs = [("a", x), ("b", {"p": x**2, "q": 2 * x}), ("c", x**3)]
        inner = dict(reversed(pairs[1][1].items()))
        given = dict(pairs) if fp.axis_index() != 1 else dict([pairs[2], ("b", inner), pairs[0]])
        out = fp.psum(given)
        assert list(out) == list(given)
        return (out["a"] * 5 + out["b"]["p"] * 7 + out["b"]["q"] * 11 + out["c"] * 13).sum()

    x = rows(3)
    expected = 3 * (5 + 14 * x + 22 + 39 * x**2)
    inside = fp.pmap(lambda x: grad(loss)(x[0])[None], in_axes=0, out_axes=0, devices=3)
    outside = grad(fp.pmap(lambda x: loss(x[0]), in_axes=0, out_axes="sum", devices=3))
    for way in (inside, outside):
        torch.testing.assert_close(way(x), expected, rtol=1e-12, atol=1e-12)
