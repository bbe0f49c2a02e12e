"""Values that stay where the shards are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import tree
from funcpar._devices import Device


class Shards:
    """A value kept in shards: one tree per shard, left on its device.

    pmap returns one for every output leaf whose ``out_axes`` is ``"shards"``, and takes one as an
    argument that is split: then the call has these shards, on these devices.

    Args:
        parts: R trees of one structure, in rank order.
        devices: R devices.
        rows: How many rows each part stands for; by default the size of its tensors along dimension 0,
            None where they disagree or there are none.

    Attributes:
        parts: The R trees.
        devices: The R devices.
        rows: Rows of each part.

    Raises:
        ValueError: Numbers of parts and devices disagree, or there are none.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> double = fp.pmap(lambda x: 2 * x, in_axes=0, out_axes="shards")
        >>> kept = double(torch.arange(3.0))
        >>> kept
        Shards(2 rows on cpu[0], 1 row on cpu[1])
        >>> fp.pmap(lambda x: x + 1, in_axes=0)(kept)
        tensor([1., 3., 5.])
        >>> kept.gather()
        tensor([0., 2., 4.])

    References:
        A sharded ``jax.Array``; here the parts may differ in size and be trees.
    """

    __slots__ = ("devices", "parts", "rows")

    def __init__(
        self, parts: Sequence[Any], devices: Sequence[Device], rows: Sequence[int | None] | None = None
    ) -> None:
        if not parts or len(parts) != len(devices):
            raise ValueError(
                f"Shards: {len(parts)} parts and {len(devices)} devices.\nGive one device for each part."
            )
        self.parts = tuple(parts)
        self.devices = tuple(devices)
        if rows is not None and len(rows) != len(parts):
            raise ValueError(
                f"Shards: {len(parts)} parts and rows={list(rows)}.\nGive the number of rows of each part."
            )
        self.rows = tuple(_rows(part) for part in parts) if rows is None else tuple(rows)

    def gather(self, dim: int = 0) -> Any:
        """Return one tree, every tensor joined along ``dim`` in rank order, on the first part's device.

        Raises:
            ValueError: The parts differ in structure, or hold 0-d tensors.
            TypeError: A leaf is not a tensor.
        """
        leaves, spec = tree.flatten(self.parts[0])
        rows = [leaves] + [
            tree.flatten_like(spec, part, f"part {k}") for k, part in enumerate(self.parts[1:], 1)
        ]
        for path, leaf in zip(spec.paths("part"), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"Shards.gather: {path} is a {type(leaf).__name__}, not a tensor.\nUse .parts."
                )
            if leaf.dim() == 0:
                raise ValueError(f"Shards.gather: {path} is 0-d and has no rows to join.\nUse .parts.")
        joined = [
            torch.cat([leaf.to(column[0].device) for leaf in column], dim)
            for column in zip(*rows, strict=True)
        ]
        return tree.unflatten(spec, joined)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{'?' if n is None else n} row{'s' * (n != 1)} on {device}"
            for n, device in zip(self.rows, self.devices, strict=True)
        )
        return f"Shards({shown})"


def as_tree(leaf: Any) -> Any:
    """Return Shards of trees as a tree of Shards, where the trees have one structure."""
    if not isinstance(leaf, Shards) or isinstance(leaf.parts[0], Tensor):
        return leaf
    leaves, spec = tree.flatten(leaf.parts[0])
    try:
        rows = [leaves, *(tree.flatten_like(spec, part, "part") for part in leaf.parts[1:])]
    except ValueError:
        return leaf
    return tree.unflatten(
        spec, [Shards(column, leaf.devices, leaf.rows) for column in zip(*rows, strict=True)]
    )


def _rows(part: Any) -> int | None:
    sizes = {leaf.shape[0] for leaf in tree.leaves(part) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None
