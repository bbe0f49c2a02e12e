"""How the shards of an axis meet with values, below every derivative: each gets what a map makes of all."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._buckets import Sums
from funcpar._group import Shard
from funcpar._maps import Map, Sum
from funcpar._pages import Room, give_back, take
from funcpar._reduce import add_up
from funcpar._request import Call, Request
from funcpar._span import Span

# Below this many entries in all, a shard hands out copies; above, the others read its own values,
# and it waits until they have.
_SMALL = 1 << 15


def everyones(span: Span, call: Call, values: list[Any]) -> list[Any]:
    """Return the values of the shards of all processes, in rank order."""
    span.has_met = True
    everyone = span.link.values(f"{call.asked} in {span.call}", values)
    return [value for theirs in everyone for value in theirs]


def meet(
    shard: Shard, request: Request, wanted: Map, leaves: Sequence[Tensor], records: bool
) -> tuple[list[Tensor], bool]:
    """Exchange values; return what this shard gets, and whether any shard wants to differentiate."""
    call = request.call(wanted, leaves)
    given = [leaf.detach() for leaf in leaves]
    if shard.group.span is not None:
        return _meet_across(shard, call, wanted, given, records)
    if sum(leaf.numel() for leaf in leaves) > _SMALL:
        return _meet_in_place(shard, call, wanted, given, records)
    brought = shard.group.exchange(shard, call, ([leaf.clone() for leaf in given], records))
    columns = here_too(zip(*(theirs for theirs, _ in brought), strict=True), shard)
    outs = [wanted.output(shard.rank, column) for column in columns]
    return outs, any(theirs for _, theirs in brought)


def _meet_in_place(
    shard: Shard, call: Call, wanted: Map, given: list[Tensor], records: bool
) -> tuple[list[Tensor], bool]:
    """The same, the others reading this shard's own memory, and making large sums together."""
    leads = isinstance(wanted, Sum) and wanted.group(shard.rank)[0] == shard.rank
    rooms = [_room_for(leaf) if leads else None for leaf in given]
    brought = shard.group.exchange(shard, call, (given, records, rooms, threading.Lock()))
    if isinstance(wanted, Sum):
        rooms = brought[wanted.group(shard.rank)[0]][2]
    outs = []
    columns = here_too(zip(*(theirs[0] for theirs in brought), strict=True), shard)
    for column, room in zip(columns, rooms, strict=True):
        if room is None:
            outs.append(wanted.output(shard.rank, column))
        else:
            assert isinstance(wanted, Sum)
            wanted.fill(shard.rank, column, room.tensor)
            outs.append(room.tensor)
    # Nobody goes on, and perhaps writes into what it brought, before all have read it.
    shard.group.exchange(shard, call, None, limited=False)
    # To each shard a copy on write of the one sum: whoever writes gets its own. Making one changes
    # how the sum is kept, so one shard at a time.
    with brought[0][3]:
        outs = [out if room is None else room.copy() for out, room in zip(outs, rooms, strict=True)]
        for room in rooms:
            # The last to copy: before, someone else must not write there.
            if (
                room is not None
                and isinstance(wanted, Sum)
                and len(room.users) == len(wanted.group(shard.rank))
            ):
                give_back(room)
    return outs, any(theirs[1] for theirs in brought)


def _meet_across(
    shard: Shard, call: Call, wanted: Map, given: list[Tensor], records: bool
) -> tuple[list[Tensor], bool]:
    """The same, with the shards of all processes."""
    group = shard.group
    if isinstance(wanted, Sum) and len(wanted.groups) == 1:
        # What is added up here first need not travel shard by shard.
        ((totals, recorded),) = group.exchange(shard, call, (given, records), across=_totals)
        return [total.clone() for total in totals], recorded
    brought = group.exchange(shard, call, (given, records), across=everyones)
    columns = here_too(zip(*(theirs for theirs, _ in brought), strict=True), shard)
    outs = [wanted.output(shard.rank, column) for column in columns]
    if group.num_here > 1:  # Nobody writes into what it brought before all have read it.
        group.exchange(shard, call, None, limited=False)
    return outs, any(theirs for _, theirs in brought)


def _totals(span: Span, call: Call, values: list[Any]) -> list[Any]:
    """Return the sums over the shards of all processes, and whether any shard wants to differentiate."""
    columns = zip(*(leaves for leaves, _ in values), strict=True)
    mine = [total for column in columns if (total := add_up(column)) is not None]
    asked = f"{call.asked} in {span.call}"
    span.has_met = True
    recorded = any(span.link.meet(asked, any(records for _, records in values)))
    return [(Sums.of(span.link, asked, mine), recorded)]


def here_too(columns: Iterable[Sequence[Tensor]], shard: Shard) -> Iterable[Sequence[Tensor]]:
    """Bring what all shards brought to this shard's device."""
    device = shard.device
    if device.is_cpu:
        return columns
    return [[_streams.bring(value, device.torch_device) for value in column] for column in columns]


def _room_for(leaf: Tensor) -> Room | None:
    """Return memory for a sum that the shards make together, or None where each makes its own."""
    alone = leaf.numel() < _SMALL or leaf.element_size() < 4 or leaf.layout is not torch.strided
    return None if alone or not leaf.is_cpu else take(leaf)
