"""Sums over processes of tensors that come one by one, sent while the next are still being made.

All processes send the same buckets in the same order, whatever comes first: a bucket leaves when it
and those before it are complete. A large tensor is a bucket of its own and is summed where it is;
small ones of one dtype travel together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from funcpar._link import Link

Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]

# Bytes: what is larger travels alone; a bucket of small ones leaves when it has so many. Each message
# costs threads that are woken, which the cores have to spare only while they wait.
_LARGE = 1 << 20
_FULL = 1 << 22
# What gloo adds up; anything else travels in the dtype beside it.
_WIDER = {torch.bool: torch.int64, torch.int16: torch.int64}


@dataclass(frozen=True, slots=True)
class Messages:
    """In which messages a list of tensors leaves.

    Attributes:
        kinds: Shape, dtype and device of each, in the order in which they are complete.
        buckets: For each message the tensors in it.
        bucket_of: For each tensor its message.
    """

    kinds: Sequence[Kind]
    buckets: list[list[int]]
    bucket_of: dict[int, int]

    @classmethod
    def of(cls, kinds: Sequence[Kind]) -> Messages:
        """Put tensors into messages."""
        buckets = _planned(kinds)
        return cls(kinds, buckets, {k: number for number, bucket in enumerate(buckets) for k in bucket})


class Sums:
    """Sums over processes of a known list of tensors.

    Args:
        link: The line to the other processes.
        call: The call, for errors.
        messages: How they leave.
    """

    def __init__(self, link: Link, call: str, messages: Messages) -> None:
        self._link = link
        self._call = call
        self._kinds = messages.kinds
        self._buckets = messages.buckets
        self._bucket_of = messages.bucket_of
        self._missing = [len(bucket) for bucket in self._buckets]
        self._given: list[tuple[Tensor, bool] | None] = [None] * len(self._kinds)
        self._sent: list[tuple[Tensor, Any]] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, link: Link, call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors that are all there; none of them is written to."""
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        sums = cls(link, call, Messages.of(kinds))
        for k, tensor in enumerate(tensors):
            sums.put(k, tensor, reusable=False)
        return sums.totals()

    def put(self, k: int, tensor: Tensor, reusable: bool) -> None:
        """Give one tensor; if it is reusable and travels alone, its memory will hold the sum."""
        with self._lock:
            self._give(k, tensor, reusable)

    def totals(self) -> list[Tensor]:
        """Wait for all sums; what was not given counts as zeros."""
        with self._lock:
            self._fill()
            found: list[Any] = [None] * len(self._kinds)
            for bucket, (room, work) in zip(self._buckets, self._sent, strict=True):
                self._link.wait(self._call, work)
                self._unpack(bucket, room, found)
        return found

    def abandon(self) -> None:
        """Send zeros for what is missing, so that nobody waits for it; nobody waits here."""
        with self._lock:
            self._fill()
            self._link.hold(self._sent)

    def _fill(self) -> None:
        for k, (shape, dtype, device) in enumerate(self._kinds):
            if self._given[k] is None:
                self._give(k, torch.zeros(shape, dtype=dtype, device=device), True)

    def _give(self, k: int, tensor: Tensor, reusable: bool) -> None:
        """Take one tensor, and let the buckets go that are complete, in order."""
        self._given[k] = tensor, reusable
        self._missing[self._bucket_of[k]] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            given = [self._given[k] for k in self._buckets[len(self._sent)]]
            room = self._packed([pair for pair in given if pair is not None])
            self._sent.append((room, self._link.start_sum(room)))

    def _packed(self, given: list[tuple[Tensor, bool]]) -> Tensor:
        ((first, reusable), *others) = given
        dtype = _WIDER.get(first.dtype, first.dtype)
        if not others:
            if reusable and dtype is first.dtype and first.is_contiguous():
                return first
            return first.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        flat: Tensor = _flatten_dense_tensors([tensor.detach() for tensor, _ in given])  # type: ignore[no-untyped-call]
        return flat.to(dtype)

    def _unpack(self, bucket: list[int], room: Tensor, found: list[Any]) -> None:
        if len(bucket) == 1:
            found[bucket[0]] = room.to(self._kinds[bucket[0]][1])
            return
        given = [pair[0] for k in bucket if (pair := self._given[k]) is not None]
        parts = _unflatten_dense_tensors(room, given)  # type: ignore[no-untyped-call]
        for k, part in zip(bucket, parts, strict=True):
            # In memory of its own: a part of a bucket would keep all of it alive.
            found[k] = part.to(self._kinds[k][1], copy=True)


def _planned(kinds: Sequence[Kind]) -> list[list[int]]:
    """Return which tensors travel together, in the order in which they are complete."""
    buckets: list[list[int]] = []
    collected: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    for k, (shape, dtype, device) in enumerate(kinds):
        kind, size = (dtype, device), shape.numel() * dtype.itemsize
        if size > _LARGE:
            buckets.append([k])
            continue
        collected.setdefault(kind, []).append(k)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] > _FULL:
            buckets.append(collected.pop(kind))
            del filled[kind]
    return buckets + sorted(collected.values(), key=max)
