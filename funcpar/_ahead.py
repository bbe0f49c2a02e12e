"""Sums of gradients across accelerators of one process, made while backward still runs.

A hook on each differentiated leaf sees its gradient when it is complete. Each shard packs a bucket
on its own stream as soon as it has all of it; the last shard to have one sums it over all, on
second streams, so that no shard's backward waits. Nobody ever waits for a gradient here: what some
shard has not brought by its end (a leaf that it does not use, a sparse gradient) is summed then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._buckets import Buckets, Messages
from funcpar._columns import Columns, add_to_first
from funcpar._devices import Device
from funcpar._graph import GradientHook, is_smooth


class Ahead:
    """The sums of one call, of as many evaluations as its shards make one after another.

    Args:
        devices: One per shard.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._places = [device.torch_device for device in devices]
        self._begun = [0] * len(devices)
        self._rounds: dict[int, Round] = {}
        self._mine: list[Round | None] = [None] * len(devices)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Ahead | None:
        """Return None where there is no way between devices that a sum could take beside backward."""
        return cls(devices) if len({device.torch_device for device in devices}) > 1 else None

    def hook(
        self, place: int, leaves: Sequence[Any], axes: Sequence[int | None]
    ) -> Callable[[int], GradientHook | None]:
        """Begin an evaluation in a shard, and return what tells leaf ``k`` whom to tell its gradient.

        Args:
            place: The shard.
            leaves: The leaves of the differentiated arguments, on its device.
            axes: For each the dimension it is split along; gradients of those are not summed.
        """
        # Backward reaches the last layers first.
        chosen = {
            k: (leaf.shape, leaf.dtype, self._places[0])
            for k, leaf in reversed(list(enumerate(leaves)))
            if axes[k] is None and isinstance(leaf, Tensor) and is_smooth(leaf)
        }
        with self._lock:
            number = self._begun[place]
            self._begun[place] += 1
            found = self._rounds.setdefault(number, Round(chosen, self._places))
            if min(self._begun) > number:
                del self._rounds[number]
        self._mine[place] = found
        return found.enter(place, chosen)

    def end(self, place: int) -> Round:
        """Return what has been summed, once all shards' backward is through."""
        found, self._mine[place] = self._mine[place], None
        assert found is not None
        return found


class Round:
    """One evaluation, in all shards.

    Args:
        chosen: Shape, dtype and device of each sum, by its leaf.
        places: The device of each shard.
    """

    def __init__(self, chosen: dict[int, Any], places: Sequence[torch.device]) -> None:
        self._chosen = chosen
        self._leaves = list(chosen)
        self._places = places
        self._messages = Messages.of(list(chosen.values()))
        self._buckets = [Buckets(self._messages) for _ in places]
        self._columns = Columns(len(self._messages.buckets), len(places))
        self._sides: list[Any] = [None] * len(places)
        self._sums: dict[int, tuple[Tensor, Any]] = {}

    def enter(self, place: int, chosen: dict[int, Any]) -> Callable[[int], GradientHook | None]:
        """Take part, and return the hook of each leaf."""
        if chosen != self._chosen:  # Then no bucket is ever complete, and the end of the call says why.
            return lambda k: None
        self._sides[place] = _streams.side()
        hooks = {
            k: GradientHook(partial(self._bring, place, position)) for position, k in enumerate(self._leaves)
        }
        return hooks.get

    def _bring(self, place: int, position: int, grad: Tensor, is_own: bool) -> None:
        is_here = grad.layout is torch.strided and grad.device == self._places[place]
        if not is_here or not _streams.is_at_home():
            return
        buckets = self._buckets[place]
        number = buckets.give(position, grad, is_own)
        if not buckets.is_complete(number):
            return
        brought = buckets.packed(number), _streams.mark()
        column = self._columns.bring(number, place, brought)
        if column is None:
            return
        rooms, marks = zip(*column, strict=True)
        with _streams.aside(self._sides, marks):
            add_to_first(rooms, self._places)
            self._sums[number] = rooms[0], _streams.ready_on(self._places[0])

    @property
    def leaves(self) -> frozenset[int]:
        """Return of which leaves the gradients were summed."""
        buckets = self._messages.buckets
        return frozenset(self._leaves[position] for number in self._sums for position in buckets[number])

    def totals(self) -> dict[int, Tensor]:
        """Return the sums, in the first shard."""
        found: list[Any] = [None] * len(self._leaves)
        for number, (room, event) in self._sums.items():
            _streams.wait(event, self._places[0])
            self._buckets[0].unpack(number, room, found)
        return {k: total for k, total in zip(self._leaves, found, strict=True) if total is not None}
