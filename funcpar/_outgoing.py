"""How gradients leave for other processes: all at once, or bucket by bucket while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._buckets import Sums, joined, parted
from funcpar._columns import Columns
from funcpar._devices import Device
from funcpar._graph import Gradient, GradientHook, owned
from funcpar._reduce import add_in_place, add_up, reduce_rows
from funcpar._route import Route
from funcpar._span import Span


class AtOnce:
    """What leaves in one message, once all shards of this process are done."""

    hook = None  # There is no hurry.

    def __init__(self, span: Span, route: Route, num_shards: int) -> None:
        self._span = span
        self._route = route
        self._rows: list[list[Gradient]] = [[None] * len(route.places)] * num_shards
        self._sent: list[Tensor] = []
        self._works: list[Any] = []

    def end(self, place: int, grads: Sequence[Gradient]) -> None:
        """Take the gradients of a shard."""
        self._rows[place] = [grads[k] for k in self._route.places]

    def join(self) -> None:
        """Do nothing: there are no streams but the caller's."""

    def send(self, tail: Tensor) -> None:
        """Let the sums over shards leave, and the tail with them."""
        row = self._rows[0] if len(self._rows) == 1 else reduce_rows(self._rows)
        kinds = self._route.messages.kinds
        self._sent = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None
            else grad if grad.layout is torch.strided else grad.to_dense()
            for grad, (shape, dtype, device) in zip([*row, tail], kinds, strict=True)
        ]  # fmt: skip
        self._room = joined(self._sent)
        self._works.append(self._span.link.start_sum(self._room))

    def totals(self) -> list[Tensor]:
        """Wait for the sums over processes, and return them."""
        self._span.link.wait(self._span.in_gradients, self._works.pop(), self._room.is_cpu)
        _streams.received([self._room])
        return parted(self._room, self._sent)

    def abandon(self, tail: Tensor) -> None:
        """Send zeros, so that nobody waits for them; nobody waits here."""
        self._rows = [[None] * len(self._route.places)]
        self.send(tail)
        self._span.link.hold(self._room)


class InBuckets:
    """What leaves as hooks on the leaves see it complete.

    Args:
        span: How the axis goes on in other processes.
        route: How the gradients leave.
        devices: One per shard of this process.
        is_deferred: Tells whether nothing may leave before all shards are done.
    """

    def __init__(
        self, span: Span, route: Route, devices: Sequence[Device], is_deferred: Callable[[], bool]
    ) -> None:
        self._span = span
        self._route = route
        # Where the work of one stream has to be ordered after that of another.
        self._is_ordered = len(devices) > 1 and not devices[0].is_cpu
        self._device = devices[0].torch_device
        self._sides: list[Any] = [None] * len(devices)
        self._ends: list[Any] = []
        self._columns = Columns(len(route.places), len(devices))
        self._sums = Sums(span.link, span.in_gradients, route.messages)
        self._is_deferred = is_deferred
        self._held: list[tuple[int, Tensor, bool]] = []

    def hook(self, place: int, k: int) -> GradientHook | None:
        """Return what a stand-in for leaf ``k`` tells its gradient to, None if it is not summed."""
        position = self._route.position.get(k)
        return None if position is None else GradientHook(partial(self._bring, place, position))

    def end(self, place: int, grads: Sequence[Gradient]) -> None:
        """Take the gradients of a shard that no hook has told of."""
        if rest := self._columns.lacking(place):
            are_own = owned(grads)
            for position in rest:
                k = self._route.places[position]
                self._bring(place, position, grads[k], are_own[k])

    def join(self) -> None:
        """In the caller: let its streams go on after the sums of this process."""
        for event, total in self._ends:
            _streams.wait(event, self._device)
            _streams.received(total)

    def send(self, tail: Tensor) -> None:
        """Let the rest leave, and the tail."""
        for each in self._held:
            self._sums.put(*each)
        self._sums.put(len(self._route.places), tail, reusable=True)

    def totals(self) -> list[Tensor]:
        """Wait for the sums over processes, and return them."""
        return self._sums.totals()

    def abandon(self, tail: Tensor) -> None:
        """Send zeros for what is missing, so that nobody waits for it; nobody waits here."""
        self._sums.put(len(self._route.places), tail, reusable=True)
        self._sums.abandon()

    def _bring(self, place: int, position: int, grad: Gradient, is_own: bool) -> None:
        if self._span.is_open:  # What is new is compared before anything is sent.
            self._span.layout  # noqa: B018
        if grad is not None and grad.layout is not torch.strided:
            grad, is_own = grad.to_dense(), True
        mark = None
        if self._is_ordered:
            self._sides[place], mark = _streams.side(), _streams.mark()
        brought = self._columns.bring(position, place, (grad, is_own, mark))
        if brought is None:
            return
        column, are_own, marks = (list(part) for part in zip(*brought, strict=True))
        if not self._is_ordered:
            self._add(position, column, are_own[0])
            return
        with _streams.aside(self._sides, marks):
            column = [each if each is None else _streams.bring(each, self._device) for each in column]
            total = self._add(position, column, are_own[0])
            self._ends.append((_streams.ready_on(self._device), total))

    def _add(self, position: int, column: list[Gradient], is_own: bool) -> Gradient:
        """Add up what all shards have brought, and give it to the other processes."""
        total = column[0]
        if len(column) > 1:
            if not is_own or not add_in_place(column):
                total = add_up(column)
            is_own = True
        if total is None:  # In every shard: zeros, at the end.
            pass
        elif self._is_deferred():
            self._held.append((position, total, is_own))
        else:
            self._sums.put(position, total, is_own)
        return total
