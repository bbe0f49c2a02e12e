"""Gradients summed over the shards of all processes while backward still runs.

A hook on each differentiated leaf sees its gradient when it is complete. The last shard of this
process to have it adds up, and gives the sum to the other processes in the order that all of them
keep. The value of the function travels at the end, with a note of whether this process got there.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcpar._buckets import Sums
from funcpar._graph import Gradient, GradientHook, is_smooth
from funcpar._reduce import add_in_place, add_up
from funcpar._span import Span

_EXACT = (torch.float32, torch.float64)
_TAIL = 5
# Squares of marks are exact in float32, for some processes too.
_MARKS = 1000


class Overlap:
    """The sums of one call of a gradient function.

    Seeds are the weights of the shards, as shares of the weight that all had together in the call
    before, if there was one like it: what they have now is known at the end, and then divided by.
    So a step of which nothing is new sends its gradients, and nothing else.

    Args:
        span: How the axis goes on in other processes.
        num_here: Number of shards of this process.
        leaves: The leaves of the differentiated arguments.
        axes: For each the dimension it is split along; gradients of those are not summed.
        order: The leaves in an order that all processes know.
        is_mean: Whether shards have weights.
    """

    def __init__(
        self,
        span: Span,
        num_here: int,
        leaves: Sequence[Any],
        axes: Sequence[int | None],
        order: Sequence[int],
        is_mean: bool,
    ) -> None:
        # Backward reaches the last layers first.
        self._places = [k for k in reversed(order) if axes[k] is None and _has_gradient(leaves[k])]
        kinds = [(leaves[k].shape, leaves[k].dtype, leaves[k].device) for k in self._places]
        dtype, device = (kinds[-1][1], kinds[-1][2]) if kinds else (torch.float64, torch.device("cpu"))
        self._tail = (torch.Size([_TAIL]), dtype if dtype in _EXACT else torch.float64, device)
        self._sums = Sums(span.link, span.call, [*kinds, self._tail])
        self._position = {k: position for position, k in enumerate(self._places)}
        self._rows: list[list[tuple[Gradient, bool] | None]] = [[None] * num_here for _ in kinds]
        self._values: list[Tensor | None] = [None] * num_here
        self._missing = [num_here] * len(kinds)
        self._lock = threading.Lock()
        self._span = span
        self._is_mean = is_mean
        self._expected = span.link.expected.get(span.key)
        if self._expected is None:
            span.open()

    @property
    def expected(self) -> float:
        """Return what the weight of all shards together is taken to be."""
        if self._expected is not None and not self._span.is_open:
            return self._expected
        return sum(self._span.layout.weights)

    def seed(self, place: int) -> float:
        """Return how much a shard's value counts."""
        return self._weights()[place] / self.expected if self._is_mean else 1.0

    def _weights(self) -> Sequence[float]:
        span = self._span
        return span.layout.weights[span.layout.here] if span.is_open else span.weights

    def hook(self, place: int, k: int) -> GradientHook | None:
        """Return what a stand-in for leaf ``k`` tells its gradient to, None if that is not summed."""
        if k not in self._position:
            return None
        return GradientHook(partial(self._bring, place, self._position[k]))

    def end(self, place: int, value: Tensor, grads: Sequence[Gradient]) -> None:
        """Note that a shard's backward is done, its value, and the gradients that no hook has told of."""
        for position, row in enumerate(self._rows):
            if row and row[place] is None:
                self._bring(place, position, grads[self._places[position]], False)
        seed = self.seed(place)
        self._values[place] = value * seed if seed else torch.zeros_like(value)

    def totals(self) -> tuple[Tensor, dict[int, Gradient]] | None:
        """Return the value and the gradients of all shards of all processes, None if they weigh nothing.

        Raises:
            ProcessFailedError: Another process failed.
            ReplicaMismatchError: Another process was in another call.
        """
        value = add_up(self._values)
        assert value is not None
        carried = value.dtype is self._tail[1]
        weight, expected = sum(self._weights()), self.expected
        self._put_tail(weight, value if carried else None)
        *grads, tail = self._sums.totals()
        total, weight, failed, mark, square = tail.tolist()
        link, call = self._span.link, self._span.call
        if failed:  # Whoever failed says so next.
            link.meet(f"the end of {call}")
        # The marks of all are equal if, and only if, the mean of squares is the square of the mean.
        if square * link.count != mark * mark:
            self._refuse()
        found = torch.full_like(value, total) if carried else Sums.of(link, call, [value])[0]
        if self._is_mean and not weight:
            return None
        link.expected[self._span.key] = weight
        if self._is_mean and weight != expected:
            for tensor in (found, *grads):
                tensor.mul_(expected / weight)
        return found, dict(zip(self._places, grads, strict=True))

    def abandon(self) -> None:
        """Let the other processes come to an end: this one failed."""
        link = self._span.link
        if not link.was_told():
            link.spoke()
            self._put_tail(0.0, None, failed=1.0)
            self._sums.abandon()

    def _put_tail(self, weight: float, value: Tensor | None, failed: float = 0.0) -> None:
        """Give what travels behind the gradients: value, weight, has it failed, and which call this is."""
        _, dtype, device = self._tail
        call, signature = self._span.key
        mark = float(zlib.crc32(call.encode() + signature) % _MARKS + 1)
        tail = torch.tensor([0.0, weight, failed, mark, mark * mark], dtype=dtype)
        if value is not None:
            tail[0] = value
        self._sums.put(len(self._places), tail.to(device), reusable=True)

    def _refuse(self) -> NoReturn:
        self._span.open()
        self._span.layout  # noqa: B018 (raises if the processes are in different calls)
        raise RuntimeError(
            f"{self._span.call}: the processes sent sums of different calls.\nStart them all again."
        )

    def _bring(self, place: int, position: int, grad: Gradient, is_own: bool) -> None:
        if self._span.is_open:  # What is new is compared before anything is sent.
            self._span.layout  # noqa: B018
        row = self._rows[position]
        if grad is not None and grad.layout is not torch.strided:
            grad, is_own = grad.to_dense(), True
        with self._lock:
            row[place] = grad, is_own
            self._missing[position] -= 1
            if self._missing[position]:
                return
        column = [pair[0] for pair in row if pair is not None]
        self._rows[position] = []  # Done.
        if len(column) == 1:
            total: Gradient = grad
        elif row[0] is not None and row[0][1] and add_in_place(column):
            total, is_own = column[0], True
        else:
            total, is_own = add_up(column), True
        if total is not None:  # None in every shard: zeros, at the end.
            self._sums.put(position, total, is_own)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_smooth(leaf)
