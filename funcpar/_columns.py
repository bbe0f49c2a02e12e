"""What the shards of a call bring one by one, and its sum where each is on an accelerator of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._reduce import add_up

# So many bytes are worth a further device that adds up its part of them.
_SHARE = 1 << 18
# What the vendor's library may sum: it adds halves in their own precision, once per shard.
_WIDE = (torch.float32, torch.float64)
# Torch keeps what it knows of NCCL in a table that one thread at a time may use.
_library = threading.Lock()


class Columns:
    """A number of columns, to each of which every shard brings one value: the last to come takes all."""

    def __init__(self, count: int, num_shards: int) -> None:
        self._columns: list[list[Any]] = [[None] * num_shards for _ in range(count)]
        self._missing = [num_shards] * count
        self._lock = threading.Lock()

    def bring(self, k: int, place: int, value: Any) -> list[Any] | None:
        """Bring a shard's value to column ``k``: the last shard gets those of all, in rank order."""
        with self._lock:
            column = self._columns[k]
            column[place] = value
            self._missing[k] -= 1
            if self._missing[k]:
                return None
            self._columns[k] = []  # Taken.
            return column

    def lacking(self, place: int) -> list[int]:
        """Return to which columns a shard has brought nothing yet."""
        return [k for k, column in enumerate(self._columns) if column and column[place] is None]


def add_to_first(rooms: Sequence[Tensor], places: Sequence[torch.device]) -> None:
    """Replace the first of some contiguous tensors, one on the device of each shard, by their sum.

    It is made on this thread's streams of those devices, which come after what made the tensors. Each
    device adds up a part, in rank order, and the first collects the parts; or NCCL does, where torch has it.
    """
    flat = [room.view(-1) for room in rooms]
    _streams.received(flat)
    with _library:
        if flat[0].dtype in _WIDE and _streams.sum_to_first(flat, flat[0]):
            return
    size = flat[0].numel()
    count = min(len(places), 1 + size * flat[0].element_size() // _SHARE)
    for rank, place in enumerate(places[:count]):
        start, stop = size * rank // count, size * (rank + 1) // count
        parts = [tensor.narrow(0, start, stop - start) for tensor in flat]
        total = add_up([_streams.bring(part, place) for part in parts])
        assert total is not None
        _streams.runtime.fill(parts[0], total)
