"""Sums of gradients over the shards of a call.

On CPUs, and where all shards are on one device, ``_reduce`` does it. On several accelerators small
gradients are packed, one tensor for each dtype, and large ones go alone. Each worker brings its
part of every such tensor to its own device and sums it in the order of the ranks, so that no device
does more than its share, and none holds more than one more gradient; the first then collects the
parts. Where the vendor's library sums over devices (NCCL), it is asked instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._graph import Gradient, owned
from funcpar._group import Shard, current
from funcpar._reduce import add_up, reduce_share
from funcpar._request import Call
from funcpar._transfer import pack, unpack

# Gradients below so many bytes are packed.
_ALONE = 1 << 18
# What the vendor's library may sum: it adds halves in their own precision, once per shard.
_WIDE = (torch.float32, torch.float64)


def sum_over_shards(row: list[Gradient], totals: dict[int, Gradient], ready: bool = True) -> bool:
    """Bring this shard's gradients, and do this worker's share of the sums into ``totals``.

    Nothing is summed, and False returned, unless all shards are ready.
    """
    shard = current()
    assert shard is not None
    if shard.group.serial:
        totals.update({k: add_up([totals.get(k), grad]) for k, grad in enumerate(row)})
        return True
    reusable = owned(row) if shard.place == 0 else []
    brought = shard.group.exchange(
        shard, Call("the sum of gradients", None, ""), (row, reusable, ready), limited=False
    )
    if not all(theirs for _, _, theirs in brought):
        return False
    rows = [theirs for theirs, _, _ in brought]
    if shard.device.is_cpu or not _reduce_across(shard, rows, totals):
        reduce_share(rows, brought[0][1], shard.place, totals)
    return True


def _reduce_across(shard: Shard, rows: Sequence[Sequence[Gradient]], totals: dict[int, Gradient]) -> bool:
    """Do a worker's share of ``totals[k] = sum over shards of rows[shard][k]``, on the first device.

    Returns:
        False, with nothing done, if the shards are not on several devices.
    """
    places = {grad.device for row in rows for grad in row if grad is not None}
    if len(places) < 2:
        return False
    plain = [k for k in range(len(rows[0])) if _is_alike([row[k] for row in rows])]
    large = [k for k in plain if _size(rows[0][k]) >= _ALONE]
    small: dict[torch.dtype, list[int]] = {}
    for k in sorted(set(plain) - set(large)):
        small.setdefault(_tensor(rows[0][k]).dtype, []).append(k)
    mine = rows[shard.place]
    packed = [pack([_tensor(mine[k]) for k in members]) for members in small.values()]
    brought = shard.group.exchange(shard, Call("the packed gradients", None, ""), packed, limited=False)
    columns = [
        *zip(*brought, strict=True),
        *([_tensor(row[k]).view(-1) for row in rows] for k in large),
    ]
    sums = _sum(shard, columns)
    if shard.place == 0:
        for members, total in zip(small.values(), sums[: len(small)], strict=True):
            # Each in memory of its own: a gradient shares memory with nothing.
            parts = unpack(total, [_tensor(rows[0][k]) for k in members])
            totals.update(zip(members, [part.clone() for part in parts], strict=True))
        for k, total in zip(large, sums[len(small) :], strict=True):
            totals[k] = total.view(_tensor(rows[0][k]).shape)
    for k in set(range(len(mine))) - set(plain):
        # What one shard has alone, such as the gradient of its rows, stays with it.
        owners = [rank for rank, row in enumerate(rows) if row[k] is not None]
        if owners and shard.place == (0 if len(owners) > 1 else owners[0]):
            totals[k] = add_up([_brought(row[k], shard) for row in rows])
    return True


def _sum(shard: Shard, columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sum of each column, in the first shard; nothing in the others."""
    by_library = {
        k: total for k, column in enumerate(columns)
        if shard.place == 0 and (total := _by_library(column)) is not None
    }  # fmt: skip
    call = Call("the way gradients are summed", None, "")
    done = shard.group.exchange(shard, call, frozenset(by_library), limited=False)[0]
    parts = {
        k: add_up([_streams.bring(part, _device(shard)) for part in _cut(column, shard)])
        for k, column in enumerate(columns) if k not in done
    }  # fmt: skip
    brought = shard.group.exchange(shard, Call("the sums of parts", None, ""), parts, limited=False)
    if shard.place != 0:
        return []
    sums = []
    for k, column in enumerate(columns):
        total = by_library.get(k)
        if total is None:
            total = torch.empty_like(column[0])
            for rank, theirs in enumerate(brought):
                start, stop = _bounds(total.numel(), rank, len(brought))
                _streams.fill(total[start:stop], theirs[k])
        sums.append(total)
    return sums


def _by_library(column: Sequence[Tensor]) -> Gradient:
    if column[0].dtype not in _WIDE:
        return None
    total = torch.empty_like(column[0])
    return total if _streams.sum_to_first(column, total) else None


def _cut(column: Sequence[Tensor], shard: Shard) -> list[Tensor]:
    start, stop = _bounds(column[0].numel(), shard.place, len(column))
    return [tensor[start:stop] for tensor in column]


def _bounds(numel: int, rank: int, size: int) -> tuple[int, int]:
    return numel * rank // size, numel * (rank + 1) // size


def _is_alike(column: Sequence[Gradient]) -> bool:
    first = column[0]
    return first is not None and all(
        grad is not None
        and grad.dtype is first.dtype
        and grad.layout is torch.strided
        and grad.is_contiguous()
        for grad in column
    )


def _size(grad: Gradient) -> int:
    return _tensor(grad).numel() * _tensor(grad).element_size()


def _tensor(grad: Gradient) -> Tensor:
    assert grad is not None
    return grad


def _device(shard: Shard) -> torch.device:
    return shard.device.torch_device


def _brought(grad: Gradient, shard: Shard) -> Gradient:
    return grad if grad is None else _streams.bring(grad, _device(shard))
