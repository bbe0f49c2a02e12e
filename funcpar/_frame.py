"""A frame: where the shards of one call run, and what surrounds each of them there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

from funcpar import _exchange, _group, _random, _standstill, _streams
from funcpar._asked import asked
from funcpar._devices import Device
from funcpar._dynamo import install
from funcpar._errors import CollectiveTimeoutError, ReplicaMismatchError, ShardAborted
from funcpar._group import Group, Shard, current
from funcpar._isolation import isolate, isolation
from funcpar._pace import Pace
from funcpar._span import Span
from funcpar._standstill import Presence
from funcpar._workers import Outcome, Relay, run
from funcpar._world import is_transformed, num_levels, untraced

Body: TypeAlias = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the shards of one call run, and under which names.

    Attributes:
        devices: One per shard.
        axis: Name of the axis, None if it has none.
        weights: Weight of each shard in a mean; None means equal.
        where: The call as the user knows it, for notes: ``pmap(train_step)``.
        streams: Where each shard draws its random numbers from.
        funs: The user's functions, to look for tensors that they close over.
        name_of: Names an argument leaf, by its place, as the user would.
        span: How the axis goes on in other processes, None if it does not.
        takes_turns: Whether one shard runs at a time, since what it calls is likely to be compiled.
        pace: What is known of how long such calls take, for shards that may run one after another.
        is_cpu: Whether the shards share memory with the caller: nothing to copy, nothing to order.
    """

    devices: tuple[Device, ...]
    axis: Any = None
    weights: tuple[float, ...] | None = None
    where: str = "parallel_call"
    streams: _random.Streams = field(default_factory=_random.Streams)
    funs: Sequence[Callable[..., Any]] = ()
    name_of: Callable[[int], str] | None = None
    span: Span | None = None
    takes_turns: bool = False
    pace: Pace | None = None
    is_cpu: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_cpu", self.devices[0].is_cpu)

    @untraced
    def run(self, bodies: Sequence[Body], others: Iterable[Any] = (), pace: Pace | None = None) -> list[Any]:
        """Run one body per shard and return their values in rank order.

        ``others`` are further streams that what the bodies read may have been made on. ``pace`` is what
        is known of such calls on CPU: by it they may run one after another.

        One body runs right here, as plain code would. So do several, one after another, when this
        is a shard already: its device is the only one they may use.
        """
        size = len(bodies)
        inside = current() is not None
        levels = num_levels() if is_transformed() else None
        install()
        apart = pace is not None and not self.takes_turns and not pace.is_together()
        relay = Relay.of(self.devices) if apart else None
        presence = Presence(self.takes_turns, None if relay is None else relay.hand_on)
        group = Group(
            self.axis, size, self.weights, inside and size > 1, levels, self.span, presence, not self.is_cpu
        )
        shards = [Shard(group, place, device) for place, device in enumerate(self.devices)]
        before = _Before(is_worker=relay is not None)
        try:
            if self.span is None and (size == 1 or inside):
                return [
                    self._here(partial(_surround, body, shard, presence), shard)
                    for body, shard in zip(bodies, shards, strict=True)
                ]
            _random.install(start=not self.is_cpu)
            wrapped = [self._wrap(body, shard, presence) for body, shard in zip(bodies, shards, strict=True)]
            if size == 1:
                return [self._here(wrapped[0], shards[0])]
            start = perf_counter()
            values = self._in_workers(wrapped, presence, group, others, relay)
        finally:
            before.again()
        if pace is not None and not self.takes_turns:
            pace.took(relay is None, perf_counter() - start)
        return values

    def _in_workers(
        self,
        bodies: Sequence[Body],
        presence: Presence,
        group: Group,
        others: Iterable[Any],
        relay: Relay | None,
    ) -> list[Any]:
        """Run several bodies at the same time, or as a relay."""

        def abort() -> None:
            presence.failed = True
            group.abort()

        order = None if self.is_cpu else _streams.Order(self.devices, others)
        outcomes = run(self.devices, bodies, abort, order, relay)
        if any(outcome.error is not None for outcome in outcomes):
            self._raise(outcomes)
        values = [outcome.value for outcome in outcomes]
        if not self.is_cpu:
            _streams.received(values)
        return values

    def _wrap(self, body: Body, shard: Shard, presence: Presence) -> Body:
        stream = self.streams[shard.place]

        def wrapped() -> Any:
            outer = _random.enter(stream)
            try:
                value = _surround(body, shard, presence)
                shard.group.leave(shard.place)
                return value
            finally:
                _random.leave(outer)

        return wrapped

    def _here(self, body: Body, shard: Shard) -> Any:
        try:
            if shard.device.is_cpu:
                return body()
            with _streams.at(shard.device):
                return body()
        except BaseException as error:
            error.add_note(self._place(shard.place))
            raise

    def _place(self, place: int) -> str:
        return f"raised in {self._number(place)} on {self.devices[place]}, in {self.where}"

    def _number(self, place: int) -> str:
        first, size = (0, len(self.devices)) if self.span is None else self.span.numbers(len(self.devices))
        return f"shard {first + place} of {size}"

    def _raise(self, outcomes: list[Outcome]) -> NoReturn:
        """Raise Ctrl-C, or the lowest-ranked root cause, with its note and one per further failure."""
        failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
        # The traceback will hold the frames above: what they hold must not lead back to the error.
        outcomes.clear()
        causes = [pair for pair in failed if not isinstance(pair[1], ShardAborted)] or failed
        causes.sort(key=lambda pair: not isinstance(pair[1], KeyboardInterrupt))  # It must not be lost.
        rank, first = causes[0]
        first.add_note(self._place(rank))
        error: BaseException | None = None
        for other, error in causes[1:]:
            if error is not first and not (isinstance(error, _TOLD_TO_ALL) and type(error) is type(first)):
                first.add_note(f"{self._number(other)} failed too: {_text(error)}")
        try:
            raise first
        finally:
            del first, error, causes, failed


# What every shard raises with the same text, once the shards of an axis cannot go on together.
_TOLD_TO_ALL = (ReplicaMismatchError, CollectiveTimeoutError)


def _surround(body: Body, shard: Shard, presence: Presence) -> Any:
    """Run a body as a shard: it is found by collectives, and its functional_call uses a private shell."""
    presence.enter()
    outer = isolate(True)
    around = _group.enter(shard)
    try:
        return body()
    finally:
        _group.leave(around)
        isolate(outer)
        presence.leave()


class _Before:
    """What surrounds this thread before shards run in it.

    Each that does puts back what it has changed, but Ctrl-C may come between any two lines: it is put back
    once more when all are done. For several shards the thread is made like a worker, of which nobody has
    asked anything.
    """

    __slots__ = ("_asked", "_depth", "_isolated", "_live", "_stream", "_tokens")

    def __init__(self, is_worker: bool) -> None:
        self._stream = _random.here.stream
        self._isolated = isolation.on
        self._depth = _standstill.here.depth
        self._asked = asked.target, asked.handler, asked.seen
        self._tokens = _exchange.here.tokens
        self._live = _group.live()
        if is_worker:
            asked.target = asked.handler = asked.seen = _exchange.here.tokens = None

    def again(self) -> None:
        """Put it back."""
        _random.here.stream = self._stream
        isolation.on = self._isolated
        asked.target, asked.handler, asked.seen = self._asked
        _exchange.here.tokens = self._tokens
        _standstill.settle(self._depth)
        _group.leave(self._live)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # A failure of its __str__ must not hide the first failure.
        return type(error).__name__
