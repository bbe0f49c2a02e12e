"""Gradients summed over the shards of all processes while backward still runs.

A hook on each differentiated leaf sees its gradient when it is complete. The last shard of this
process to have it adds up, and gives the sum to the other processes in the order that all of them
keep. The value of the function travels at the end, with a note of whether this process got there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcpar._buckets import Sums
from funcpar._graph import Gradient, GradientHook, is_smooth
from funcpar._reduce import add_in_place, add_up
from funcpar._span import Span

_EXACT = (torch.float32, torch.float64)


class Overlap:
    """The sums of one call of a gradient function.

    Args:
        span: How the axis goes on in other processes.
        num_here: Number of shards of this process.
        leaves: The leaves of the differentiated arguments.
        axes: For each the dimension it is split along; gradients of those are not summed.
        order: The leaves in an order that all processes know.
    """

    def __init__(
        self,
        span: Span,
        num_here: int,
        leaves: Sequence[Any],
        axes: Sequence[int | None],
        order: Sequence[int],
    ) -> None:
        # Backward reaches the last layers first.
        self._places = [k for k in reversed(order) if axes[k] is None and _has_gradient(leaves[k])]
        kinds = [(leaves[k].shape, leaves[k].dtype, leaves[k].device) for k in self._places]
        dtype, device = (kinds[-1][1], kinds[-1][2]) if kinds else (torch.float64, torch.device("cpu"))
        self._tail = (torch.Size([2]), dtype if dtype in _EXACT else torch.float64, device)
        self._sums = Sums(span.link, span.call, [*kinds, self._tail])
        self._position = {k: position for position, k in enumerate(self._places)}
        self._rows: list[list[tuple[Gradient, bool] | None]] = [[None] * num_here for _ in kinds]
        self._values: list[Tensor | None] = [None] * num_here
        self._missing = [num_here] * len(kinds)
        self._lock = threading.Lock()
        self._span = span

    def hook(self, place: int, k: int) -> GradientHook | None:
        """Return what a stand-in for leaf ``k`` tells its gradient to, None if that is not summed."""
        if k not in self._position:
            return None
        return GradientHook(partial(self._bring, place, self._position[k]))

    def end(self, place: int, value: Tensor) -> None:
        """Note that a shard's backward is done, and its share of the value."""
        for position, row in enumerate(self._rows):
            if row and row[place] is None:
                self._bring(place, position, None, False)
        self._values[place] = value

    def totals(self) -> tuple[Tensor, dict[int, Gradient]]:
        """Return the value and the gradients of all shards of all processes.

        Raises:
            ProcessFailedError: Another process failed.
        """
        value = add_up(self._values)
        assert value is not None
        carried = value.dtype is self._tail[1]
        self._sums.put(len(self._places), self._tail_of(value if carried else None, failed=0.0), reusable=True)
        *grads, tail = self._sums.totals()
        link, call = self._span.link, self._span.call
        if tail[1] != 0:  # Whoever failed says so next.
            link.meet(f"the end of {call}")
        total = tail[0].clone() if carried else Sums.of(link, call, [value])[0]
        return total.to(value.device), dict(zip(self._places, grads, strict=True))

    def abandon(self) -> None:
        """Let the other processes come to an end: this one failed."""
        if self._span.is_met():
            self._sums.put(len(self._places), self._tail_of(None, failed=1.0), reusable=True)
            self._sums.abandon()

    def _tail_of(self, value: Tensor | None, failed: float) -> Tensor:
        _, dtype, device = self._tail
        tail = torch.tensor([0.0, failed], dtype=dtype, device=device)
        if value is not None:
            tail[0] = value
        return tail

    def _bring(self, place: int, position: int, grad: Gradient, is_own: bool) -> None:
        self._span.layout  # noqa: B018 (nothing is sent before the processes know to be in one call)
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
