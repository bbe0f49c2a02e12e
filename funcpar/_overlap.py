"""Gradients summed over the shards of all processes while backward still runs.

A hook on each differentiated leaf sees its gradient when it is complete. The last shard of this
process to have it adds up, and gives the sum to the other processes in the order that all of them
keep. The value of the function travels at the end, with a note of whether this process got there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._buckets import Messages, Sums
from funcpar._columns import Columns
from funcpar._devices import Device
from funcpar._graph import Gradient, GradientHook, is_differentiable, owned
from funcpar._reduce import add_in_place, add_up, reduce_rows
from funcpar._span import Span
from funcpar._world import autocast_states

_HALVES = {torch.float16, torch.bfloat16}
# Behind the gradients ride the value, the weight, whether the process failed, and marks with their squares.
_NUM_MARKS = 3
_TAIL = 3 + 2 * _NUM_MARKS
# Sums of squares of marks are exact in float32 for some 4,000 processes.
_MARKS = 60


@dataclass(frozen=True, slots=True)
class Route:
    """How the gradients of a function leave, for all calls with the same structure and shapes.

    Attributes:
        order: The differentiated leaves in an order that all processes know.
        places: Those whose gradients are summed, in the order in which they are complete.
        position: Of each its position there.
        messages: In which messages they leave, and behind them the tail.
        is_half: Whether some are in half precision.
    """

    order: Sequence[int]
    places: list[int]
    position: dict[int, int]
    messages: Messages
    is_half: bool

    @classmethod
    def of(
        cls, leaves: Sequence[Any], axes: Sequence[int | None], order: Sequence[int], device: torch.device
    ) -> Route:
        """Find the route of the gradients of leaves, each split along an axis, or None, and not split.

        ``device`` is where this process has their sums.
        """
        # Backward reaches the last layers first.
        places = [k for k in reversed(order) if axes[k] is None and is_differentiable(leaves[k])]
        kinds = [(leaves[k].shape, leaves[k].dtype, device) for k in places]
        dtypes = {dtype for _, dtype, _ in kinds}
        # It rides with the gradients, unless it would be rounded more than they are.
        dtype = torch.float32 if dtypes == {torch.float32} else torch.float64
        tail = (torch.Size([_TAIL]), dtype, device)
        position = {k: position for position, k in enumerate(places)}
        return cls(order, places, position, Messages.of([*kinds, tail]), bool(dtypes & _HALVES))


class Overlap:
    """The sums of one call of a gradient function.

    Seeds are the weights of the shards, as shares of the weight that all had together in the call
    before, if there was one like it: what they have now is known at the end, and then divided by.
    So a step of which nothing is new sends its gradients, and nothing else.

    Args:
        span: How the axis goes on in other processes.
        devices: One per shard of this process.
        route: How the gradients leave.
        is_mean: Whether shards have weights.
    """

    def __init__(self, span: Span, devices: Sequence[Device], route: Route, is_mean: bool) -> None:
        # Where the work of one stream has to be ordered after that of another.
        self._is_ordered = len(devices) > 1 and not devices[0].is_cpu
        self._device = devices[0].torch_device
        self._sides: list[Any] = [None] * len(devices)
        self._ends: list[Any] = []
        self._route = route
        self._sums = Sums(span.link, span.call, route.messages)
        self._columns = Columns(len(route.places), len(devices))
        self._values: list[Tensor | None] = [None] * len(devices)
        # Where all leave together in the end, each shard's gradients wait for that.
        self._is_at_once = len(route.messages.buckets) == 1 and not self._is_ordered
        self._rows: list[list[Gradient]] = [[]] * len(devices)
        self._are_own: list[bool] = []
        self._held: list[tuple[int, Tensor, bool]] = []
        self._span = span
        self._is_mean = is_mean
        self._is_divided = False
        self._expected = span.link.expected.get(span.key)
        # In half precision a seed that is off by a factor may overflow.
        is_half = route.is_half or any(enabled for _, enabled, _ in autocast_states())
        if self._expected is None or is_half:
            span.open()

    def seed(self, place: int) -> float:
        """Return how much a shard's value counts."""
        return self._weights()[place] / self._divisor() if self._is_mean else 1.0

    def _divisor(self) -> float:
        """Return what the weight of all shards together is taken to be, from the first seed on."""
        if self._expected is None or (self._span.is_open and not self._is_divided):
            self._expected = sum(self._span.layout.weights)
        self._is_divided = True
        return self._expected

    def _is_deferred(self) -> bool:
        """Tell whether shards exchange with those of other processes.

        Then nothing is sent before they are done: it could pass an exchange in one process, and not
        in another, whose shards use other leaves.
        """
        return self._span.has_met or self._span.key in self._span.link.exchanging

    def _weights(self) -> Sequence[float]:
        span = self._span
        return span.layout.weights[span.layout.here] if span.is_open else span.weights

    def hook(self, place: int, k: int) -> GradientHook | None:
        """Return what a stand-in for leaf ``k`` tells its gradient to, None if there is no hurry."""
        if k not in self._route.position or len(self._route.messages.buckets) == 1:
            return None  # It is not summed, or all leave together in the end.
        return GradientHook(partial(self._bring, place, self._route.position[k]))

    def end(self, place: int, value: Tensor, grads: Sequence[Gradient]) -> None:
        """Note that a shard's backward is done, its value, and the gradients that no hook has told of.

        Raises:
            RuntimeError: They are part of a graph.
        """
        if value.requires_grad:
            raise RuntimeError(
                f"{self._span.call}: the value depends on a tensor that requires a gradient and is no "
                f"argument, so that gradients would be part of a graph; over processes they cannot be.\n"
                f"Detach that tensor, pass it as an argument, or make the call under torch.no_grad()."
            )
        if self._is_at_once:
            if len(self._rows) == 1:  # Asked while one list alone has them; sums of several are new memory.
                are_own = owned(grads)
                self._are_own = [are_own[k] for k in self._route.places]
            self._rows[place] = [grads[k] for k in self._route.places]
        elif rest := self._columns.lacking(place):
            are_own = owned(grads)
            for position in rest:
                k = self._route.places[position]
                self._bring(place, position, grads[k], are_own[k])
        seed = self.seed(place)
        self._values[place] = value * seed if seed else torch.zeros_like(value)

    def totals(self) -> tuple[Tensor, dict[int, Gradient]] | None:
        """Return the value and the gradients of all shards of all processes, None if they weigh nothing.

        Raises:
            ProcessFailedError: Another process failed.
            ReplicaMismatchError: Another process was in another call.
        """
        self._join()
        value = self._values[0] if len(self._values) == 1 else add_up(self._values)
        assert value is not None
        carried = value.dtype is self._route.messages.kinds[-1][1]
        weight, divisor = sum(self._weights()), self._divisor() if self._is_mean else 1.0
        link, call = self._span.link, self._span.call
        if self._is_deferred():
            link.exchanging.add(self._span.key)
            link.meet(f"the gradients of {call}")
            for each in self._held:
                self._sums.put(*each)
        if self._is_at_once:
            self._put_rows()
        self._put_tail(weight, value if carried else None)
        *grads, tail = self._sums.totals()
        total, weight, failed, *marks = tail.cpu().tolist()
        if failed:  # Whoever failed says so next.
            link.meet(f"the end of {call}")
        # The marks of all are equal if, and only if, the mean of squares is the square of the mean.
        pairs = zip(marks[:_NUM_MARKS], marks[_NUM_MARKS:], strict=True)
        if any(square * link.count != mark * mark for mark, square in pairs):
            self._refuse()
        self._span.has_ended = True
        if carried:
            found = torch.full_like(value, total)
        else:  # Of another dtype, and with a weight that is not rounded to that of the gradients.
            mine = torch.tensor(sum(self._weights()), dtype=torch.float64, device=value.device)
            found, exact = Sums.of(link, call, [value, mine])
            weight = exact.item()
        if self._is_mean and not weight:
            return None
        link.expected[self._span.key] = weight
        if self._is_mean and weight != divisor:
            for tensor in (found, *grads):
                tensor.mul_(divisor / weight)
        return found, dict(zip(self._route.places, grads, strict=True))

    def abandon(self) -> None:
        """Let the other processes come to an end: this one failed."""
        self._join()
        link = self._span.link
        if not link.was_told():
            link.spoke()
            if not self._is_deferred():  # Otherwise all are where words are exchanged.
                self._put_tail(0.0, None, failed=1.0)
                self._sums.abandon()

    def _put_rows(self) -> None:
        """Give the gradients of all shards, added up."""
        if self._span.is_open:  # What is new is compared before anything is sent.
            self._span.layout  # noqa: B018
        rows = self._rows
        if len(rows) > 1:  # In memory of their own.
            totals, are_own = reduce_rows(rows), [True] * len(rows[0])
        else:
            totals, are_own = rows[0], self._are_own
        self._sums.put_all(
            (k, total if total.layout is torch.strided else total.to_dense(), is_own)
            for k, (total, is_own) in enumerate(zip(totals, are_own, strict=True)) if total is not None
        )  # fmt: skip

    def _put_tail(self, weight: float, value: Tensor | None, failed: float = 0.0) -> None:
        """Give what travels behind the gradients."""
        _, dtype, device = self._route.messages.kinds[-1]
        call, signature = self._span.key
        code = zlib.crc32(call.encode() + signature + str(self._span.link.turn).encode())
        marks = [float(code // _MARKS**k % _MARKS + 1) for k in range(_NUM_MARKS)]
        head = 0.0 if value is None or not value.is_cpu else value.item()
        numbers = [head, weight, failed, *marks, *(mark * mark for mark in marks)]
        tail = torch.tensor(numbers, dtype=dtype).to(device)
        if value is not None and not value.is_cpu:  # Without a wait for it.
            tail[0] = value
        self._sums.put(len(self._route.places), tail, reusable=True)

    def _refuse(self) -> NoReturn:
        self._span.open()
        self._span.layout  # noqa: B018 (raises if the processes are in different calls)
        raise RuntimeError(
            f"{self._span.call}: the processes sent sums of different calls.\nStart them all again."
        )

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

    def _join(self) -> None:
        """In the caller: let its streams go on after the sums of this process."""
        for event, total in self._ends:
            _streams.wait(event, self._device)
            _streams.received(total)
        _streams.received(self._values)
