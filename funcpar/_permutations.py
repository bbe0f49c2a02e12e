"""Collectives that move values between shards without adding any."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from funcpar._group import Shard
from funcpar._maps import Broadcast, Exchange, Permute
from funcpar._operand import as_groups, as_pairs, check_dim, check_divisible, communicate


def all_to_all(
    x: Any,
    axis_name: Hashable = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
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
        return Exchange(0, groups, split_axis, concat_axis, tiled)

    return communicate("all_to_all", x, axis_name, make, check=check)


def ppermute(x: Any, axis_name: Hashable = None, perm: Sequence[tuple[int, int]] = ()) -> Any:
    """Send the values of some shards to others; who is no destination gets zeros.

    Args:
        x: A tree of tensors of any shape S and numbers, the same on all shards.
        axis_name: The mapped axis, by default the innermost.
        perm: Pairs (source, destination) of ranks; each occurs at most once on each side.

    Returns:
        The tree of what came, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: A rank is out of range, or occurs twice on a side.
        TypeError: ``perm`` is no list of pairs.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: fp.ppermute(x, perm=[(0, 1), (1, 0)]), in_axes=0)(torch.tensor([1, 2]))
        tensor([2, 1])

    References:
        ``jax.lax.ppermute``, which takes negative ranks as Python indices.
    """
    return communicate(
        "ppermute", x, axis_name, lambda s: Permute(0, as_pairs("ppermute", perm, s.group.size))
    )


def pshuffle(x: Any, axis_name: Hashable = None, perm: Sequence[int] = ()) -> Any:
    """Permute the values of all shards: shard i gets that of shard ``perm[i]``.

    Args:
        x: A tree of tensors of any shape S and numbers, the same on all shards.
        axis_name: The mapped axis, by default the innermost.
        perm: A permutation of the R ranks.

    Returns:
        The tree of what came, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: ``perm`` is not a permutation of all ranks.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: fp.pshuffle(x, perm=[1, 0]), in_axes=0)(torch.tensor([1, 2]))
        tensor([2, 1])

    References:
        ``jax.lax.pshuffle``, which accepts a permutation of fewer ranks.
    """

    def make(shard: Shard) -> Permute:
        if sorted(perm) != list(range(shard.group.size)):
            raise ValueError(
                f"pshuffle: perm={list(perm)} is not a permutation of 0..{shard.group.size - 1}.\n"
                f"Name every rank once, or use ppermute to send some."
            )
        return Permute(0, tuple((int(source), k) for k, source in enumerate(perm)))

    return communicate("pshuffle", x, axis_name, make)


def pswapaxes(
    x: Any,
    axis_name: Hashable = None,
    axis: int = 0,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
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
        return Exchange(0, groups, axis, axis)

    return communicate("pswapaxes", x, axis_name, make, check=check)


def pbroadcast(x: Any, axis_name: Hashable = None, source: int = 0) -> Any:
    """Give every shard the value of one.

    Args:
        x: A tree of tensors of any shape S and numbers, the same on all shards.
        axis_name: The mapped axis, by default the innermost.
        source: Whose value, a rank.

    Returns:
        The tree of values, shapes S, on the shard's device; its own memory.

    Raises:
        UnboundAxisError: No running pmap binds the axis.
        ReplicaMismatchError: Another shard makes another call.
        ValueError: ``source`` is out of range.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> fp.pmap(lambda x: fp.pbroadcast(x, source=1), in_axes=0)(torch.tensor([1, 2]))
        tensor([2, 2])

    References:
        ``jax.lax.pbroadcast``, whose transpose is wrong for non-scalars.
    """

    def make(shard: Shard) -> Broadcast:
        if not 0 <= source < shard.group.size:
            raise ValueError(
                f"pbroadcast: source={source} is out of range for an axis of size {shard.group.size}.\n"
                f"Give a rank from 0 to {shard.group.size - 1}."
            )
        return Broadcast(0, int(source))

    return communicate("pbroadcast", x, axis_name, make)
