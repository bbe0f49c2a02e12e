"""What a shard raises reaches the caller as it is, with a note, and nothing is left behind."""

import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import funcpar as fp
from tests.cycles import no_cycle_collection

LIMIT = 60.0
ROWS = torch.arange(8.0)


class PairError(Exception):
    """An error whose constructor takes two arguments, which a copy by type and text would break."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} ({self.code})"


@pytest.fixture(autouse=True)
def _pool_is_usable_afterwards() -> Iterator[None]:
    """After every failure here the next call works, in every shard, with gradients."""
    yield
    leaf = torch.ones(8, requires_grad=True)
    out = fp.pmap(lambda x: 3 * x, in_axes=0)(leaf)
    assert torch.equal(out, torch.full((8,), 3.0))
    assert torch.equal(torch.autograd.grad(out.sum(), leaf)[0], torch.full((8,), 3.0))
    value, grad = fp.pmap(fp.value_and_grad(lambda w, x: (w * x).mean()))(torch.tensor(2.0), ROWS)
    assert (value.item(), grad.item()) == (7.0, 3.5)


def fails_in(ranks: tuple[int, ...], error: Any) -> Any:
    """Return a function that raises ``error(rank)`` in these shards of four."""

    def train_step(x: torch.Tensor) -> torch.Tensor:
        rank = int(x[0]) // 2
        if rank in ranks:
            raise error(rank)
        return x

    return train_step


def test_error_keeps_type_arguments_attributes_and_traceback() -> None:
    step = fp.pmap(fails_in((2,), lambda rank: PairError(rank, "no such row")), in_axes=0)
    with pytest.raises(PairError, match=r"^no such row \(2\)") as caught:
        step(ROWS)
    error = caught.value
    assert type(error) is PairError
    assert error.args == (2, "no such row")
    assert (error.code, error.reason) == (2, "no such row")
    assert error.__notes__ == ["raised in shard 2 of 4 on cpu[2], in pmap(train_step)"]
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-2:] == ["train_step", "<lambda>"] or frames[-1] == "train_step"
    assert frames[0] == "test_error_keeps_type_arguments_attributes_and_traceback"


def test_cause_and_context_of_an_error_are_kept() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise PairError(1, "outer") from error

    with pytest.raises(PairError, match="outer") as caught:
        fp.pmap(body, in_axes=0)(ROWS)
    assert isinstance(caught.value.__cause__, KeyError)


def test_error_on_one_device_has_a_note_too() -> None:
    with pytest.raises(PairError, match="alone") as caught:
        fp.pmap(fails_in((0,), lambda rank: PairError(rank, "alone")), in_axes=0, devices=1)(ROWS)
    assert caught.value.__notes__ == ["raised in shard 0 of 1 on cpu[0], in pmap(train_step)"]


def test_note_names_the_device_that_the_call_asked_for() -> None:
    with pytest.raises(PairError, match="there") as caught:
        fp.pmap(fails_in((2,), lambda rank: PairError(rank, "there")), in_axes=0, devices=[3, 1, 0])(ROWS[:6])
    assert caught.value.__notes__[0] == "raised in shard 2 of 3 on cpu[0], in pmap(train_step)"


def test_notes_of_nested_calls_go_from_the_inside_out() -> None:
    inner = fp.pmap(fails_in((3,), lambda rank: PairError(rank, "deep")), in_axes=0)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    with pytest.raises(PairError, match="deep") as caught:
        fp.pmap(outer, in_axes=0)(ROWS)
    assert caught.value.__notes__ == [
        "raised in shard 0 of 1 on cpu[3], in pmap(train_step)",
        "raised in shard 3 of 4 on cpu[3], in pmap(outer)",
    ]


def test_lowest_rank_is_raised_with_a_note_for_every_further_failure() -> None:
    met = threading.Barrier(3)

    def error(rank: int) -> Exception:
        met.wait(LIMIT)
        if rank == 1:
            time.sleep(0.05)  # The lowest rank, not the first in time.
        return PairError(rank, "many") if rank != 2 else OSError(f"disk of {rank}")

    with pytest.raises(PairError, match=r"many \(1\)") as caught:
        fp.pmap(fails_in((1, 2, 3), error), in_axes=0)(ROWS)
    assert caught.value.__notes__ == [
        "raised in shard 1 of 4 on cpu[1], in pmap(train_step)",
        "shard 2 of 4 failed too: OSError: disk of 2",
        "shard 3 of 4 failed too: PairError: many (3)",
    ]


def test_further_failures_with_one_text_are_noted_each() -> None:
    with pytest.raises(ValueError, match="same text") as caught:
        fp.pmap(fails_in((0, 1, 3), lambda rank: ValueError("same text")), in_axes=0)(ROWS)
    assert caught.value.__notes__[1:] == [
        "shard 1 of 4 failed too: ValueError: same text",
        "shard 3 of 4 failed too: ValueError: same text",
    ]


def test_root_cause_comes_before_the_victims_that_wait_for_it() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) == 6:
            time.sleep(0.05)  # The others wait in the sum of gradients by now.
            raise PairError(3, "late")
        return (w * x).mean()

    with pytest.raises(PairError, match="late") as caught:
        fp.pmap(fp.grad(loss))(torch.tensor(1.0), ROWS)
    assert caught.value.__notes__ == ["raised in shard 3 of 4 on cpu[3], in pmap(loss)"]


@pytest.mark.parametrize(
    "error", [SystemExit(7), KeyboardInterrupt("stop"), GeneratorExit(), StopIteration(3)], ids=repr
)
@pytest.mark.parametrize("fused", [False, True])
def test_every_kind_of_exception_gets_through(error: BaseException, fused: bool) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) == 4:
            raise type(error)(*error.args)
        return (w * x).mean()

    step = fp.pmap(fp.grad(loss) if fused else loss)
    with pytest.raises(type(error)) as caught:
        step(torch.tensor(1.0), ROWS)
    assert caught.value.args == error.args
    assert caught.value.__notes__ == ["raised in shard 2 of 4 on cpu[2], in pmap(loss)"]


def test_error_whose_text_cannot_be_made_gets_through() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(MuteError):
        fp.pmap(fails_in((1, 2), lambda rank: MuteError()), in_axes=0)(ROWS)


def test_one_exception_object_raised_by_many_calls_and_shards_has_one_note_per_call() -> None:
    shared = ValueError("shared")
    step = fp.pmap(fails_in((0, 1, 2, 3), lambda rank: shared), in_axes=0)
    with pytest.raises(ValueError, match="shared") as caught:
        step(ROWS)
    assert caught.value is shared
    assert len(shared.__notes__) == 1


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rank = int(x[0]) // 2
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.rank in (1, 2):
            raise PairError(ctx.rank, "backward")
        return grad


@pytest.mark.parametrize("create_graph", [False, True])
def test_failure_in_backward_reaches_the_caller(create_graph: bool) -> None:
    leaf = ROWS.clone().requires_grad_()

    def body(x: torch.Tensor) -> torch.Tensor:
        return FailsBackward.apply(x)

    out = fp.pmap(body, in_axes=0)(leaf)
    with pytest.raises(PairError, match=r"backward \(1\)") as caught:
        out.sum().backward(create_graph=create_graph)
    assert caught.value.__notes__ == [
        "raised in shard 1 of 4 on cpu[1], in pmap(body)",
        "shard 2 of 4 failed too: PairError: backward (2)",
    ]
    assert leaf.grad is None


def test_failure_in_the_backward_of_a_mapped_gradient_reaches_the_caller() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return FailsBackward.apply(x * w).sum()

    with pytest.raises(PairError, match=r"backward \(1\)") as caught:
        fp.pmap(fp.grad(loss))(torch.tensor(1.0), ROWS)
    assert caught.value.__notes__[0] == "raised in shard 1 of 4 on cpu[1], in pmap(loss)"


@pytest.mark.parametrize("ranks", [(0,), (2,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("size", [1, 4])
def test_exception_dies_with_the_callers_reference(ranks: tuple[int, ...], size: int) -> None:
    if size == 1 and 0 not in ranks:
        pytest.skip("one shard has rank 0")
    step = fp.pmap(fails_in(ranks, lambda rank: PairError(rank, "brief")), in_axes=0, devices=size)
    batch = ROWS.clone()
    watched = []
    with no_cycle_collection():
        try:
            step(batch)
        except PairError as error:
            watched.append(weakref.ref(error))
        watched.append(weakref.ref(batch))
        del batch
        end = time.monotonic() + 1
        while any(ref() is not None for ref in watched) and time.monotonic() < end:
            time.sleep(0.002)
        assert [ref() for ref in watched] == [None, None]


def test_exception_from_backward_dies_with_the_callers_reference() -> None:
    watched = []
    with no_cycle_collection():
        out = fp.pmap(FailsBackward.apply, in_axes=0)(ROWS.clone().requires_grad_()).sum()
        try:
            out.backward()
        except PairError as error:
            watched.append(weakref.ref(error))
        del out
        end = time.monotonic() + 1
        while watched[0]() is not None and time.monotonic() < end:
            time.sleep(0.002)
        assert watched[0]() is None


class WaitsBackward(torch.autograd.Function):
    """Waits for an event in backward, long after the interrupt."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, event: threading.Event) -> torch.Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.event.wait(LIMIT)
        return grad, None


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize("where", ["forward", "fused", "backward"])
def test_interrupt_while_waiting_returns_promptly(where: str) -> None:
    event = threading.Event()

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if where == "backward":
            return WaitsBackward.apply(w * x, event).mean()
        event.wait(LIMIT)
        return (w * x).mean()

    leaf = torch.tensor(1.0, requires_grad=True)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            if where == "fused":
                fp.pmap(fp.grad(body))(leaf.detach(), ROWS)
            else:
                fp.pmap(body)(leaf, ROWS).backward()
        assert time.monotonic() - start < 10
    finally:
        event.set()
        timer.join(LIMIT)
    assert leaf.grad is None


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_calls_after_interrupts_at_any_moment_are_right() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x).square().mean()

    step, leaf = fp.pmap(fp.value_and_grad(loss)), torch.tensor(2.0, requires_grad=True)
    want = fp.value_and_grad(loss)(leaf.detach(), ROWS)
    interrupts = 0
    for k in range(40):
        timer = threading.Timer(0.0003 * k, os.kill, (os.getpid(), signal.SIGINT))
        end = time.monotonic() + 5
        try:
            timer.start()
            while time.monotonic() < end:
                step(leaf.detach(), ROWS)
                torch.autograd.grad(fp.pmap(loss)(leaf, ROWS), leaf)
        except KeyboardInterrupt:
            interrupts += 1
        timer.join(LIMIT)
        assert step(leaf.detach(), ROWS) == want
    assert interrupts == 40


def test_shard_that_computes_for_long_is_not_a_timeout(monkeypatch) -> None:
    """Only a shard that waits in a collective of the user's own may run out of time."""
    monkeypatch.setenv("FUNCPAR_TIMEOUT", "0.2")

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if int(x[0]) == 0:
            time.sleep(0.6)
        return (w * x).mean()

    assert fp.pmap(fp.grad(loss))(torch.tensor(1.0), ROWS).item() == 3.5
