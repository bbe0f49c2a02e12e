"""Collectives that move values between shards without adding any."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from funcpar._group import Shard
from funcpar._maps import Broadcast, Permute
from funcpar._operand import as_pairs, communicate


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
    return communicate("ppermute", x, axis_name, lambda s: Permute(as_pairs("ppermute", perm, s.group.size)))


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
        return Permute(tuple((int(source), k) for k, source in enumerate(perm)))

    return communicate("pshuffle", x, axis_name, make)


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
        return Broadcast(int(source))

    return communicate("pbroadcast", x, axis_name, make)
