"""What went wrong with DataParallel in backward: no such fault in gradients inside and around pmap."""

import threading
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


class FixedPoint(torch.autograd.Function):
    """z = tanh(w z + x), whose backward makes a graph of its own and reads `.grad` of its leaves."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(60):
            z = torch.tanh(z @ w + x)
        ctx.save_for_backward(w, x, z)
        return z

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        w, x, z = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.tanh(z @ w + x)
        solved = cotangent
        for _ in range(60):
            solved = cotangent + torch.autograd.grad(out, z, solved, retain_graph=True)[0]
        out.backward(solved)
        return w.grad, x.grad


def test_a_backward_that_runs_a_backward_gets_real_gradients(devices):  # DP-39
    loss = lambda w, x: FixedPoint.apply(0.1 * w, x).square().mean()
    w, x = rand(3, 3), rand(7, 3)
    expected = fp.grad(loss)(w, x)
    assert expected.abs().sum() > 0
    assert_close(fp.pmap(fp.grad(loss))(w, x), expected)
    w.requires_grad_()
    assert_close(torch.autograd.grad(fp.pmap(loss)(w, x), w)[0], expected)


@pytest.mark.parametrize("how", ["fp.grad", "torch.autograd.grad", "backward"])
def test_gradients_taken_inside_forward_stay_inside(devices, how):  # DP-40
    apply, params = fp.functionalize(mlp())

    def saliency(params: Any, x: Tensor) -> Tensor:
        if how == "fp.grad":
            return fp.grad(lambda x: apply(params, x).sum())(x)
        x = x.detach().requires_grad_()
        out = apply(params, x).sum()
        if how == "torch.autograd.grad":
            return torch.autograd.grad(out, x)[0]
        out.backward()
        return x.grad

    params = {name: p.requires_grad_() for name, p in params.items()}
    x = rand(7, 3)
    expected = fp.grad(lambda x: apply(params, x).sum())(x).detach()
    assert_close(fp.pmap(saliency)(params, x).detach(), expected)
    if len(devices) > 1:
        assert all(p.grad is None for p in params.values())


@pytest.mark.parametrize("inner", ["autograd", "fp", "torch.func"])
def test_a_gradient_penalty_has_the_gradients_of_the_whole_batch(devices, inner):  # DP-55
    apply, params = fp.functionalize(mlp())

    def slope(params: Any, x: Tensor) -> Tensor:
        total = lambda x: apply(params, x).sum()
        if inner == "autograd":
            x = x.detach().requires_grad_()
            return torch.autograd.grad(total(x), x, create_graph=True)[0]
        return {"fp": fp.grad, "torch.func": torch.func.grad}[inner](total)(x)

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).mean() + 10 * (slope(params, x).norm(dim=1) - 1).square().mean()

    x = rand(7, 3)
    expected = fp.grad(loss)(params, x)
    assert_close(fp.pmap(fp.grad(loss))(params, x), expected)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    fp.pmap(loss)(leaves, x).backward()
    assert_close({name: p.grad for name, p in leaves.items()}, expected)


def test_a_penalty_on_the_gradient_of_the_whole_call_is_differentiable_again(devices):  # DP-55, DP-48
    loss = fp.pmap(lambda w, x: torch.tanh(x @ w).square().mean())
    w, x = rand(3).requires_grad_(), rand(7, 3).requires_grad_()
    assert torch.autograd.gradcheck(loss, (w, x))
    assert torch.autograd.gradgradcheck(loss, (w, x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_transforms_work_inside_and_around(devices):  # DP-48, FN-16
    one = lambda w, x: torch.tanh(x @ w).square().sum()
    per_sample = torch.vmap(torch.func.grad(one), (None, 0))
    w, x, v = rand(3, 2), rand(7, 3), rand(3, 2)
    assert_close(fp.pmap(per_sample)(w, x), per_sample(w, x))
    jvp = lambda w, x, v: torch.func.jvp(lambda w: torch.tanh(x @ w), (w,), (v,))
    assert_close(fp.pmap(jvp, in_axes=(None, 0, None))(w, x, v), jvp(w, x, v))
    jacobian = lambda w, x: torch.func.jacfwd(lambda w: torch.tanh(x @ w))(w)
    assert_close(fp.pmap(jacobian)(w, x), jacobian(w, x))
    whole = lambda w, x: torch.tanh(x @ w).square().mean()
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        assert_close(transform(fp.pmap(whole))(w, x), transform(whole)(w, x))
    many = torch.stack([w, v])
    around = torch.vmap(torch.func.grad(fp.pmap(whole)), (0, None))
    assert_close(around(many, x), torch.vmap(torch.func.grad(whole), (0, None))(many, x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_forward_mode_in_a_shard_outlives_that_of_another_shard():  # DP-48, FN-16
    first_is_in, first_is_out = threading.Event(), threading.Event()

    def tangent(w: Tensor, x: Tensor) -> Tensor:
        def fun(w: Tensor) -> Tensor:
            if x[0] == 0:
                first_is_in.set()
                second_is_in.wait(5)
            else:
                second_is_in.set()
                first_is_out.wait(5)
            return x * w

        if x[0] != 0:
            first_is_in.wait(5)
        out = torch.func.jvp(fun, (w,), (torch.ones_like(w),))[1]
        if x[0] == 0:
            first_is_out.set()
        return out

    second_is_in = threading.Event()
    w, x = torch.ones((), dtype=torch.float64), torch.arange(4, dtype=torch.float64)
    torch.func.jvp(torch.sin, (w,), (w,))  # What torch imports at the first use.
    assert_close(fp.pmap(tangent, devices=2)(w, x), x)


def masked_loss(w: Tensor, x: Tensor, kept: bool, use_reentrant: bool = False) -> Tensor:
    block = lambda x: nn.functional.dropout(torch.tanh(x @ w), 0.5)
    return (block(x) if kept else checkpoint(block, x, use_reentrant=use_reentrant)).square().mean()


def test_checkpoints_in_shards_see_the_same_masks_again(devices):  # DP-56
    w, x = rand(3, 8).requires_grad_(), rand(9, 3).requires_grad_()
    grads = []
    for kept in (True, False):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(fp.pmap(masked_loss)(w, x, kept), (w, x)))
    assert_close(*grads)


def test_a_reentrant_checkpoint_in_shards_is_refused_by_torch_itself():  # DP-56
    w, x = rand(3, 8).requires_grad_(), rand(9, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="set use_reentrant=False"):
        fp.pmap(masked_loss)(w, x, False, use_reentrant=True).backward()


def test_only_what_is_asked_for_is_differentiated(devices):  # DP-57
    def loss(trained: Any, frozen: Tensor, x: Tensor) -> Tensor:
        seen.update(
            {"trained": trained["w"].requires_grad, "frozen": frozen.requires_grad, "x": x.requires_grad}
        )
        return (x @ trained["w"] @ frozen).square().mean()

    seen: dict[str, bool] = {}
    trained, frozen, x = {"w": rand(3, 4), "k": 3}, rand(4), rand(7, 3)
    in_axes = (None, None, 0)
    grads = fp.pmap(fp.grad(loss), in_axes=in_axes)(trained, frozen, x)
    assert seen == {"trained": True, "frozen": False, "x": False} and grads["k"] is None
    trained["w"].requires_grad_()
    out = fp.pmap(loss, in_axes=in_axes)(trained, frozen, x)
    assert seen == {"trained": True, "frozen": False, "x": False}
    assert_close(torch.autograd.grad(out, trained["w"])[0], grads["w"])


class WhereBackward(torch.autograd.Function):
    places: ClassVar[dict[float, set[str]]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.key = x.flatten()[0].item()
        WhereBackward.places.setdefault(ctx.key, set()).add(threading.current_thread().name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        WhereBackward.places[ctx.key].add(threading.current_thread().name)
        return cotangent


@pytest.mark.parametrize("how", ["inside", "around"])
def test_backward_of_a_shard_runs_where_its_forward_ran(how):  # DP-59, DP-61
    WhereBackward.places.clear()
    loss = lambda w, x: (WhereBackward.apply(x) * w).square().mean()
    w, x = rand(1).requires_grad_(), rand(8, 1).requires_grad_()
    if how == "inside":
        fp.pmap(fp.grad(loss, argnums=(0, 1)))(w.detach(), x.detach())
    else:
        fp.pmap(loss)(w, x).backward()
    places = list(WhereBackward.places.values())
    assert all(len(place) == 1 for place in places)
    assert set().union(*places) == {f"funcpar-cpu-{rank}" for rank in range(4)}
