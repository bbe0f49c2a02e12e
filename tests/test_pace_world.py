"""What shards in the caller's thread enter, raise and find there is as in a worker, and ends with them."""

import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import funcpar as fp
from funcpar._pace import Pace
from tests.cycles import no_cycle_collection

LIMIT = 60.0
X = torch.arange(39.0, dtype=torch.float64).reshape(13, 3) / 39
W = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all calls run their shards one after another."""
    monkeypatch.setattr(Pace, "is_together", lambda self: False)


class Fault(Exception):
    pass


def loss_fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x @ w) ** 2).mean()


def test_what_a_shard_enters_and_does_not_leave_ends_with_it():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return fun(*args, **(kwargs or {}))

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return fun(*args, **(kwargs or {}))

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append((str(torch.empty(0).device), torch._C._len_torch_function_stack()))
        torch.set_default_device("meta")
        torch.set_num_threads(before + 1)
        for mode in (Mode(), Below(), torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg)):
            mode.__enter__()
        return x

    before = torch.get_num_threads()
    for count in (before, before + 2):
        fp.set_cpu_devices(4, threads_per_device=count)
        seen: list[Any] = []
        with torch.device("cpu"):
            fp.pmap(body, in_axes=0)(X)
            assert torch.empty(0).device.type == "cpu" and torch._C._len_torch_function_stack() == 1
        assert seen == [("cpu", 1)] * 4
        assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert torch.get_num_threads() == before
        threading.Thread(target=torch.set_num_threads, args=(before,)).start()  # As later threads begin.


@torch.library.custom_op("funcpar_tests::gradient", mutates_args=())
def gradient_op(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fp.pmap(fp.grad(loss_fn))(w.detach(), x)


class GradientForSin(TorchDispatchMode):
    def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is torch.ops.aten.sin.default:
            return fp.pmap(fp.grad(loss_fn))(args[0], X)
        return fun(*args, **(kwargs or {}))


def test_inside_of_an_op_where_torch_records_no_graph_shards_run_in_workers():
    expected = fp.grad(loss_fn)(W, X)
    torch.testing.assert_close(gradient_op(W, X), expected)
    with GradientForSin():
        torch.testing.assert_close(torch.sin(W), expected)


@torch.library.custom_op("funcpar_tests::plain_gradient", mutates_args=())
def plain_gradient_op(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fp.grad(loss_fn)(w.detach(), x)


def test_there_a_gradient_in_the_same_thread_is_refused_and_never_zero():
    with pytest.raises(RuntimeError, match=r"^grad\(loss_fn\): it is called in an op .*\nCall it outside of"):
        plain_gradient_op(W, X)
    with torch.inference_mode():
        torch.testing.assert_close(fp.grad(loss_fn)(W, X), fp.grad(loss_fn)(W.clone(), X))
    assert fp.grad(loss_fn)(W, X).abs().sum() > 0


def test_ctrl_c_is_not_lost_behind_an_error_of_another_shard_and_waits_for_none():
    def body(x: torch.Tensor) -> torch.Tensor:
        if fp.axis_index() == 0:
            raise ValueError("first")
        if fp.axis_index() == 1:
            waits.wait(LIMIT)  # Until the other shards were handed on.
            raise KeyboardInterrupt
        waits.set()
        never.wait(LIMIT)
        return x

    waits, never = threading.Event(), threading.Event()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            fp.pmap(body, in_axes=0)(X)
        assert time.monotonic() - start < LIMIT / 2
        assert raised.value.__notes__ == [
            "raised in shard 1 of 4 on cpu[1], in pmap(body)",
            "shard 0 of 4 failed too: ValueError: first",
        ]
    finally:
        never.set()


@pytest.mark.parametrize("rank", range(4))
def test_an_error_of_a_shard_dies_with_the_callers_reference(rank):
    def body(x: torch.Tensor) -> torch.Tensor:
        if fp.axis_index() == rank:
            raise Fault
        return x

    batch = X.clone()
    with no_cycle_collection():
        try:
            fp.pmap(body, in_axes=0)(batch)
        except Fault as error:
            watched = [weakref.ref(error), weakref.ref(batch)]
        del batch
        assert [ref() for ref in watched] == [None, None]
