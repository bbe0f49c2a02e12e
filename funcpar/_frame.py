"""A frame: where the shards of one call run, and what surrounds each of them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from funcpar import _functional, _random
from funcpar._devices import Device
from funcpar._errors import ShardAborted
from funcpar._group import Group, Shard, current, entered
from funcpar._workers import Outcome, run
from funcpar._world import is_transformed, num_levels

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
    """

    devices: tuple[Device, ...]
    axis: Any = None
    weights: tuple[float, ...] | None = None
    where: str = "parallel_call"
    streams: _random.Streams = field(default_factory=_random.Streams)

    def run(self, bodies: Sequence[Body]) -> list[Any]:
        """Run one body per shard and return their values in rank order.

        One body runs right here, as plain code would. So do several, one after another, when this
        is a shard already: its device is the only one they may use.
        """
        size = len(bodies)
        inside = current() is not None
        levels = num_levels() if is_transformed() else None
        group = Group(self.axis, size, self.weights, serial=inside and size > 1, levels=levels)
        shards = [Shard(group, rank, device) for rank, device in enumerate(self.devices)]
        if size == 1 or inside:
            outcomes = [self._here(body, shard) for body, shard in zip(bodies, shards, strict=True)]
        else:
            _random.install()
            wrapped = [self._wrap(body, shard) for body, shard in zip(bodies, shards, strict=True)]
            outcomes = run(self.devices, wrapped, lambda error: group.abort())
        if any(outcome.error is not None for outcome in outcomes):
            self._raise(outcomes)
        return [outcome.value for outcome in outcomes]

    def _wrap(self, body: Body, shard: Shard) -> Body:
        stream = self.streams[shard.rank]

        def wrapped() -> Any:
            outer_stream = _random.enter(stream)
            outer_isolation = _functional.isolate(True)
            try:
                with entered(shard):
                    value = body()
                    shard.group.leave(shard.rank)
                    return value
            finally:
                _functional.isolate(outer_isolation)
                _random.leave(outer_stream)

        return wrapped

    def _here(self, body: Body, shard: Shard) -> Outcome:
        outcome = Outcome()
        try:
            with entered(shard):
                outcome.value = body()
        except BaseException as error:
            outcome.error = error
        return outcome

    def _raise(self, outcomes: list[Outcome]) -> None:
        """Raise the lowest-ranked root cause, with a note for itself and one per further failure."""
        size = len(outcomes)
        error: BaseException | None = None
        failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
        causes = [pair for pair in failed if not isinstance(pair[1], ShardAborted)] or failed
        try:
            rank, first = causes[0]
            first.add_note(f"raised in shard {rank} of {size} on {self.devices[rank]}, in {self.where}")
            told = {str(first)}
            for rank, error in causes[1:]:
                if error is not first and str(error) not in told:
                    first.add_note(f"shard {rank} of {size} failed too: {type(error).__name__}: {error}")
                    told.add(str(error))
            raise first
        finally:
            # The traceback holds this frame: without this, frame and error would hold each other.
            del first, error, causes, failed, outcomes
