"""Transfer: how the arguments of one call come to the accelerators of its shards.

What every shard gets whole is sent by the caller, once to each device: small leaves packed into
buckets, one copy for each, large ones alone. What is a shard's own, its rows, its worker brings
itself, on its own stream. Copies that are remembered are not sent again.

On virtual CPU devices there is no transfer at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpar import _copies, _graph, _streams
from funcpar._devices import Device
from funcpar._graph import is_wrapped

# A leaf of at least so many bytes is sent alone, and so is a bucket's worth of smaller ones.
_ALONE = 1 << 20
_BUCKET = 32 << 20
# Leaves in a bucket start at multiples of this, so that kernels find them aligned as usual.
_ALIGNED = 64

Copies: TypeAlias = dict[torch.device, Tensor]


class Transfer:
    """What the shards of one call get in place of the caller's leaves.

    Args:
        devices: One accelerator per shard.
        inputs: The leaves of each shard.
        is_graph: Whether what the shards get must be part of the graph of what the caller has.

    Attributes:
        streams: The caller's streams of the devices that hold what the shards read.
    """

    def __init__(self, devices: Sequence[Device], inputs: Sequence[list[Any]], is_graph: bool) -> None:
        self.places = [device.torch_device for device in devices]
        self._is_graph = is_graph
        self._copies: dict[int, Copies] = {}
        self._versions: list[tuple[int, Tensor, int]] = []
        tensors = {id(leaf): leaf for leaves in inputs for leaf in leaves if isinstance(leaf, Tensor)}
        self.streams = _streams.current_streams(leaf.device for leaf in tensors.values())
        if not is_graph:
            self._send(tensors, set.intersection(*(set(map(id, leaves)) for leaves in inputs)))

    def _send(self, tensors: dict[int, Tensor], common: set[int]) -> None:
        """Send what every shard gets whole, in the caller."""
        missing: list[tuple[Tensor, list[torch.device]]] = []
        for key, leaf in tensors.items():
            self._look_up(leaf)
            if key in common:
                found = self._copies.get(key, {})
                targets = [p for p in dict.fromkeys(self.places) if p != leaf.device and p not in found]
                if targets:
                    missing.append((leaf, targets))
        for leaf, sent in zip([leaf for leaf, _ in missing], broadcast(missing), strict=True):
            self._copies.setdefault(id(leaf), {}).update(sent)
            if _copies.is_known(leaf):
                remember(leaf, sent)
        # What only one shard of one call has, it may write to.
        shared = [
            key for key in common & self._copies.keys()
            if len(self.places) > 1 or _copies.is_known(tensors[key])
        ]  # fmt: skip
        self._versions = [
            (key, copy, copy._version)
            for key in shared for copy in self._copies[key].values() if not copy.is_inference()
        ]  # fmt: skip

    def _look_up(self, leaf: Tensor) -> None:
        for place in dict.fromkeys(self.places):
            known = _copies.find(leaf, place)
            if known is not None:
                copy, event = known
                self._copies.setdefault(id(leaf), {})[place] = copy
                _streams.wait(event, place)

    def bringing(self, rank: int, body: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a shard's body as a function of the caller's leaves."""
        return lambda leaves: body(self.bring(rank, leaves))

    def bring(self, rank: int, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of a shard on its device, in its worker; what was copied has no graph."""
        place = self.places[rank]
        return [self._bring(leaf, place) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _bring(self, leaf: Tensor, place: torch.device) -> Tensor:
        copy = self._copies.get(id(leaf), {}).get(place)
        if copy is not None:
            _streams.keep(copy)
            return copy.detach()  # Others have it too, and a function may set what it requires.
        if self._is_graph or leaf.device == place:
            return as_graph(leaf, place)
        return _streams.bring(leaf.detach(), place)

    def written(self, leaves: Sequence[Any]) -> list[int]:
        """Return which leaves have copies, shared by shards or calls, that were written to."""
        changed = {key for key, copy, version in self._versions if copy._version != version}
        return [k for k, leaf in enumerate(leaves) if id(leaf) in changed] if changed else []


def as_graph(leaf: Tensor, place: torch.device) -> Tensor:
    """Return a tensor on a device, as part of the graph that it is in."""
    if not leaf.is_cpu and not is_wrapped(leaf):
        _streams.keep(leaf)
    return leaf if leaf.device == place else leaf.to(place, non_blocking=not leaf.is_cpu)


def remember(leaf: Tensor, copies: Copies) -> None:
    """Remember copies that this thread has asked for until now."""
    _copies.remember(leaf, {place: (copy, _streams.ready_on(place)) for place, copy in copies.items()})


def remember_column(result: Any, column: Sequence[Any], events: dict[torch.device, Any]) -> None:
    """Remember what other shards returned as copies of the one result that the caller gets."""
    if not isinstance(result, Tensor) or is_wrapped(result) or any(leaf is column[0] for leaf in column[1:]):
        return
    copies = {leaf.device: leaf.detach() for leaf in column[1:] if leaf.device != result.device}
    if not copies:
        return
    for place in copies:
        if place not in events:
            events[place] = _streams.ready_on(place)
    _copies.remember(result, {place: (copy, events[place]) for place, copy in copies.items()})


def stage_leaves(leaves: Iterable[Any], devices: Sequence[Device]) -> None:
    """Send tensors to accelerators ahead of time, and remember the copies."""
    places = dict.fromkeys(device.torch_device for device in devices)
    wanted = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            wanted.append((leaf, [p for p in places if p != leaf.device and _copies.find(leaf, p) is None]))
    for (leaf, _), sent in zip(wanted, broadcast(wanted), strict=True):
        remember(leaf, sent)


def send_rows(leaves: Iterable[Any], devices: Sequence[Device]) -> None:
    """Send each device its rows of every tensor ahead of time, as pmap will cut them."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.layout is not torch.strided:
            continue
        count = max(1, min(len(devices), leaf.shape[0]))
        copies: dict[Any, Tensor] = {}
        for device, (start, size) in zip(devices, balanced(leaf.shape[0], count), strict=False):
            key = part_key(device, start, size) if count > 1 else device.torch_device
            copies[key] = _streams.bring(leaf.detach().narrow(0, start, size), device.torch_device)
        events = {copy.device: _streams.ready_on(copy.device) for copy in copies.values()}
        _copies.remember(leaf, {key: (copy, events[copy.device]) for key, copy in copies.items()})


def sent_rows(leaf: Tensor, devices: Sequence[Device], sizes: Sequence[int]) -> list[Tensor | None]:
    """Return what was sent of a tensor's rows, each for its only use; None where nothing was."""
    if not _copies.is_known(leaf):
        return [None] * len(sizes)
    parts: list[Tensor | None] = []
    start = 0
    for device, size in zip(devices, sizes, strict=True):
        found = _copies.take(leaf, part_key(device, start, size))
        if found is not None:
            _streams.wait(found[1], device.torch_device)
        parts.append(None if found is None else found[0])
        start += size
    return parts


def part_key(device: Device, start: int, size: int) -> tuple[torch.device, int, int]:
    """Return what a device's rows are remembered as."""
    return device.torch_device, start, size


def balanced(rows: int, count: int) -> list[tuple[int, int]]:
    """Return start and size of each of ``count`` balanced parts."""
    sizes = [rows // count + (k < rows % count) for k in range(count)]
    return [(sum(sizes[:k]), size) for k, size in enumerate(sizes)]


def broadcast(wanted: Iterable[tuple[Tensor, Sequence[torch.device]]]) -> list[Copies]:
    """Copy every tensor to each of its devices, on this thread's streams; copies have no graph."""
    tensors = [(leaf.detach(), targets) for leaf, targets in wanted]
    found: list[Copies] = [{} for _ in tensors]
    buckets: dict[Any, list[list[int]]] = {}
    sizes: dict[Any, int] = {}
    for k, (leaf, targets) in enumerate(tensors):
        size = leaf.numel() * leaf.element_size()
        if not _is_packable(leaf) or size >= _ALONE:
            for place, copy in _send_alone(leaf, targets).items():
                found[k][place] = copy
            continue
        kind = (leaf.dtype, leaf.device, tuple(targets))
        if kind not in buckets or sizes[kind] + size > _BUCKET:
            buckets.setdefault(kind, []).append([])
            sizes[kind] = 0
        buckets[kind][-1].append(k)
        sizes[kind] += size
    for (_, _, targets), several in buckets.items():
        for members in several:
            leaves = [tensors[k][0] for k in members]
            bucket = pack(leaves)
            for place in targets:
                parts = unpack(_streams.runtime.broadcast(bucket, place), leaves)
                for k, part in zip(members, parts, strict=True):
                    found[k][place] = part
    return found


def _send_alone(leaf: Tensor, targets: Sequence[torch.device]) -> Copies:
    if leaf.is_cpu and leaf.layout is torch.strided:
        leaf = _streams.runtime.pinned(leaf)  # Once for all devices.
    return {place: _streams.runtime.broadcast(leaf, place) for place in targets}


def _is_packable(leaf: Tensor) -> bool:
    is_plain = type(leaf) in _graph.PLAIN_TYPES and leaf.layout is torch.strided
    return is_plain and leaf.is_contiguous() and leaf.numel() > 0


def pack(leaves: Sequence[Tensor]) -> Tensor:
    """Copy leaves of one dtype and device into one, in pinned memory on the host."""
    starts, total = _layout(leaves)
    first = leaves[0]
    bucket = _streams.runtime.pinned_room(total, first.dtype) if first.is_cpu else first.new_empty(total)
    into = [bucket[start : start + leaf.numel()] for start, leaf in zip(starts, leaves, strict=True)]
    torch._foreach_copy_(into, [leaf.view(-1) for leaf in leaves])
    return bucket


def unpack(bucket: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves in a bucket: views, each with a version of its own."""
    starts, _ = _layout(like)
    return [
        bucket[start : start + leaf.numel()].view(leaf.shape).data
        for start, leaf in zip(starts, like, strict=True)
    ]


def _layout(leaves: Sequence[Tensor]) -> tuple[list[int], int]:
    starts, total = [], 0
    for leaf in leaves:
        starts.append(total)
        total += -(-leaf.numel() // _ALIGNED) * _ALIGNED
    return starts, total
