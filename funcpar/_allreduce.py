"""Sums of gradients over the shards of a call.

On CPUs, and where all shards are on one device, ``_reduce`` does it. Across several accelerators most
gradients of a gradient function have been summed while backward ran (``_ahead``). The first worker sums
what is left, in the same buckets and on the same streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from funcpar import _streams
from funcpar._ahead import Ahead
from funcpar._buckets import Buckets, Messages
from funcpar._columns import add_to_first
from funcpar._graph import Gradient, owned
from funcpar._group import Shard, current
from funcpar._reduce import add_up, reduce_share
from funcpar._request import Call


def sum_over_shards(
    row: list[Gradient], totals: dict[int, Gradient], ready: bool = True, ahead: Ahead | None = None
) -> bool:
    """Bring this shard's gradients, and do this worker's share of the sums into ``totals``.

    Nothing is summed, and False returned, unless all shards are ready.
    """
    shard = current()
    assert shard is not None
    if shard.group.serial:
        totals.update({k: add_up([totals.get(k), grad]) for k, grad in enumerate(row)})
        return True
    is_across = shard.group.num_here > 1 and not shard.device.is_cpu
    reusable = owned(row) if shard.place == 0 or is_across else []
    side = _streams.side() if is_across else None
    brought = shard.group.exchange(
        shard, Call("the sum of gradients", None, ""), (row, reusable, ready, side), limited=False
    )
    rows, reusables, are_ready, sides = (list(part) for part in zip(*brought, strict=True))
    if not all(are_ready):
        return False
    done = None if ahead is None else ahead.end(shard.place)
    if done is not None:
        rows = [[None if k in done.leaves else grad for k, grad in enumerate(each)] for each in rows]
    if not is_across or not _reduce_across(shard, rows, reusables, sides, totals):
        reduce_share(rows, reusables[0], shard.place, totals)
    if done is not None and shard.place == 0:
        totals.update(done.totals())
    return True


def _reduce_across(
    shard: Shard,
    rows: Sequence[Sequence[Gradient]],
    reusables: Sequence[Sequence[bool]],
    sides: Sequence[Any],
    totals: dict[int, Gradient],
) -> bool:
    """Do a worker's share of ``totals[k] = sum over shards of rows[shard][k]``, on the first device.

    Returns:
        False, with nothing done, if the gradients are not on several devices.
    """
    places = [device for device, _ in sides]
    if len({grad.device for row in rows for grad in row if grad is not None}) < 2:
        return False
    alike = [k for k in range(len(rows[0])) if _is_alike([row[k] for row in rows], places)]
    if shard.place == 0 and alike:
        chosen = [[(row[k], own[k]) for k in alike] for row, own in zip(rows, reusables, strict=True)]
        totals.update(zip(alike, _sums(chosen, sides), strict=True))
    for k in set(range(len(rows[0]))) - set(alike):
        # What one shard has alone, such as the gradient of its rows, stays with it.
        owners = [rank for rank, row in enumerate(rows) if row[k] is not None]
        if owners and shard.place == (0 if len(owners) > 1 else owners[0]):
            totals[k] = add_up([_brought(row[k], places[shard.place]) for row in rows])
    return True


def _sums(rows: Sequence[Sequence[Any]], sides: Sequence[Any]) -> list[Any]:
    """Return the sum of each column of gradients, which all streams of the shards have come to."""
    places = [device for device, _ in sides]
    messages = Messages.of([(grad.shape, grad.dtype, places[0]) for grad, _ in rows[0]])
    buckets = [Buckets(messages) for _ in rows]
    found: list[Any] = [None] * len(messages.kinds)
    with _streams.aside(sides, [_streams.mark()] * len(sides)):
        for theirs, row in zip(buckets, rows, strict=True):
            for k, (grad, own) in enumerate(row):
                _streams.keep(grad)
                theirs.give(k, grad, own)
        for number in range(len(messages.buckets)):
            rooms = [theirs.packed(number) for theirs in buckets]
            add_to_first(rooms, places)
            buckets[0].unpack(number, rooms[0], found)
        done = _streams.ready_on(places[0])
    _streams.wait(done, places[0])
    _streams.received(found)
    return found


def _is_alike(column: Sequence[Gradient], places: Sequence[torch.device]) -> bool:
    first = column[0]
    return first is not None and all(
        grad is not None
        and (grad.dtype, grad.shape, grad.device) == (first.dtype, first.shape, place)
        and grad.layout is torch.strided
        for grad, place in zip(column, places, strict=True)
    )


def _brought(grad: Gradient, device: torch.device) -> Gradient:
    return grad if grad is None else _streams.bring(grad, device)
