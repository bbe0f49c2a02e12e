"""How the gradients of a function leave for other processes: which, in which order, in which messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcpar._buckets import Messages
from funcpar._graph import is_differentiable

# Behind the gradients ride the value, the weight, whether the process failed, and marks with their squares.
NUM_MARKS = 3
_TAIL = 3 + 2 * NUM_MARKS
_HALVES = {torch.float16, torch.bfloat16}


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
