"""Programs in which one process goes wrong: each returns what the process was told, and after how long."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import funcpar as fp

TIMEOUT = 3.0


def train(fault: str, when: int, devices: int = 1, timeout: float = TIMEOUT) -> tuple[str, str, float]:
    """Take steps; in step ``when`` the last process goes wrong. Return the error and the seconds it took."""
    fp.set_cpu_devices(devices)
    fp.distributed.initialize(timeout=timeout)
    is_last = fp.distributed.process_index() == fp.distributed.process_count() - 1
    w, x = torch.ones(3), torch.ones(4, 3)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        if raises[0] == "forward":
            raise ValueError("no forward today")
        return _Backward.apply((x @ w).square().mean())

    step = fp.pmap(fp.value_and_grad(loss_fn))
    start = time.monotonic()
    try:
        for k in range(4):
            start = time.monotonic()
            if k == when and is_last:
                w = _go_wrong(fault, w)
            step(w, x)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        raises[0] = ""
    return "", "", 0.0


raises = [""]


class _Backward(torch.autograd.Function):
    """The identity, whose backward raises on demand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if raises[0] == "backward":
            raise ValueError("no backward today")
        return grad


def _go_wrong(fault: str, w: Tensor) -> Tensor:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        os._exit(3)
    elif fault == "hang":
        time.sleep(TIMEOUT + 2)
    elif fault == "shape":
        return torch.ones(3, 2)
    elif fault == "other call":
        fp.pmap(lambda x: x.mean(), in_axes=0)(torch.ones(4))
    elif fault == "leave":
        fp.distributed.shutdown()
        time.sleep(1)
    elif fault == "raise outside":
        raise KeyError("outside of every call")
    else:
        raises[0] = fault
    return w


def recover() -> list[Any]:
    """Return what each of three calls gave: the middle one fails in one process, in every way."""
    fp.set_cpu_devices(2)
    fp.distributed.initialize(timeout=20)
    found: list[Any] = []
    w, x = torch.ones(3), torch.ones(4, 3)
    is_last = fp.distributed.process_index() == fp.distributed.process_count() - 1

    def fail() -> None:
        if raises[0]:
            raise ValueError("not this time")

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        fail()
        return (x @ w).mean()

    def exchanging(w: Tensor, x: Tensor) -> Tensor:
        if fp.axis_index() == 3:
            fail()
        return fp.psum((x @ w).sum())

    for fun in (fp.pmap(fp.value_and_grad(loss_fn)), fp.pmap(loss_fn), fp.pmap(exchanging, out_axes=None)):
        for turn in range(5):
            raises[0] = "now" if turn % 2 and is_last else ""
            try:
                answer = fun(w, x)
                found.append(answer[0].item() if isinstance(answer, tuple) else answer.item())
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    fp.distributed.shutdown()
    return found


def mismatches() -> dict[str, tuple[str, str]]:
    """Give different arguments, structures, outputs or calls in each process; return the errors."""
    fp.set_cpu_devices(1)
    fp.distributed.initialize(timeout=20)
    index = fp.distributed.process_index()
    x, w = torch.ones(2, 3), torch.ones(3)
    mean = lambda p, x: (x @ p["w"]).mean()
    more = {"more": torch.ones(1)} if index else {}
    calls = {
        "shape": lambda: fp.pmap(fp.grad(mean))({"w": w, "b": torch.ones(index + 1)}, x),
        "structure": lambda: fp.pmap(mean)({"w": w, **more}, x),
        "number": lambda: fp.pmap(lambda lr, x: lr * x.mean())(0.1 * (index + 1), x),
        "broadcast": lambda: fp.distributed.broadcast({"w": w.double() if index else w}),
        "names": lambda: fp.pmap(lambda p, x: {"a" if index else "b": x.mean()})(w, x),
        "values": lambda: fp.pmap(lambda p, x: p + index)(w, x),
        "kinds": lambda: fp.pmap(lambda p, x: x if index else x.mean(0))(w, x),
        "collective": lambda: fp.pmap(lambda p, x: (fp.pmax if index else fp.psum)(x.sum()))(w, x),
        "early": lambda: fp.pmap(lambda p, x: x.sum() if index else fp.psum(x.sum()))(w, x),
        "closed over": lambda: fp.pmap(lambda x: (x * (a if index else b)).sum(), in_axes=0)(x),
        "part of a graph": lambda: fp.pmap(fp.grad(mean))({"w": a if index else w}, x),
        "functions": lambda: fp.pmap(first if index else second, in_axes=0)(x),
        "experts": lambda: fp.pmap(lambda x: (x @ (c if index else a)).sum(), in_axes=0)(x),
        "signs": lambda: fp.pmap(lambda p, x: p * p.new_tensor([1, 1 - 2 * index, 1 - 2 * index]))(w, x),
        "transformed": lambda: torch.func.grad(lambda w: fp.pmap(lambda x: (x * w).sum(), in_axes=0)(x))(w),
        "check": lambda: fp.check(fp.pmap(mean), {"w": w}, x),
        "closed over, fused": lambda: fp.pmap(fp.grad(lambda p, x: (x @ (p * a)).sum()))(w, x),
    }
    a, b = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    c = torch.full((3,), 2.0, requires_grad=True)
    first, second = (lambda x: x.sum()), (lambda x: x.prod())
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ("", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    found["afterwards"] = ("", str(fp.pmap(lambda x: x.sum(), in_axes=0, out_axes="sum")(x).item()))
    fp.distributed.shutdown()
    return found


def backward() -> tuple[str, str, float]:
    """Run backward in one process while the other goes on; return the error and the seconds it took."""
    fp.set_cpu_devices(1)
    fp.distributed.initialize(timeout=TIMEOUT)
    w = torch.ones(3, requires_grad=True)
    loss = fp.pmap(lambda w, x: (x @ w).mean())(w, torch.ones(2, 3))
    start = time.monotonic()
    try:
        if fp.distributed.process_index():
            fp.pmap(lambda x: x.mean(), in_axes=0)(torch.ones(2))
        else:
            loss.backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


def other_thread() -> str:
    """Make two spanning calls at once, in two threads; return what the second is told."""
    fp.set_cpu_devices(1)
    fp.distributed.initialize(timeout=20)
    inside, leave = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        inside.set()
        assert leave.wait(20)
        return x.mean()

    thread = threading.Thread(target=lambda: fp.pmap(slow, in_axes=0)(torch.ones(2)))
    thread.start()
    assert inside.wait(20)
    try:
        fp.pmap(lambda x: x.mean(), in_axes=0)(torch.ones(2))
        told = ""
    except RuntimeError as error:
        told = str(error)
    finally:
        leave.set()
        thread.join(20)
    dist.barrier()
    fp.distributed.shutdown()
    return told


def joined_twice() -> str:
    """Return what the second of two calls is told."""
    fp.distributed.initialize(timeout=20)
    try:
        fp.distributed.initialize()
        return ""
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        fp.distributed.shutdown()


def out_of_step() -> list[str]:
    """Make two calls, of which one process's first is refused before the others hear of it."""
    fp.set_cpu_devices(1)
    fp.distributed.initialize(timeout=TIMEOUT)
    step = fp.pmap(fp.value_and_grad(lambda w, x, y: ((x @ w) * y).mean()))
    w, x, y = torch.ones(3), torch.ones(4, 3), torch.ones(4)
    told = []
    for k in range(3):
        rows = 3 if k == 1 and fp.distributed.process_index() else 4
        try:
            told.append(str(step(w, x * (k + 1), y[:rows])[0].item()))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def half_precision() -> list[float]:
    """Return gradients in float16 where the number of rows changes by a factor of 100,000."""
    fp.set_cpu_devices(1)
    fp.distributed.initialize(timeout=20)
    step = fp.pmap(fp.grad(lambda w, x: (x * w).mean()))
    w = torch.ones(1, dtype=torch.float16)
    found = [step(w, torch.full((n, 1), 0.5, dtype=torch.float16)).item() for n in (1, 100_000, 1)]
    fp.distributed.shutdown()
    return found
