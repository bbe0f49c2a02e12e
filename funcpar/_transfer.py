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

from funcpar import _copies, _streams
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
        near: Devices that hold what the shards read.
    """

    def __init__(self, devices: Sequence[Device], inputs: Sequence[list[Any]], is_graph: bool) -> None:
        self.places = [device.torch_device for device in devices]
        self._is_graph = is_graph
        self._copies: dict[int, Copies] = {}
        self._versions: list[tuple[int, Tensor, int]] = []
        tensors = {
            id(leaf): leaf for leaves in inputs for leaf in leaves if isinstance(leaf, Tensor)
        }
        self.near = dict.fromkeys(leaf.device for leaf in tensors.values() if not leaf.is_cpu)
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
        self._versions = [
            (key, copy, copy._version)
            for key in common & self._copies.keys() for copy in self._copies[key].values()
            if not copy.is_inference()
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
        copy = self._copies.get(id(leaf), {}).get(place, leaf)
        if self._is_graph or copy.device == place:
            return as_graph(copy, place)
        return _streams.bring(copy.detach(), place)

    def written(self) -> set[int]:
        """Return the ids of leaves whose copies, which shards or calls share, were written to."""
        return {key for key, copy, version in self._versions if copy._version != version}


def as_graph(leaf: Tensor, place: torch.device) -> Tensor:
    """Return a tensor on a device, as part of the graph that it is in."""
    if not leaf.is_cpu and not is_wrapped(leaf):
        _streams.keep(leaf)
    return leaf if leaf.device == place else leaf.to(place, non_blocking=not leaf.is_cpu)


def remember(leaf: Tensor, copies: Copies) -> None:
    """Remember copies that this thread has asked for until now."""
    _copies.remember(leaf, {place: (copy, _streams.ready_on(place)) for place, copy in copies.items()})


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
                parts = unpack(_streams.broadcast(bucket, place), leaves)
                for k, part in zip(members, parts, strict=True):
                    found[k][place] = part
    return found


def _send_alone(leaf: Tensor, targets: Sequence[torch.device]) -> Copies:
    if leaf.is_cpu and leaf.layout is torch.strided:
        leaf = _streams.pinned(leaf)  # Once for all devices.
    return {place: _streams.broadcast(leaf, place) for place in targets}


def _is_packable(leaf: Tensor) -> bool:
    return type(leaf) is Tensor and leaf.layout is torch.strided and leaf.is_contiguous() and leaf.numel() > 0


def pack(leaves: Sequence[Tensor]) -> Tensor:
    """Copy leaves of one dtype and device into one, in pinned memory on the host."""
    starts, total = _layout(leaves)
    first = leaves[0]
    bucket = _streams.pinned_room(total, first.dtype) if first.is_cpu else first.new_empty(total)
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
