"""Collectives that reduce, gather and scatter, and what a shard knows of its axis.

Each works on a pytree, passes None leaves, communicates a Python number and returns a number, and
is differentiable with the exact adjoint of the map over all shards, in reverse and forward mode, to
any order. Every shard of the axis must make the same call; see ``_group`` for what happens if not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar._group import Shard, find
from funcpar._maps import Extremum, Gather, Scatter, Sum
from funcpar._operand import as_groups, check_dim, check_divisible, communicate, over_axes

IndexGroups = Sequence[Sequence[int]] | None


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
            lambda s: Sum(0, as_groups("psum", axis_index_groups, s.group.size)),
            prepare=_summable,
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
        if not (leaf.is_floating_point() or leaf.is_complex()):
            leaf = leaf.to(torch.float64 if leaf.dtype is torch.float64 else torch.get_default_dtype())
        part = _share(shard, as_groups("pmean", axis_index_groups, shard.group.size))
        # A shard that does not count may hold 0/0.
        return torch.zeros_like(leaf) if part == 0.0 else leaf * torch.tensor(part, dtype=leaf.real.dtype)

    for axis in over_axes(axis_name):
        x = communicate(
            "pmean",
            x,
            axis,
            lambda s: Sum(0, as_groups("pmean", axis_index_groups, s.group.size)),
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
    for axis in over_axes(axis_name):
        x = communicate(
            "pmax", x, axis, lambda s: Extremum(0, as_groups("pmax", axis_index_groups, s.group.size))
        )
    return x


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
    for axis in over_axes(axis_name):
        x = communicate(
            "pmin",
            x,
            axis,
            lambda s: Extremum(0, as_groups("pmin", axis_index_groups, s.group.size), largest=False),
        )
    return x


def all_gather(
    x: Any,
    axis_name: Hashable = None,
    *,
    axis_index_groups: IndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
) -> Any:
    """Give every shard the values of all, in rank order.

    Args:
        x: A tree of tensors of any shape S, the same on all shards.
        axis_name: The mapped axis, by default the innermost.
        axis_index_groups: Groups of ranks of one size, each rank in exactly one.
        axis: Where the R values go: a new dimension of the result, or with ``tiled`` one of S that
            becomes R times as long.
        tiled: Concatenate instead of stacking.

    Returns:
        The tree of results, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call, or has another shape.
        ValueError: ``axis`` is out of range, or the groups are no partition or differ in size.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: fp.all_gather(x, tiled=True), in_axes=0, out_axes=None)(torch.arange(4))
        tensor([0, 1, 2, 3])

    References:
        ``jax.lax.all_gather``.
    """

    def check(leaf: Tensor, where: str, size: int) -> None:
        check_dim(where, "axis", axis, leaf.dim() + (not tiled))

    return communicate(
        "all_gather",
        x,
        axis_name,
        lambda s: Gather(0, as_groups("all_gather", axis_index_groups, s.group.size, even=True), axis, tiled),
        check=check,
    )


def psum_scatter(
    x: Any,
    axis_name: Hashable = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
) -> Any:
    """Sum over the shards of an axis, and give every shard one part of the sum.

    Args:
        x: A tree of tensors, at least 1-d, whose ``scatter_dimension`` has size R, or with ``tiled`` a
            multiple of R.
        axis_name: The mapped axis, by default the innermost.
        scatter_dimension: Which dimension is dealt out.
        axis_index_groups: Groups of ranks of one size, each rank in exactly one.
        tiled: Keep the dimension, 1/R as long, instead of removing it.

    Returns:
        The tree of parts, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: The dimension is missing or cannot be dealt out, or the groups are no partition or
            differ in size.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> part = fp.pmap(lambda x: fp.psum_scatter(x.sum(0), tiled=True), in_axes=0, out_axes=0)
        >>> part(torch.arange(8.0).reshape(4, 2))
        tensor([12., 16.])

    References:
        ``jax.lax.psum_scatter``; bool tensors are summed as int64.
    """

    def check(leaf: Tensor, where: str, size: int) -> None:
        check_divisible(where, "scatter_dimension", leaf, scatter_dimension, size, tiled)

    return communicate(
        "psum_scatter",
        x,
        axis_name,
        lambda s: Scatter(
            0, as_groups("psum_scatter", axis_index_groups, s.group.size, even=True), scatter_dimension, tiled
        ),
        check=check,
        prepare=_summable,
    )


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


def _summable(leaf: Tensor, shard: Shard) -> Tensor:
    return leaf.to(torch.int64) if leaf.dtype is torch.bool else leaf


def _share(shard: Shard, groups: Sequence[Sequence[int]]) -> float:
    """Return this shard's share of its group's mean."""
    weights = shard.group.weights or [1.0] * shard.group.size
    group = next(group for group in groups if shard.rank in group)
    total = sum(weights[rank] for rank in group)
    return weights[shard.rank] / total if total else 1.0 / len(group)
