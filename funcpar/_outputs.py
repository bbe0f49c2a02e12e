"""Outputs that cannot be merged: refused before anything is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcpar._equality import kind, plain_lists
from funcpar._errors import ReplicaMismatchError
from funcpar._graph import holds_tensors


def check_open(call: str, column: list[Any], path: str) -> None:
    """Refuse what may hold rows that nobody would join."""
    for leaf in column:
        if not isinstance(leaf, Tensor) and holds_tensors(leaf):
            raise TypeError(
                f"{call}: {path} is a {type(leaf).__qualname__} that holds tensors or arrays, and "
                f"is no pytree node, so its rows cannot be joined.\n"
                f"Return tensors in dicts, lists, tuples or dataclasses (torch.from_numpy makes an array "
                f'a tensor), or leave it where it is with out_axes="shards".'
            )


def check_lists(
    call: str, sizes: list[int] | None, specs: list[Any], rows: list[list[Any]], outs: Sequence[Any]
) -> None:
    """Refuse lists of plain values with one entry per row: equal ones would lose rows in silence."""
    if "auto" not in specs or sizes is None or len(outs) == 1:
        return
    if all(isinstance(leaf, Tensor) for leaf in rows[0]):
        return
    for path, items in plain_lists(outs[0], "output"):
        if len(items) == sizes[0] and len(set(sizes)) == 1:
            raise ValueError(
                f"{call}: {path} is a list with one entry per row of its shard, and "
                f'out_axes="auto" joins only tensors.\n'
                f'Return a tensor, or give it out_axes=None if all shards agree, or "shards".'
            )


def check_tensors(call: str, column: list[Any], path: str, wanted: str, alike: bool) -> None:
    """Refuse what is no tensor, or differs in dtype, or if it must be ``alike`` in shape."""
    if not all(isinstance(leaf, Tensor) for leaf in column):
        raise TypeError(
            f"{call}: {path} is {', '.join(kind(leaf) for leaf in column)}, and "
            f"{wanted} needs tensors.\n"
            f"Return a tensor, or give it out_axes=None if all shards agree."
        )
    if len({leaf.dtype for leaf in column}) > 1 or (alike and len({leaf.shape for leaf in column}) > 1):
        raise ReplicaMismatchError(
            f"{call}: {path} differs in shape or dtype between shards: "
            f"{', '.join(kind(leaf) for leaf in column)}; {wanted} needs them alike.\n"
            f"Return the same from every shard."
        )
