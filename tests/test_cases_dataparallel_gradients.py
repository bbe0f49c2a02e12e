"""What went wrong with DataParallel in backward and in the surroundings of a call."""

import contextvars
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


# Backward.


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
    places: dict[float, set[str]] = {}

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


# The caller's world.

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def state() -> dict[str, Any]:
    mode = torch.utils._python_dispatch._get_current_dispatch_mode
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")},
        "cache": torch.is_autocast_cache_enabled(),
        "matmul": torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype,
        "made": (torch.empty(0).dtype, torch.empty(0).device.type),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch mode": type(mode()),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "variable": variable.get(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


WORLDS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,  # DP-52
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),  # DP-51
    "meta device": lambda: torch.device("meta"),
    "function mode": Functions,
    "dispatch mode": Dispatches,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("name", WORLDS)
def test_shards_see_the_callers_world_and_leave_nothing_behind(name):  # DP-51, DP-52
    seen: list[dict[str, Any]] = []
    look = fp.pmap(lambda x: (seen.append(state()), x)[1], in_axes=0)
    x = rand(8)
    outside = state()
    token = variable.set("mine")
    with WORLDS[name]():
        expected = state()
        look(x)
    variable.reset(token)
    assert seen == [expected] * 4 and expected != outside
    seen.clear()
    look(x)
    assert seen == [outside] * 4


# Failures.


class Fault(Exception):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where


@pytest.mark.parametrize("error", [Fault(3, "here"), SystemExit(4), KeyboardInterrupt(), KeyError("k")])
def test_the_very_exception_of_a_shard_is_raised_with_its_traceback(error):  # DP-53
    def fail(x: Tensor) -> Tensor:
        if x[0] == 4:
            raise error from cause
        if x[0] == 6:
            raise ValueError("second")
        return x

    cause = OSError("disk")
    with pytest.raises(type(error)) as caught:
        fp.pmap(fail, in_axes=0)(torch.arange(8))
    assert caught.value is error and error.__cause__ is cause
    assert caught.traceback[-1].name == "fail"
    notes = "\n".join(error.__notes__)
    assert "raised in shard 2 of 4 on cpu[2], in pmap(fail)" in notes
    assert "shard 3 of 4 failed too: ValueError: second" in notes
    assert torch.equal(fp.pmap(torch.neg, in_axes=0)(torch.ones(4)), -torch.ones(4))


# Devices, threads and random numbers.


def test_virtual_devices_are_threads_of_their_own_that_share_the_cores():  # DP-61, DP-69
    before = torch.get_num_threads()
    fp.set_cpu_devices(3, threads_per_device=2)
    barrier, seen = threading.Barrier(3), set()

    def look(x: Tensor) -> Tensor:
        barrier.wait(20)  # Passes only if all shards are under way at once.
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return x

    fp.pmap(look, in_axes=0)(torch.ones(3))
    assert seen == {(f"funcpar-cpu-{rank}", 2) for rank in range(3)}
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join(20)
    assert [torch.get_num_threads(), *found] == [before, before]


def test_nested_calls_have_one_meaning():  # DP-67, JX-17
    fun = lambda w, x, y: (x @ w) * y.sum()
    w, x, y = rand(3), rand(9, 3), rand(5)
    inner = fp.pmap(fun, in_axes=(None, 0, None))
    outer = fp.pmap(lambda w, x: inner(w, x, y) + 1)  # y is closed over.
    assert_close(fp.pmap(outer)(w, x), fun(w, x, y) + 1)
    assert_close(
        fp.pmap(fp.grad(lambda w, x: outer(w, x).mean()))(w, x), fp.grad(lambda w: fun(w, x, y).mean())(w)
    )


def test_masks_repeat_with_the_seed_differ_between_shards_and_ignore_timing(devices):  # DP-70, JX-23, DD-17
    def masks(x: Tensor) -> Tensor:
        if x.flatten()[0] >= 0:
            threading.Event().wait(delays.pop())
        return nn.functional.dropout(torch.ones_like(x), 0.5)

    runs = []
    for turn in range(4):
        delays = [0.002 * ((turn + k) % 4) for k in range(4)]
        torch.manual_seed(11)
        out = fp.pmap(masks, in_axes=0)(torch.ones(8, 40))
        runs.append((out, torch.rand(3)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    starts = (
        runs[0][0][:: 8 // len(devices)][: len(devices)] if 8 % len(devices) == 0 else runs[0][0][[0, 3, 6]]
    )
    assert len({tuple(row.tolist()) for row in starts}) == len(devices)
    assert not torch.equal(fp.pmap(masks, in_axes=0)(-torch.ones(8, 40)), runs[0][0])
