"""What a shard asks the others for, so that they can compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpar._group import Call, call_site
from funcpar._maps import Map


@dataclass(frozen=True, slots=True)
class Signature:
    """What the shards of a collective must agree on."""

    options: Map
    structure: Any
    leaves: tuple[tuple[torch.dtype, torch.Size], ...]

    def __str__(self) -> str:
        more = len(self.leaves) - 4
        shown = ", ".join(f"{str(dtype)[6:]}{list(shape)}" for dtype, shape in self.leaves[:4])
        shown += f", and {more} more" if more > 0 else ""
        structure = str(self.structure)
        return f"{shown}{self.options}" + (f"; structure {structure}" if structure != "*" else "")


@dataclass(frozen=True, slots=True)
class Request:
    """One collective as a shard asks for it, the same in forward, transpose and tangent.

    Attributes:
        axis: Name of the axis, None for the innermost.
        name: The operation, as the user wrote it.
        structure: Structure of the operand, and what else the shards must agree on.
    """

    axis: Any
    name: str
    structure: Any

    def call(self, wanted: Map, leaves: Sequence[Tensor]) -> Call:
        """Return what the group compares."""
        kinds = tuple((leaf.dtype, leaf.shape) for leaf in leaves)
        return Call(self.name, Signature(wanted, self.structure, kinds), call_site())
