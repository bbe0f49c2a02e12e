"""A shard runs in its caller's world, forward and backward, and leaves the worker as it was."""

import contextlib
import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import funcpar as fp

WEIGHT = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
BATCH = torch.linspace(-2.0, 2.0, 21).reshape(7, 3)
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def shards_see(look: Callable[[], Any], size: int) -> list[Any]:
    """Return what `look` returns in each of `size` shards."""
    found: dict[int, Any] = {}

    def body(rank: int) -> int:
        found[rank] = look()
        return rank

    fp.parallel_call(body, list(range(size)), devices=size)
    return [found[k] for k in range(size)]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def variable_set() -> Iterator[None]:
    token = VARIABLE.set(7)
    try:
        yield
    finally:
        VARIABLE.reset(token)


class NullFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class NullDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def autocast_within_another() -> Iterator[None]:
    with torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def autocast_dtype_while_off() -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


@contextlib.contextmanager
def no_forward_ad() -> Iterator[None]:
    with forward_ad._set_fwd_grad_enabled(False):
        yield


def autocast_state() -> Any:
    # Not the cache: it is one for the process, so several shards do without.
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def default_device_state() -> Any:
    return str(torch.get_default_device()), str(torch.zeros(1).device), str(torch.tensor(1.0).device)


def hooks_state() -> Any:
    try:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return None
    except RuntimeError as error:
        return str(error)


def function_modes() -> Any:
    stack = range(torch._C._len_torch_function_stack())
    return [type(torch._C._get_function_stack_at(k)).__name__ for k in stack]


def dispatch_modes() -> Any:
    stack = range(torch._C._len_torch_dispatch_stack())
    return [type(torch._C._get_dispatch_stack_at(k)).__name__ for k in stack]


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "no forward AD": (no_forward_ad, torch._C._is_fwd_grad_enabled),
    "autocast": (lambda: torch.autocast("cpu"), autocast_state),
    "autocast float16": (lambda: torch.autocast("cpu", torch.float16), autocast_state),
    "autocast off in on": (autocast_within_another, autocast_state),
    "autocast dtype while off": (autocast_dtype_while_off, autocast_state),
    "default dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "device context": (lambda: torch.device("meta"), default_device_state),
    "default device": (lambda: default_device("meta"), default_device_state),
    "hooks disabled": (lambda: disable_saved_tensors_hooks("not here"), hooks_state),
    "function mode": (NullFunctionMode, function_modes),
    "dispatch mode": (NullDispatchMode, dispatch_modes),
    "context variable": (variable_set, VARIABLE.get),
}
state = pytest.mark.parametrize("name", STATES)


@state
def test_shard_sees_the_callers_state_and_the_next_call_does_not(name: str, devices) -> None:
    enter, look = STATES[name]
    size = len(devices)
    outside = look()
    with enter():
        inside = look()
        assert shards_see(look, size) == [inside] * size
        assert look() == inside
    assert inside != outside
    assert look() == outside
    assert shards_see(look, size) == [outside] * size


@state
def test_worker_is_clean_after_a_failure(name: str) -> None:
    enter, look = STATES[name]
    outside = look()

    def fail() -> None:
        raise ValueError("on purpose")

    with enter(), pytest.raises(ValueError, match="on purpose"):
        shards_see(fail, 4)
    assert shards_see(look, 4) == [outside] * 4


@pytest.mark.parametrize("name", [n for n in STATES if n not in ("no_grad", "inference_mode")])
def test_backward_in_a_shard_sees_what_plain_backward_sees(name: str, devices) -> None:
    enter, look = STATES[name]
    found: list[Any] = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append(look())
            return grad

    leaf = torch.ones(4, requires_grad=True)
    losses = [Looking.apply(leaf).sum(), fp.pmap(Looking.apply, in_axes=0)(leaf).sum()]
    with enter():
        torch.autograd.grad(losses[0], leaf)
        torch.autograd.grad(losses[1], leaf)
    assert found == found[:1] * (1 + len(devices))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_numbers_are_those_of_plain_code(dtype: torch.dtype, devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        plain, mapped = BATCH @ leaf, fp.pmap(lambda w, x: x @ w)(leaf, BATCH)
        assert mapped.dtype is dtype
        assert torch.equal(plain, mapped)
        grads = [torch.autograd.grad(out.float().square().mean(), leaf)[0] for out in (plain, mapped)]
        fused = fp.pmap(fp.grad(lambda w, x: (x @ w).float().square().mean()))(leaf.detach(), BATCH)
    assert grads[0].dtype is grads[1].dtype is fused.dtype is torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grads[1], grads[0], rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(fused, grads[0], rtol=4 * eps, atol=4 * eps)


def test_autocast_cache_holds_no_stale_weight_between_calls(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    with torch.autocast("cpu"):
        first = fp.pmap(lambda w, x: x @ w)(leaf, BATCH)
        with torch.no_grad():
            leaf.mul_(2)
        torch.clear_autocast_cache()
        assert torch.equal(fp.pmap(lambda w, x: x @ w)(leaf, BATCH), 2 * first)


def test_saved_tensor_hooks_are_called_in_every_shard(devices) -> None:
    packed: list[str] = []
    unpacked: list[str] = []

    def pack(tensor: torch.Tensor) -> list[Any]:
        packed.append(threading.current_thread().name)
        return tensor.tolist()

    def unpack(values: list[Any]) -> torch.Tensor:
        unpacked.append(threading.current_thread().name)
        return torch.tensor(values)

    leaf = WEIGHT.clone().requires_grad_()
    with saved_tensors_hooks(pack, unpack):
        loss = fp.pmap(lambda w, x: (x @ w).sin())(leaf, BATCH).mean()
    (grad,) = torch.autograd.grad(loss, leaf)
    (plain,) = torch.autograd.grad((BATCH @ leaf).sin().mean(), leaf)
    torch.testing.assert_close(grad, plain)
    workers = {d.rank for d in devices} if len(devices) > 1 else set()
    assert {f"funcpar-cpu-{k}" for k in workers} <= set(packed) & set(unpacked)
    assert len(packed) >= len(devices)


@pytest.mark.parametrize("fused", [False, True])
def test_save_on_cpu_gives_the_same_gradient(fused: bool, devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().mean()

    (want,) = torch.autograd.grad(loss(leaf, BATCH), leaf)
    with save_on_cpu():
        if fused:
            got = fp.pmap(fp.grad(loss))(leaf.detach(), BATCH)
        else:
            (got,) = torch.autograd.grad(fp.pmap(loss)(leaf, BATCH), leaf)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fused", [False, True])
def test_flop_counter_counts_what_plain_code_counts(fused: bool, devices) -> None:
    leaf = torch.ones(8, 8, requires_grad=True)
    batch = torch.ones(12, 8)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ w) @ w).square().mean()

    with FlopCounterMode(display=False) as plain:
        loss(leaf, batch).backward()
    with FlopCounterMode(display=False) as mapped:
        if fused:
            fp.pmap(fp.grad(loss))(leaf.detach(), batch)
        else:
            fp.pmap(loss)(leaf, batch).backward()
    assert mapped.get_total_flops() == plain.get_total_flops() > 0


def test_users_modes_see_the_ops_of_all_shards_and_those_that_modes_change(devices) -> None:
    functions: list[Any] = []
    ops: list[Any] = []

    class FunctionMode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            functions.append(func)
            return func(*args, **(kwargs or {}))

    class DispatchMode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func)
            if func is torch.ops.aten.sin.default:
                func = torch.ops.aten.cos.default
            return func(*args, **(kwargs or {}))

    x = torch.linspace(0.0, 1.0, 8)
    with FunctionMode(), DispatchMode():
        out = fp.pmap(torch.sin, in_axes=0)(x)
    assert Counter(functions)[torch.sin] == len(devices)
    assert Counter(ops)[torch.ops.aten.sin.default] == len(devices)
    assert torch.equal(out, x.cos())
    assert torch.equal(fp.pmap(torch.sin, in_axes=0)(x), x.sin())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # Torch's own, in forward mode.
def test_levels_of_torch_func_are_seen_and_left(devices) -> None:
    def mean_of(fun: Any) -> Any:
        return lambda w: fun(lambda x: (x @ w).sin().sum(), BATCH)

    plain = mean_of(lambda f, x: f(x))
    mapped = mean_of(lambda f, x: fp.pmap(f, in_axes=0, out_axes="sum")(x))
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.func.hessian):
        torch.testing.assert_close(transform(mapped)(WEIGHT), transform(plain)(WEIGHT))
    stack = torch.stack([WEIGHT, 2 * WEIGHT])
    torch.testing.assert_close(torch.func.vmap(mapped)(stack), torch.func.vmap(plain)(stack))
    assert shards_see(torch._C._functorch.maybe_current_level, len(devices)) == [None] * len(devices)


def test_what_a_body_sets_in_a_context_variable_stays_in_its_shard() -> None:
    assert shards_see(lambda: VARIABLE.set(3) and VARIABLE.get(), 4) == [3] * 4
    assert VARIABLE.get() == 0
    assert shards_see(VARIABLE.get, 4) == [0] * 4


LEFT_BEHIND: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), autocast_state),
    "autocast dtype": (lambda: torch.set_autocast_dtype("cpu", torch.float16), autocast_state),
    "default device": (lambda: torch.set_default_device("meta"), default_device_state),
    "function mode": (lambda: NullFunctionMode().__enter__(), function_modes),
}


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_state_that_a_body_leaves_behind_does_not_reach_the_next_call(name: str) -> None:
    change, look = LEFT_BEHIND[name]
    fp.set_cpu_devices(2, threads_per_device=2)
    try:
        before = shards_see(look, 2)
        shards_see(change, 2)
        assert shards_see(look, 2) == before
    finally:
        # Another number of threads means other workers: the next test does not get these.
        fp.set_cpu_devices(2, threads_per_device=1)
        shards_see(lambda: None, 2)
