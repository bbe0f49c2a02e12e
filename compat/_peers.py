"""The processes of one wrapper: before each call they tell each other what they are about to do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import funcpar as fp

_WIDTH = 5
_PATIENCE = 5.0  # Seconds of silence before a rank tells the others what it waits in.
_AWAKE = 1e-3  # Seconds.
_yield = getattr(os, "sched_yield", None)
_ROLL_CALL = 1.0  # Seconds given to the others to tell where they are, once a wait has failed.
_PrefixStore: Any = getattr(dist, "PrefixStore")  # noqa: B009
_numbers: dict[str, int] = {}


class Kind(IntEnum):
    """What a rank is about to do."""

    START = 1
    BACKWARD = 2
    GRADIENT = 3
    MEAN = 4
    BUFFERS = 5
    OUTSIDE = 6
    JOINED = 7
    STOP = 8


_TEXT = {
    Kind.START: "the construction of the wrapper",
    Kind.BACKWARD: "the backward of a loss",
    Kind.GRADIENT: "torch.autograd.grad, a torch.func transform, or a backward with create_graph",
    Kind.MEAN: "the mean of gradients that have a graph of their own",
    Kind.BUFFERS: "the broadcast of buffers before forward",
    Kind.OUTSIDE: "the mean of gradients that reach parameters outside of the wrapper's forward",
    Kind.JOINED: "the end of join()",
    Kind.STOP: "the end of join(throw_on_early_termination=True)",
}


class Meeting:
    """One exchange of what every rank is about to do; nothing larger is sent before it is over.

    That is because transports do not check: two operations of different sizes end the process, or
    hand over the wrong numbers.
    """

    def __init__(self, peers: Peers, kind: Kind, details: Sequence[int]) -> None:
        self._peers = peers
        self._kind = kind
        row = [int(kind), peers.number, *details]
        mine = torch.tensor(row + [0] * (_WIDTH - len(row)), device=peers.device)
        self._rows = [torch.zeros_like(mine) for _ in range(peers.size)]
        self._active: list[int] | None = None
        try:
            self._work = dist.all_gather(self._rows, mine, group=peers.group, async_op=True)
        except RuntimeError as error:
            raise peers.lost(kind, error) from error

    def is_over(self) -> bool:
        """Tell whether waiting would take no time."""
        return self._active is not None or bool(self._work.is_completed())

    def wait(self) -> list[int]:
        """Return the ranks that take part, all but those that have joined.

        Raises:
            ReplicaMismatchError: The others make another call.
            CollectiveTimeoutError: A rank does not come.
            ConnectionError: A rank is gone.
            RuntimeError: A rank ends all by join(throw_on_early_termination=True).
        """
        if self._active is None:
            self._peers.wait(self._work, self._kind)
            rows = self.rows()
            self._active = [rank for rank, row in enumerate(rows) if row[0] != Kind.JOINED]
            self._check(rows)
        return self._active

    def rows(self) -> list[list[int]]:
        """Return what every rank has said, once the meeting is over."""
        return [row.tolist() for row in self._rows]

    def _check(self, rows: list[list[int]]) -> None:
        stopped = [str(rank) for rank, row in enumerate(rows) if row[0] == Kind.STOP]
        if stopped:
            raise RuntimeError(
                f"{self._peers.call}.join: rank {', '.join(stopped)} has no more batches, and "
                f"throw_on_early_termination=True ends all ranks.\nCatch this error where the epoch ends."
            )
        active = self._active or []
        if len({tuple(rows[rank]) for rank in active}) > 1:
            raise self._peers.differing({rank: _described(rows[rank]) for rank in active})


class Peers:
    """The ranks of a process group, as one wrapper sees them.

    Args:
        group: The process group.
        device: Where what is sent lies.
        call: How messages name the wrapper.
    """

    def __init__(self, group: Any, device: torch.device, call: str) -> None:
        self.group = group
        self.device = device
        self.call = call
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.divides_by_active = False  # Whether ranks that have joined count no more in a mean.
        self.always_meet = self.debugs = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF") == "DETAIL"
        name = str(group.group_name)
        self.number = _numbers[name] = _numbers.get(name, 0) + 1

    def meet(self, kind: Kind, *details: int) -> Meeting:
        """Tell the others what comes; details must be the same on all ranks that take part."""
        return Meeting(self, kind, details)

    def all_reduce(self, tensor: Tensor, kind: Kind, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start a reduction in place; wait for it with :meth:`wait`."""
        try:
            return dist.all_reduce(tensor, op, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.lost(kind, error) from error

    def broadcast(self, tensor: Tensor, source: int, kind: Kind) -> None:
        """Overwrite a tensor with that of a rank of the group."""
        try:
            work = dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)
        except RuntimeError as error:
            raise self.lost(kind, error) from error
        self.wait(work, kind)

    def agree(self, flags: Sequence[bool], kind: Kind) -> list[bool]:
        """Return which flags are set on any rank, after a meeting in which all said how many there are."""
        counts = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        self.wait(self.all_reduce(counts, kind, dist.ReduceOp.MAX), kind)
        return [bool(flag) for flag in counts.tolist()]

    def wait(self, work: Any, kind: Kind) -> None:
        """Wait for an operation, no longer than FUNCPAR_TIMEOUT seconds (default 300)."""
        limit = float(os.environ.get("FUNCPAR_TIMEOUT", "300"))
        patience = min(_PATIENCE, limit / 2)
        if self.device.type == "cpu":
            _stay_awake(work)
        try:
            try:
                work.wait(timedelta(seconds=patience))
                return
            except RuntimeError as error:
                if not _is_timeout(error):
                    raise
            self.say(f"waits in {_TEXT[kind]}")
            work.wait(timedelta(seconds=limit - patience))
            self.say("")
        except RuntimeError as error:
            raise self.lost(kind, error, limit) from error

    def say(self, text: str) -> None:
        """Leave a note for the others, who read it when they wait in vain."""
        # The store may be gone with the rank that held it, which must not hide the first error.
        with contextlib.suppress(Exception):
            self._store().set(str(self.rank), text)

    def lost(self, kind: Kind, error: RuntimeError, limit: float = 0.0) -> Exception:
        """Return the error for an operation that failed, which says who is missing."""
        self.say(f"waits in {_TEXT[kind]}")
        notes = self._notes()
        missing = [rank for rank in range(self.size) if not notes.get(rank, "").startswith("waits")]
        names = ", ".join(map(str, missing)) or "unknown"
        if not missing and len(set(notes.values())) > 1:
            return self.differing(notes)
        lines = [f"  rank {rank}: {notes.get(rank) or 'gave no sign'}" for rank in range(self.size)]
        if _is_timeout(error):
            return fp.CollectiveTimeoutError(
                f"{self.call}: rank {names} did not come to {_TEXT[kind]} within {limit:g} s:\n"
                + "\n".join(lines) + "\n"
                "It raised, skipped the call, or has a loss that reaches no parameter of the wrapped module. "
                "Make the same calls on every rank; FUNCPAR_TIMEOUT=seconds sets the limit."
            )  # fmt: skip
        return ConnectionError(
            f"{self.call}: rank {names} is gone, while others wait in {_TEXT[kind]}:\n"
            + "\n".join(lines) + f"\n  transport: {str(error).splitlines()[0][:160]}\n"
            "It was ended or raised; look at its own output, and start all ranks again."
        )  # fmt: skip

    def differing(self, told: dict[int, str]) -> Exception:
        """Return the error for ranks that make different calls, by what each says."""
        lines = [f"  rank {rank}: {what}" for rank, what in sorted(told.items())]
        return fp.ReplicaMismatchError(
            f"{self.call}: the ranks make different calls:\n" + "\n".join(lines) + "\n"
            "Make the same calls, with the same parameters, in the same order on every rank."
        )

    def _store(self) -> Any:
        store = _PrefixStore(f"compat/{self.number}", self.group.get_group_store())
        store.set_timeout(timedelta(seconds=_ROLL_CALL))
        return store

    def _notes(self) -> dict[int, str]:
        """Return what each rank has left, waiting a moment for those that are about to."""
        notes: dict[int, str] = {}
        end = time.monotonic() + _ROLL_CALL
        try:
            store = self._store()
            while len(notes) < self.size and time.monotonic() < end:
                for rank in range(self.size):
                    if rank not in notes and store.check([str(rank)]):
                        notes[rank] = store.get(str(rank)).decode()
                time.sleep(0.02)
        except Exception:
            notes.setdefault(self.rank, "waits; the store is gone, which often lives in rank 0")
        return {rank: note for rank, note in notes.items() if note}


def _stay_awake(work: Any) -> None:
    """Wait without sleep for a moment: a core that went to sleep wakes up later than a small sum is done."""
    end = time.perf_counter() + _AWAKE
    while _yield is not None and not work.is_completed() and time.perf_counter() < end:
        _yield()


def _is_timeout(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower()


def _described(row: list[int]) -> str:
    kind, number, *details = row
    what = {
        Kind.BACKWARD: f", {details[1]} parameters (layout {details[0]:x})",
        Kind.GRADIENT: f", {details[0]} parameters",
        Kind.MEAN: f", {details[0]} numbers",
        Kind.BUFFERS: f", {details[0]} bytes",
    }.get(Kind(kind), "")
    return f"{_TEXT[Kind(kind)]}{what}, in wrapper {number} of the group"
