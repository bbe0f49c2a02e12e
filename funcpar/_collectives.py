"""Collectives that reduce, and what a shard knows of its axis.

Each works on a pytree, passes None leaves, communicates a Python number and returns a number, and
is differentiable with the exact adjoint of the map over all shards, in reverse and forward mode, to
any order. Every shard of the axis must make the same call; see ``_group`` for what happens if not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar._graph import is_smooth
from funcpar._group import Shard, find
from funcpar._maps import Extremum, Sum
from funcpar._operand import IndexGroups, as_groups, communicate, over_axes, summable


def psum(x: Any, axis_name: Hashable = None, *, axis_index_groups: IndexGroups = None) -> Any:
    """Sum over the shards of an axis, in rank order; every shard gets the same.

    Args:
        x: A tree of tensors of any shape S and numbers; bool tensors are summed as int64.
        axis_name: The mapped axis, by default the innermost; a tuple names several.
        axis_index_groups: Groups of ranks to sum within, each rank in exactly one.

    Returns:
        The tree of sums, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: The groups are no partition of the axis.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: x / fp.psum(x.sum()), in_axes=0)(torch.tensor([1.0, 2.0, 1.0]))
        tensor([0.2500, 0.5000, 0.2500])

    References:
        ``jax.lax.psum``. A constant is communicated, not multiplied, so uneven groups are right.
    """
    for axis in over_axes(axis_name):
        x = communicate(
            "psum",
            x,
            axis,
            lambda s: Sum(as_groups("psum", axis_index_groups, s.group.size)),
            prepare=summable,
        )
    return x


def pmean(x: Any, axis_name: Hashable = None, *, axis_index_groups: IndexGroups = None) -> Any:
    """Take the mean over the shards of an axis, weighted as every mean of the call.

    Weights are the rows of each shard, or what ``weight=`` says; a shard of weight 0 is left out.

    Args:
        x: A tree of tensors of any shape S and numbers; integer and bool tensors become the default
            dtype.
        axis_name: The mapped axis, by default the innermost; a tuple names several.
        axis_index_groups: Groups of ranks to average within, each rank in exactly one.

    Returns:
        The tree of means, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: The groups are no partition of the axis.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: x - fp.pmean(x.mean()), in_axes=0)(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])

    References:
        ``jax.lax.pmean``, which does not weight, and divides uneven groups by the first one's size.
    """

    def share(leaf: Tensor, shard: Shard) -> Tensor:
        if not is_smooth(leaf):
            leaf = leaf.to(torch.get_default_dtype())
        part = _share(shard, as_groups("pmean", axis_index_groups, shard.group.size))
        # A shard that does not count may hold 0/0.
        return (
            torch.zeros_like(leaf)
            if part == 0.0
            else leaf * torch.full((), part, dtype=leaf.real.dtype, device=leaf.device)
        )

    for axis in over_axes(axis_name):
        x = communicate(
            "pmean",
            x,
            axis,
            lambda s: Sum(as_groups("pmean", axis_index_groups, s.group.size)),
            prepare=share,
        )
    return x


def pmax(x: Any, axis_name: Hashable = None, *, axis_index_groups: IndexGroups = None) -> Any:
    """Take the largest entries over the shards of an axis; NaN wins.

    It has no gradient: a backward through it raises NotImplementedError.

    Args:
        x: A tree of real tensors of any shape S and numbers.
        axis_name: The mapped axis, by default the innermost; a tuple names several.
        axis_index_groups: Groups of ranks, each rank in exactly one.

    Returns:
        The tree of maxima, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: The groups are no partition of the axis.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: x - fp.pmax(x.max()), in_axes=0)(torch.tensor([1.0, 5.0, 3.0]))
        tensor([-4.,  0., -2.])

    References:
        ``jax.lax.pmax``, which drops NaN on CPU.
    """
    return _extremum("pmax", x, axis_name, axis_index_groups)


def pmin(x: Any, axis_name: Hashable = None, *, axis_index_groups: IndexGroups = None) -> Any:
    """Take the smallest entries over the shards of an axis; NaN wins.

    It has no gradient: a backward through it raises NotImplementedError.

    Args:
        x: A tree of real tensors of any shape S and numbers.
        axis_name: The mapped axis, by default the innermost; a tuple names several.
        axis_index_groups: Groups of ranks, each rank in exactly one.

    Returns:
        The tree of minima, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: The groups are no partition of the axis.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: x - fp.pmin(x.min()), in_axes=0)(torch.tensor([1.0, 5.0, 3.0]))
        tensor([0., 4., 2.])

    References:
        ``jax.lax.pmin``, which drops NaN on CPU.
    """
    return _extremum("pmin", x, axis_name, axis_index_groups)


def axis_index(axis_name: Hashable = None) -> int:
    """Return the rank of this shard along an axis, from 0.

    Args:
        axis_name: The mapped axis, by default the innermost.

    Returns:
        A Python int.

    Raises:
        UnboundAxisError: No running pmap binds the axis.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: x + 10 * fp.axis_index(), in_axes=0)(torch.zeros(3))
        tensor([ 0.,  0., 10.])

    References:
        ``jax.lax.axis_index``.
    """
    return find(axis_name, "axis_index").rank


def axis_size(axis_name: Hashable = None) -> int:
    """Return the number of shards of an axis.

    Args:
        axis_name: The mapped axis, by default the innermost.

    Returns:
        A Python int, at least 1.

    Raises:
        UnboundAxisError: No running pmap binds the axis.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: x / fp.axis_size(), in_axes=0)(torch.ones(3))
        tensor([0.5000, 0.5000, 0.5000])

    References:
        ``jax.lax.axis_size``.
    """
    return find(axis_name, "axis_size").group.size


def _extremum(name: str, x: Any, axis_name: Hashable, axis_index_groups: IndexGroups) -> Any:
    def make(shard: Shard) -> Extremum:
        return Extremum(as_groups(name, axis_index_groups, shard.group.size), name == "pmax")

    def check(leaf: Tensor, where: str, size: int) -> None:
        if leaf.is_complex():
            raise TypeError(
                f"{where} is complex, and complex numbers have no order.\nGive its abs() or real part."
            )

    for axis in over_axes(axis_name):
        x = communicate(name, x, axis, make, check=check)
    return x


def _share(shard: Shard, groups: Sequence[Sequence[int]]) -> float:
    """Return this shard's share of its group's mean."""
    weights = shard.group.weights or [1.0] * shard.group.size
    group = next(group for group in groups if shard.rank in group)
    total = sum(weights[rank] for rank in group)
    return weights[shard.rank] / total if total else 1.0 / len(group)
