"""The shards of one axis: who is in it, and how they meet.

Shards meet in :meth:`Group.exchange`: each brings a value and a description of the call it makes,
waits for the others, and leaves with all values in rank order. The descriptions must agree. A
shard that fails, returns early, brings another call or does not come ends the wait of all others
with an error, at once or at the time limit.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcpar import _streams
from funcpar._devices import Device
from funcpar._errors import CollectiveTimeoutError, ReplicaMismatchError, ShardAborted, UnboundAxisError

_NOT_THE_USERS = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


@dataclass(frozen=True, slots=True)
class Call:
    """What a shard asks for when it comes to meet the others; all must ask for the same.

    Attributes:
        name: The operation, as the user wrote it.
        signature: Options, structure, shapes and dtypes; compared by ``==``, shown by ``str``.
        site: File and line of the user's code.
    """

    name: str
    signature: Hashable
    site: str

    def matches(self, other: Call) -> bool:
        """Tell whether both ask for the same; the place in the code may differ."""
        return self.name == other.name and self.signature == other.signature

    def __str__(self) -> str:
        signature = "" if self.signature is None else f"({self.signature})"
        return f"{self.name}{signature} at {self.site}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard that the current code runs in: one rank of one group, on one device."""

    group: Group
    rank: int
    device: Device


class Group:
    """The shards of one axis during one call (its backward has a group of its own).

    Attributes:
        name: The axis name, None if it was given none.
        size: Number of shards.
        weights: Weight of each shard in every mean.
        serial: The shards run one after another in one thread, so they cannot meet.
        levels: How many torch.func transforms surround the call; None if it is not transformed, nor
            under a dual level. If it is, the shards share the caller's graph.
        ordered: Whether shards that meet must also be ordered on their accelerators.
    """

    def __init__(
        self,
        name: Hashable,
        size: int,
        weights: Sequence[float] | None = None,
        serial: bool = False,
        levels: int | None = None,
        ordered: bool = False,
    ) -> None:
        self.name = name
        self.size = size
        self.weights = weights
        self.serial = serial
        self.levels = levels
        self.ordered = ordered
        self._lock = _thread.allocate_lock()
        self._waiting: dict[int, tuple[Call, Any]] = {}
        self._returned: set[int] = set()
        self._failure: Callable[[], BaseException] | None = None
        self._answers: list[Any] = [None] * size
        self._wake = [_thread.allocate_lock() for _ in range(size)]
        for lock in self._wake:
            lock.acquire()

    def exchange(self, rank: int, call: Call, value: Any, limited: bool = True) -> list[Any]:
        """Bring ``value``, wait for the others, and return all values in rank order.

        A wait that the user did not ask for is not ``limited``: a shard may compute for long.

        Raises:
            ReplicaMismatchError: Another shard makes another call, or has returned.
            CollectiveTimeoutError: A shard did not come in time.
            ShardAborted: Another shard failed.
        """
        if self.size == 1:
            return [value]
        if self.serial:
            raise RuntimeError(
                f"{call}: the shards of this call run one after another, since it was made inside "
                f"another shard, and cannot meet.\nMake the call outside of the shard."
            )
        if self.ordered:
            marked = value, _streams.mark()
            return _streams.meet(self._exchange(rank, call, marked, limited), rank)
        return self._exchange(rank, call, value, limited)

    def _exchange(self, rank: int, call: Call, value: Any, limited: bool) -> list[Any]:
        with self._lock:
            self._check(rank, call)
            if self._failure is not None:
                raise self._failure()
            self._waiting[rank] = (call, value)
            if len(self._waiting) == self.size:
                values = [self._waiting[r][1] for r in range(self.size)]
                del self._waiting[rank]  # This shard does not wait.
                self._release(values)
                return values
        if not self._wake[rank].acquire(timeout=_timeout() if limited else -1):
            self._time_out(rank, call)
            self._wake[rank].acquire()
        answer, self._answers[rank] = self._answers[rank], None
        if answer is None:
            assert self._failure is not None
            raise self._failure()
        return list(answer)

    def leave(self, rank: int) -> None:
        """Note that a shard has returned: whoever waits for it now or later is told at once."""
        if self.size == 1:
            return
        with self._lock:
            self._returned.add(rank)
            if self._waiting and self._failure is None:
                waiting, (call, _) = next(iter(self._waiting.items()))
                self._fail(_returned_early(rank, waiting, call))

    def abort(self) -> None:
        """Release every shard that waits, now or later: one of them failed."""
        if self.size == 1:
            return
        with self._lock:
            if self._failure is None:
                self._fail(lambda: ShardAborted("another shard failed"))

    def _check(self, rank: int, call: Call) -> None:
        """Fail the group if ``call`` cannot be what the others came or will come for."""
        if self._failure is not None:
            return
        if self._returned:
            self._fail(_returned_early(min(self._returned), rank, call))
            return
        for other, (theirs, _) in self._waiting.items():
            if not theirs.matches(call):
                self._fail(_different(other, theirs, rank, call))
                return

    def _fail(self, failure: Callable[[], BaseException]) -> None:
        self._failure = failure
        self._release(None)

    def _release(self, answer: Any) -> None:
        waiting, self._waiting = self._waiting, {}
        for rank in waiting:
            self._answers[rank] = answer
            self._wake[rank].release()

    def _time_out(self, rank: int, call: Call) -> None:
        with self._lock:
            if rank not in self._waiting:  # The last one came, or failed, at this very moment.
                return
            missing = [r for r in range(self.size) if r not in self._waiting]
            places = "".join(f"\n  shard {r} waits in {c}" for r, (c, _) in sorted(self._waiting.items()))
            message = (
                f"{call}: shard{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.size} "
                f"did not come within {_timeout():g} seconds:{places}\n"
                f"Every shard must make the same calls; FUNCPAR_TIMEOUT (seconds) sets the limit."
            )
            self._fail(lambda: CollectiveTimeoutError(message))


def _different(other: int, theirs: Call, rank: int, call: Call) -> Callable[[], BaseException]:
    calls = "".join(
        f"\n  shard {r} called {c}" for r, c in sorted([(other, theirs), (rank, call)], key=_first)
    )
    return lambda: ReplicaMismatchError(
        f"the shards of one axis made different calls:{calls}\n"
        f"Every shard must make the same collective calls in the same order."
    )


def _returned_early(returned: int, rank: int, call: Call) -> Callable[[], BaseException]:
    return lambda: ReplicaMismatchError(
        f"the shards of one axis made different calls:\n  shard {rank} called {call}\n"
        f"  shard {returned} returned without it\n"
        f"Every shard must make the same collective calls in the same order."
    )


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _timeout() -> float:
    given = os.environ.get("FUNCPAR_TIMEOUT", "300")
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"FUNCPAR_TIMEOUT={given!r} is not a number of seconds.\nSet it to one.") from None


def call_site() -> str:
    """Return file and line of the innermost frame that is neither this package's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_live: ContextVar[tuple[Shard, ...]] = ContextVar("funcpar_live", default=())


def live() -> tuple[Shard, ...]:
    """Return the shards that the current code runs in, outermost first."""
    return _live.get()


def current() -> Shard | None:
    """Return the innermost shard that the current code runs in."""
    shards = _live.get()
    return shards[-1] if shards else None


def find(axis: Hashable, call: str) -> Shard:
    """Return the innermost shard whose axis has this name; None names the innermost axis.

    Raises:
        UnboundAxisError: There is none.
    """
    for shard in reversed(_live.get()):
        if axis is None or shard.group.name == axis:
            return shard
    names = [repr(shard.group.name) for shard in _live.get() if shard.group.name is not None]
    if axis is None or not _live.get():
        wanted = "an axis" if axis is None else f"axis {axis!r}"
        raise UnboundAxisError(
            f"{call}: {wanted} is needed, and the call is made outside of every pmap.\n"
            f"Call it in a function that is mapped with fp.pmap(fun, axis_name)."
        )
    raise UnboundAxisError(
        f"{call}: axis {axis!r} is not bound here; the live axes are {', '.join(names) or 'unnamed'}.\n"
        f"Name one of those, leave the name out for the innermost, or map with axis_name={axis!r}."
    )


class entered:
    """Make a shard the innermost one for a ``with`` block."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __enter__(self) -> Shard:
        self._token = _live.set((*_live.get(), self._shard))
        return self._shard

    def __exit__(self, *_: object) -> None:
        _live.reset(self._token)
