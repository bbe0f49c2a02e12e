"""Whether shards returned the same, and how to show what they returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import tree
from funcpar._graph import innermost


def plain_lists(out: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the lists in an output that hold no tensor and no container."""
    if isinstance(out, dict):
        for key, item in out.items():
            yield from plain_lists(item, f"{path}[{key!r}]")
    elif isinstance(out, list | tuple):
        if (
            isinstance(out, list)
            and out
            and not any(isinstance(i, Tensor | list | tuple | dict) for i in out)
        ):
            yield path, out
        for k, item in enumerate(out):
            yield from plain_lists(item, f"{path}[{k}]")


def same_object(column: Sequence[Any]) -> bool:
    return all(leaf is column[0] for leaf in column)


def all_equal(column: Sequence[Any], path: str = "", checked: set[Any] | None = None) -> bool:
    """Tell whether all shards returned the same.

    A look at the values of an accelerator makes the host wait for it: with ``checked``, the set of what
    was found equal before, they are looked at once for each path, shape and dtype.
    """
    if same_object(column):
        return True
    key: Any = None
    if checked is not None and all(isinstance(leaf, Tensor) for leaf in column):
        key = path, *((leaf.shape, leaf.dtype, leaf.layout) for leaf in column)
        if key in checked:
            return True
    equal = all(_equal(column[0], leaf) for leaf in column[1:])
    if equal and key is not None and checked is not None:
        checked.add(key)
    return equal


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        return _equal_values(innermost(one).detach(), innermost(other).detach())
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    try:
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
    except Exception:  # What cannot be compared is not known to be equal.
        return False


def _equal_values(one: Tensor, other: Tensor) -> bool:
    other = other.to(one.device)
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def are_alike(one: Any, other: Any) -> bool:
    """Tell whether two trees of one structure hold the same values."""
    return all(map(all_equal, zip(tree.leaves(one), tree.leaves(other), strict=True)))


def where_unequal(column: list[Any]) -> str:
    shards = [str(rank) for rank, leaf in enumerate(column) if not _equal(column[0], leaf)]
    return f" (shard {', '.join(shards)} from shard 0)"


def kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 40 else type(leaf).__name__
