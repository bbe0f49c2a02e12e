"""Collectives that deal out and put together: gather, scatter, and all to all."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from funcpar._group import Shard
from funcpar._maps import Exchange, Gather, Scatter
from funcpar._operand import IndexGroups, as_groups, check_dim, check_divisible, communicate, summable


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
        lambda s: Gather(as_groups("all_gather", axis_index_groups, s.group.size, even=True), axis, tiled),
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
            as_groups("psum_scatter", axis_index_groups, s.group.size, even=True), scatter_dimension, tiled
        ),
        check=check,
        prepare=summable,
    )


def all_to_all(
    x: Any,
    axis_name: Hashable = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
) -> Any:
    """Give shard i part i of every shard's value, in rank order.

    Args:
        x: A tree of tensors whose ``split_axis`` has size R, or with ``tiled`` a multiple of R.
        axis_name: The mapped axis, by default the innermost.
        split_axis: The dimension that is dealt out; without ``tiled`` it disappears.
        concat_axis: Where what comes in goes: without ``tiled`` a new dimension of size R of the
            result, else one that becomes R times as long.
        axis_index_groups: Groups of ranks of one size, each rank in exactly one.
        tiled: Keep ``split_axis``, 1/R as long, and concatenate.

    Returns:
        The tree of results, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: A dimension is missing or cannot be dealt out, or the groups are no partition or
            differ in size.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> swap = fp.pmap(lambda x: fp.all_to_all(x, split_axis=1, concat_axis=0, tiled=True), in_axes=0)
        >>> swap(torch.arange(4).reshape(2, 2))
        tensor([[0],
                [2],
                [1],
                [3]])

    References:
        ``jax.lax.all_to_all``, whose transpose is wrong where ``split_axis != concat_axis`` untiled.
    """

    def check(leaf: Tensor, where: str, size: int) -> None:
        check_divisible(where, "split_axis", leaf, split_axis, size, tiled)
        check_dim(where, "concat_axis", concat_axis, leaf.dim())

    def make(shard: Shard) -> Exchange:
        groups = as_groups("all_to_all", axis_index_groups, shard.group.size, even=True)
        return Exchange(groups, split_axis, concat_axis, tiled)

    return communicate("all_to_all", x, axis_name, make, check=check)


def pswapaxes(
    x: Any,
    axis_name: Hashable = None,
    axis: int = 0,
    *,
    axis_index_groups: IndexGroups = None,
) -> Any:
    """Exchange the mapped axis with a dimension of the operand: all_to_all of that dimension onto itself.

    Args:
        x: A tree of tensors whose dimension ``axis`` has size R.
        axis_name: The mapped axis, by default the innermost.
        axis: The dimension.
        axis_index_groups: Groups of ranks of one size, each rank in exactly one.

    Returns:
        The tree of results, shapes as given, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: The dimension is missing or has another size, or the groups are no partition or
            differ in size.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: fp.pswapaxes(x[0])[None], in_axes=0)(torch.tensor([[1, 2], [3, 4]]))
        tensor([[1, 3],
                [2, 4]])

    References:
        ``jax.lax.pswapaxes``.
    """

    def check(leaf: Tensor, where: str, size: int) -> None:
        check_divisible(where, "axis", leaf, axis, size, tiled=False)

    def make(shard: Shard) -> Exchange:
        groups = as_groups("pswapaxes", axis_index_groups, shard.group.size, even=True)
        return Exchange(groups, axis, axis)

    return communicate("pswapaxes", x, axis_name, make, check=check)
