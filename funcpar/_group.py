"""The shards of one axis: who is in it, and how they meet.

Shards meet in :meth:`Group.exchange`: each brings a value and a description of the call it makes,
waits for the others, and leaves with all values in rank order. The descriptions must agree. A shard that
fails, returns early, makes another call or does not come ends the wait of all others with an error.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from funcpar import _streams
from funcpar._devices import Device
from funcpar._errors import CollectiveTimeoutError, ShardAborted, UnboundAxisError
from funcpar._limits import waiting_time
from funcpar._request import Call, different, returned_early
from funcpar._span import Span
from funcpar._world import untraced


class Presence(Protocol):
    """What wants to know when a shard waits for others, and so does not run."""

    def pause(self) -> None:
        """The shard of this thread begins to wait."""

    def go_on(self) -> None:
        """It is about to run again."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard that the current code runs in, on one device.

    Attributes:
        group: The shards of the axis.
        place: Which of this process's shards it is.
        device: What it runs on.
    """

    group: Group
    place: int
    device: Device

    @property
    def rank(self) -> int:
        """Return the number of this shard among all of the axis."""
        return self.group.offset + self.place


# What the last shard of a process does with what all of them brought: talk to other processes.
Across: TypeAlias = "Callable[[Span, Call, list[Any]], list[Any]]"


class Group:
    """The shards of one axis during one call (its backward has a group of its own).

    Attributes:
        name: The axis name, None if it was given none.
        num_here: Number of shards of this process.
        span: How the axis goes on in other processes, None if it does not.
        serial: The shards run one after another in one thread, so they cannot meet.
        levels: How many torch.func transforms or dual levels surround the call, and its one graph; or None.
        stand_ins: What the shards here work on in the place of arguments, each with the shard's place.
        ordered: Whether shards that meet must also be ordered on their accelerators.
    """

    def __init__(
        self,
        name: Hashable,
        num_here: int,
        weights: Sequence[float] | None = None,
        serial: bool = False,
        levels: int | None = None,
        span: Span | None = None,
        presence: Presence | None = None,
        ordered: bool = False,
    ) -> None:
        self.name = name
        self.num_here = num_here
        self.serial = serial
        self.levels = levels
        self.span = span
        self.ordered = ordered
        self.stand_ins: list[tuple[int, Sequence[Any]]] = []
        self._weights = weights
        self._presence = presence
        self._lock = _thread.allocate_lock()
        self._waiting: dict[int, tuple[Call, Any]] = {}
        self._returned: set[int] = set()
        self._failure: Callable[[], BaseException] | None = None
        self._answers: list[Any] = [None] * num_here
        self._wake = [_thread.allocate_lock() for _ in range(num_here)]
        for lock in self._wake:
            lock.acquire()

    @property
    def size(self) -> int:
        """Return the number of shards, of all processes."""
        return self.num_here if self.span is None else self.span.layout.size

    @property
    def offset(self) -> int:
        """Return the rank of this process's first shard."""
        return 0 if self.span is None else self.span.layout.offset

    @property
    def weights(self) -> Sequence[float] | None:
        """Return the weight of each shard in every mean."""
        return self._weights if self.span is None else self.span.layout.weights

    @untraced
    def exchange(
        self, shard: Shard, call: Call, value: Any, limited: bool = True, across: Across | None = None
    ) -> list[Any]:
        """Bring ``value``, wait for the others, and return all values in rank order.

        A wait that the user did not ask for is not ``limited``: a shard may compute for long. If the axis
        goes on in other processes, the last shard to come talks to them: ``across`` makes what all
        shards of this process get of what they brought.

        Raises:
            ReplicaMismatchError: Another shard makes another call, or has returned.
            CollectiveTimeoutError: A shard did not come in time.
            ShardAborted: Another shard failed.
            NotImplementedError: Several accelerators here would exchange with other processes.
        """
        if self.num_here == 1:
            return [value] if self.span is None or across is None else across(self.span, call, [value])
        rank = shard.place
        if self.serial:
            raise RuntimeError(
                f"{call}: the shards of this call run one after another, since it was made inside "
                f"another shard, and cannot meet.\nMake the call outside of the shard."
            )
        if self.ordered:
            if self.span is not None and across is not None:  # Nobody would order their streams.
                raise NotImplementedError(
                    f"{call}: over processes that have several accelerators each, shards cannot exchange "
                    f"values.\nStart one process per accelerator (torchrun --nproc-per-node), or keep the "
                    f'axis here with processes="local".'
                )
            marked = value, _streams.mark()
            return _streams.meet(self._exchange(rank, call, marked, limited, None), rank)
        return self._exchange(rank, call, value, limited, across)

    def _exchange(self, rank: int, call: Call, value: Any, limited: bool, across: Across | None) -> list[Any]:
        with self._lock:
            self._check(rank, call)
            if self._failure is not None:
                raise self._failure()
            self._waiting[rank] = (call, value)
            if len(self._waiting) == self.num_here:
                values = [self._waiting[r][1] for r in range(self.num_here)]
                del self._waiting[rank]  # This shard does not wait.
                if self.span is not None and across is not None:
                    values = self._answered(self.span, across, call, values)
                self._release(values)
                return values
        if self._presence is not None:
            self._presence.pause()
        try:
            if not self._wake[rank].acquire(timeout=waiting_time() if limited else -1):
                self._time_out(rank, call)
                self._wake[rank].acquire()
        finally:
            if self._presence is not None:
                self._presence.go_on()
        answer, self._answers[rank] = self._answers[rank], None
        if answer is None:
            assert self._failure is not None
            raise self._failure()
        return list(answer)

    def _answered(self, span: Span, across: Across, call: Call, values: list[Any]) -> list[Any]:
        try:
            return across(span, call, values)
        except BaseException:
            self._fail(lambda: ShardAborted("another shard failed"))
            raise

    def leave(self, rank: int) -> None:
        """Note that a shard has returned: whoever waits for it now or later is told at once."""
        if self.num_here == 1:
            return
        with self._lock:
            self._returned.add(rank)
            if self._waiting and self._failure is None:
                waiting, (call, _) = next(iter(self._waiting.items()))
                first, _ = self._numbers()
                self._fail(returned_early(first + rank, first + waiting, call))

    def abort(self) -> None:
        """Release every shard that waits, now or later: one of them failed."""
        if self.num_here == 1:
            return
        with self._lock:
            if self._failure is None:
                self._fail(lambda: ShardAborted("another shard failed"))

    def _check(self, rank: int, call: Call) -> None:
        """Fail the group if ``call`` cannot be what the others came or will come for."""
        if self._failure is not None:
            return
        first, _ = self._numbers()
        if self._returned:
            self._fail(returned_early(first + min(self._returned), first + rank, call))
            return
        for other, (theirs, _) in self._waiting.items():
            if not theirs.matches(call):
                self._fail(different(first + other, theirs, first + rank, call))
                return

    def _numbers(self) -> tuple[int, int]:
        """Return the rank of the first shard here and the number of all, for messages."""
        return (0, self.num_here) if self.span is None else self.span.numbers(self.num_here)

    def _fail(self, failure: Callable[[], BaseException]) -> None:
        self._failure = failure
        self._release(None)

    def _release(self, answer: Any) -> None:
        for rank in list(self._waiting):  # One by one: who is left when Ctrl-C comes is released after it.
            self._answers[rank] = answer
            if self._wake[rank].locked():
                self._wake[rank].release()
            del self._waiting[rank]

    def _time_out(self, rank: int, call: Call) -> None:
        with self._lock:
            if rank not in self._waiting:  # The last one came, or failed, at this very moment.
                return
            first, size = self._numbers()
            missing = [str(first + r) for r in range(self.num_here) if r not in self._waiting]
            places = "".join(
                f"\n  shard {first + r} waits in {c}" for r, (c, _) in sorted(self._waiting.items())
            )
            message = (
                f"{call}: shard{'s' * (len(missing) > 1)} {', '.join(missing)} of {size} "
                f"did not come within {waiting_time():g} seconds:{places}\n"
                f"Every shard must make the same calls; FUNCPAR_TIMEOUT (seconds) sets the limit."
            )
            self._fail(lambda: CollectiveTimeoutError(message))


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


def enter(shard: Shard) -> tuple[Shard, ...]:
    """Make a shard the innermost one, and return those around it, for :func:`leave`."""
    outer = _live.get()
    _live.set((*outer, shard))
    return outer


def leave(outer: tuple[Shard, ...]) -> None:
    """Let the code be in these shards alone."""
    _live.set(outer)
