"""What a shard asks the others for, so that they can compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcpar._errors import ReplicaMismatchError
from funcpar._maps import Map

_NOT_THE_USERS = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


@dataclass(frozen=True, slots=True)
class Call:
    """What a shard asks for when it comes to meet the others; all must ask for the same.

    Attributes:
        name: The operation, as the user wrote it.
        signature: Options, structure, shapes and dtypes; compared by ``==``, shown by ``str``.
        site: File and line of the user's code.
    """

    name: str
    signature: Hashable
    site: str

    def matches(self, other: Call) -> bool:
        """Tell whether both ask for the same; the place in the code may differ."""
        return self.name == other.name and self.signature == other.signature

    @property
    def asked(self) -> str:
        """Return what is asked for, without the place in the code."""
        return self.name if self.signature is None else f"{self.name}({self.signature})"

    def __str__(self) -> str:
        return f"{self.asked} at {self.site}"


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


def call_site() -> str:
    """Return file and line of the innermost frame that is neither this package's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def different(other: int, theirs: Call, rank: int, call: Call) -> Callable[[], BaseException]:
    """Return what makes the error of two shards that ask for different things."""
    calls = "".join(
        f"\n  shard {r} called {c}" for r, c in sorted([(other, theirs), (rank, call)], key=_first)
    )
    return lambda: ReplicaMismatchError(
        f"the shards of one axis made different calls:{calls}\n"
        f"Every shard must make the same collective calls in the same order."
    )


def returned_early(returned: int, rank: int, call: Call) -> Callable[[], BaseException]:
    """Return what makes the error of a shard that returned while another asks."""
    return lambda: ReplicaMismatchError(
        f"the shards of one axis made different calls:\n  shard {rank} called {call}\n"
        f"  shard {returned} returned without it\n"
        f"Every shard must make the same collective calls in the same order."
    )


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]
