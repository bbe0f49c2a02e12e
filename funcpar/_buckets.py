"""Sums of tensors that come one by one, begun while the next are still being made.

A large tensor is a bucket of its own and is summed where it is; small ones of one dtype travel
together. All processes send the same buckets in the same order, whatever comes first: a bucket
leaves when it and those before it are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from funcpar import _streams
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


class Buckets:
    """Tensors that come one by one, and the memory in which they leave.

    Args:
        messages: How they leave.
    """

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self._missing = [len(bucket) for bucket in messages.buckets]
        self._given: list[tuple[Tensor, bool] | None] = [None] * len(messages.kinds)

    def give(self, k: int, tensor: Tensor, reusable: bool) -> int:
        """Take one tensor, and return its bucket."""
        self._given[k] = tensor, reusable
        number = self.messages.bucket_of[k]
        self._missing[number] -= 1
        return number

    def is_complete(self, number: int) -> bool:
        """Tell whether all tensors of a bucket are there."""
        return not self._missing[number]

    def missing(self) -> list[int]:
        """Return which tensors are not there."""
        return [k for k, given in enumerate(self._given) if given is None]

    def packed(self, number: int) -> Tensor:
        """Return the tensors of a complete bucket in one contiguous memory that may be written to."""
        given = [pair for k in self.messages.buckets[number] if (pair := self._given[k])]
        if len(given) == 1:
            return _writable(*given[0])
        flat = joined([tensor for tensor, _ in given])
        return flat.to(_WIDER.get(flat.dtype, flat.dtype))

    def unpack(self, number: int, room: Tensor, found: list[Any]) -> None:
        """Write into ``found`` what the memory of a bucket has come to hold."""
        bucket = self.messages.buckets[number]
        given = [pair[0] for k in bucket if (pair := self._given[k])]
        alone = len(bucket) == 1 and given[0].is_contiguous()
        for k, total in zip(bucket, [room] if alone else parted(room.view(-1), given), strict=True):
            dtype = self.messages.kinds[k][1]
            found[k] = total if total.dtype is dtype else total.to(dtype)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one dtype as one flat one, in new memory."""
    plain = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    flat: Tensor = _flatten_dense_tensors(plain)  # type: ignore[no-untyped-call]
    return flat


def parted(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return what a flat tensor holds, each in memory of its own, in shape and order like others."""
    parts: Sequence[Tensor] = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return [
        # Torch's function knows one empty shape alone.
        part.clone() if each.is_contiguous() and part.shape == each.shape
        else torch.empty_like(each, dtype=part.dtype).copy_(part.view(each.shape))
        for part, each in zip(parts, like, strict=True)
    ]  # fmt: skip


def _writable(tensor: Tensor, reusable: bool) -> Tensor:
    dtype = _WIDER.get(tensor.dtype, tensor.dtype)
    if reusable and dtype is tensor.dtype and tensor.is_contiguous():
        return tensor
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


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
        self._buckets = Buckets(messages)
        self._sent: list[tuple[Tensor, Any]] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, link: Link, call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors that are all there; none of them is written to."""
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        sums = cls(link, call, Messages.of(kinds))
        sums.put_all((k, tensor, False) for k, tensor in enumerate(tensors))
        return sums.totals()

    def put(self, k: int, tensor: Tensor, reusable: bool) -> None:
        """Give one tensor; if it is reusable, its memory may come to hold the sum."""
        self.put_all([(k, tensor, reusable)])

    def put_all(self, tensors: Iterable[tuple[int, Tensor, bool]]) -> None:
        """Give several."""
        with self._lock:
            for each in tensors:
                self._buckets.give(*each)
            self._send()

    def totals(self) -> list[Tensor]:
        """Wait for all sums; what was not given counts as zeros."""
        with self._lock:
            self._fill()
            found: list[Any] = [None] * len(self._buckets.messages.kinds)
            for number, (room, work) in enumerate(self._sent):
                self._link.wait(self._call, work, room.is_cpu)
                _streams.received([room])
                self._buckets.unpack(number, room, found)
        return found

    def abandon(self) -> None:
        """Send zeros for what is missing, so that nobody waits for it; nobody waits here."""
        with self._lock:
            self._fill()
            self._link.hold(self._sent)

    def _fill(self) -> None:
        for k in self._buckets.missing():
            shape, dtype, device = self._buckets.messages.kinds[k]
            self._buckets.give(k, torch.zeros(shape, dtype=dtype, device=device), True)
        self._send()

    def _send(self) -> None:
        """Let the buckets go that are complete, in order."""
        messages = self._buckets.messages
        while len(self._sent) < len(messages.buckets) and self._buckets.is_complete(len(self._sent)):
            room = self._buckets.packed(len(self._sent))
            self._sent.append((room, self._link.start_sum(room)))


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
