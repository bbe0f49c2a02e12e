"""What collectives take: a tree of tensors and numbers, an axis, groups of its shards."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import tree
from funcpar._exchange import carry_out
from funcpar._group import Shard, find
from funcpar._maps import Groups, Map
from funcpar._request import Request
from funcpar._world import untraced

IndexGroups = Sequence[Sequence[int]] | None
Check = Callable[[Tensor, str, int], None]


@untraced
def communicate(
    name: str,
    x: Any,
    axis_name: Hashable,
    make: Callable[[Shard], Map],
    *,
    check: Check | None = None,
    prepare: Callable[[Tensor, Shard], Tensor] | None = None,
) -> Any:
    """Carry out one map on every leaf of a tree, after every leaf was checked.

    Args:
        name: The collective, for messages.
        x: The tree. A number is communicated as a 0-d tensor and comes back as a number.
        axis_name: The axis, None for the innermost.
        make: Returns the map, or raises; given this shard.
        check: Raises if a leaf, at a path, does not fit groups of some size.
        prepare: Applied to each leaf before it is sent.
    """
    shard = find(axis_name, name)
    wanted = make(shard)
    leaves, spec = tree.flatten(x)
    if check is not None or not all(isinstance(leaf, Tensor) for leaf in leaves):
        sent = _checked(name, leaves, spec.paths("x"), check, wanted, shard.group.size)
    else:
        sent = leaves
    if prepare is not None:
        sent = [prepare(tensor, shard) for tensor in sent]
    # Dicts agree by name, whatever the order of their keys in each shard.
    order = spec.order()
    outs = carry_out(Request(axis_name, name, spec), wanted, [sent[k] for k in order])
    answer: list[Any] = [None] * len(sent)
    for k, out in zip(order, outs, strict=True):
        answer[k] = out if isinstance(leaves[k], Tensor) or out.dim() else out.item()
    return tree.unflatten(spec, answer)


def _checked(
    name: str, leaves: list[Any], paths: Sequence[str], check: Check | None, wanted: Map, size: int
) -> list[Tensor]:
    groups = getattr(wanted, "groups", None)
    found = []
    for leaf, path in zip(leaves, paths, strict=True):
        tensor = leaf if isinstance(leaf, Tensor) else _as_tensor(name, leaf, path)
        if check is not None:
            check(tensor, f"{name}: {path}", len(groups[0]) if groups else size)
        found.append(tensor)
    return found


def summable(leaf: Tensor, shard: Shard) -> Tensor:
    """Return what is added: bool as int64."""
    return leaf.to(torch.int64) if leaf.dtype is torch.bool else leaf


def over_axes(axis_name: Hashable) -> Iterable[Hashable]:
    """Return the axes that a reduction goes over: a tuple names several."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _as_tensor(name: str, leaf: Any, path: str) -> Tensor:
    if not isinstance(leaf, numbers.Number):
        raise TypeError(
            f"{name}: {path} is a {type(leaf).__name__}, not a tensor or a number.\n"
            f"Give a tree of tensors and numbers; None leaves are passed over."
        )
    kind = {bool: torch.bool, int: torch.int64, complex: torch.complex128}.get(type(leaf), torch.float64)
    return torch.tensor(leaf, dtype=kind, device="cpu")


def as_groups(name: str, groups: Sequence[Sequence[int]] | None, size: int, even: bool = False) -> Groups:
    """Return ``axis_index_groups`` as given, or all shards as one group.

    Raises:
        ValueError: The groups do not hold every index exactly once, or differ in size where that
            cannot be.
    """
    if groups is None:
        return (tuple(range(size)),)
    found = tuple(tuple(int(index) for index in group) for group in groups)
    flat = [index for group in found for index in group]
    problems = [f"index {k} is out of range" for k in flat if not 0 <= k < size]
    problems += [f"{k} occurs {flat.count(k)} times" for k in range(size) if flat.count(k) > 1]
    problems += [f"{k} is missing" for k in range(size) if k not in flat]
    if problems:
        raise ValueError(
            f"{name}: axis_index_groups={list(map(list, found))} for an axis of size {size}: "
            f"{', '.join(problems)}.\nGive groups that hold every index from 0 to {size - 1} exactly once."
        )
    if even and len({len(group) for group in found}) > 1:
        raise ValueError(
            f"{name}: axis_index_groups={list(map(list, found))} has groups of different sizes, and the "
            f"results would have different shapes.\nGive groups of one size."
        )
    return found


def as_pairs(name: str, perm: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Return ``perm`` as pairs of source and destination.

    Raises:
        ValueError: An index is out of range, or occurs twice as source or as destination.
    """
    try:
        pairs = tuple((int(source), int(destination)) for source, destination in perm)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: perm={perm!r} is not a list of pairs.\nGive pairs (source, destination)."
        ) from None
    problems = []
    for role, side in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        problems += [f"{role} {k} is out of range" for k in side if not 0 <= k < size]
        problems += [
            f"{role} {k} occurs {side.count(k)} times" for k in sorted(set(side)) if side.count(k) > 1
        ]
    if problems:
        raise ValueError(
            f"{name}: perm={list(pairs)} for an axis of size {size}: {', '.join(problems)}.\n"
            f"Give each source and each destination at most once, from 0 to {size - 1}."
        )
    return pairs


def check_dim(where: str, option: str, dim: Any, num_dims: int) -> int:
    """Return a dimension counted from the front.

    Raises:
        TypeError: It is not an integer.
        ValueError: There is no such dimension.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{where}: {option}={dim!r} is not an integer.\nGive a dimension of the operand.")
    if not -num_dims <= dim < num_dims:
        allowed = f"from {-num_dims} to {num_dims - 1}" if num_dims else "an operand with a dimension"
        raise ValueError(
            f"{where}: {option}={dim} is out of range for {num_dims} dimensions.\nGive {allowed}."
        )
    return dim % num_dims


def check_divisible(where: str, option: str, leaf: Tensor, dim: int, size: int, tiled: bool) -> None:
    """Refuse a dimension that cannot be dealt out to ``size`` shards.

    Raises:
        ValueError: It has another size than ``size``, or with ``tiled`` one that ``size`` does not divide.
    """
    dim = check_dim(where, option, dim, leaf.dim())
    length = leaf.shape[dim]
    if tiled and length % size:
        raise ValueError(
            f"{where}: {option}={dim} has size {length}, which {size} shards do not divide.\n"
            f"Give it a multiple of {size}."
        )
    if not tiled and length != size:
        raise ValueError(
            f"{where}: {option}={dim} has size {length}, and there are {size} shards.\n"
            f"Give it size {size}, or tiled=True for a multiple of {size}."
        )
