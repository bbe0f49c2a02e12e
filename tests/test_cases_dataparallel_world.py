"""What went wrong with DataParallel around a call: modes, failures, threads and random numbers."""

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

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


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
