"""What a process tells the others of its output leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpar._alike import described, digest_of_values
from funcpar._graph import is_smooth, is_wrapped
from funcpar._world import in_dual_level

# What an output leaf is, process by process: rows that stay there, a part of a sum, or the same in all.
LOCAL, PART, SAME = "rows of each process", "a sum over shards", "the same on all shards"


@dataclass(frozen=True, slots=True)
class Told:
    """What the others need to know of an output leaf.

    Attributes:
        kind: LOCAL, PART or SAME.
        form: Dtype and shape, or type, where they must agree.
        value: A stand-in for the value of what is the same.
        number: A part of a sum that is small enough to travel along.
        is_differentiated: Whether it is part of a graph.
    """

    kind: str
    form: Any = None
    value: Any = None
    number: Any = None
    is_differentiated: bool = False


def told_of(kind: str, leaf: Any, plain: bool) -> Told:
    """Return that of a leaf; numbers travel along only if no transform wraps them."""
    if kind == LOCAL:
        return Told(kind)
    if not isinstance(leaf, Tensor):
        form = type(leaf).__qualname__
        same = described(leaf + 0.0 if isinstance(leaf, float) else leaf)
        return Told(kind, form, same) if kind == SAME else Told(kind, form, number=leaf)
    if kind == SAME:
        return Told(kind, *digest_of_values(leaf), None, is_differentiated(leaf))
    number = leaf.item() if plain and leaf.dim() == 0 and is_smooth(leaf) and not leaf.is_complex() else None
    return Told(kind, described(leaf), None, number, is_differentiated(leaf))


def with_values(leaf: Tensor) -> str:
    """Describe a tensor, its values included."""
    form, value = digest_of_values(leaf)
    return f"{form} with values {value.hex()}"


def zero_of(leaf: Tensor) -> Tensor:
    """Return a 0 whose derivatives of every order lead back to a tensor, whatever its entries are."""
    return leaf.reshape(-1)[:0].exp().sum()


def is_differentiated(leaf: Tensor) -> bool:
    """Tell whether a tensor is part of a graph, or carries a transform."""
    if not is_smooth(leaf):
        return False
    return (leaf.requires_grad and torch.is_grad_enabled()) or is_wrapped(leaf) or in_dual_level()
