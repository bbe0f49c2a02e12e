"""Memory for large results.

The first write to fresh memory costs a page fault per 4 KiB, which for tens of megabytes takes
longer than the addition that fills them. So the last large result is used again once nobody has it
any more, and fresh memory is asked for in large pages, which Linux hands out where it can.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref

import torch
from torch import Tensor

_WORTH = 4 << 20  # Bytes.
_MAPPED = (32 << 20) - (64 << 10)  # Bytes: the largest block that counts, with room for malloc's own.
_MOST_KEPT = 128 << 20  # Bytes.
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", 0)
_libc = ctypes.CDLL(None) if sys.platform == "linux" and _ADVICE else None


def keep_freed() -> None:
    """Let the C library keep memory that is freed, for the next step, up to 64 MB in one piece.

    By default glibc gives the upper end of each thread's memory back to the system, and every step faults
    it in again. It stops that, up to twice the size, once a block is freed that was mapped alone, and
    then serves blocks of that size without a map of their own (mallopt(3), M_MMAP_THRESHOLD). Nothing
    is touched here, so it costs no memory; settings in the environment prevail.
    """
    torch.empty(_MAPPED, dtype=torch.uint8, device="cpu")


class Room:
    """Memory for one result that several shards get as copies on write.

    Attributes:
        tensor: The memory.
        users: Weak references to the copies.
    """

    __slots__ = ("tensor", "users")

    def __init__(self, like: Tensor) -> None:
        self.tensor = empty_like(like)
        self.users: list[weakref.ref[Tensor]] = []

    def copy(self) -> Tensor:
        """Return a copy on write; one thread at a time."""
        clone = torch._lazy_clone(self.tensor)
        self.users.append(weakref.ref(clone))
        return clone


_spare: list[Room] = []


def take(like: Tensor) -> Room:
    """Return contiguous memory of a tensor's shape and dtype: the spare one if it fits and is free."""
    try:
        room = _spare.pop()
    except IndexError:
        return Room(like)
    tensor = room.tensor
    if (
        tensor.shape != like.shape
        or tensor.dtype != like.dtype
        or any(user() is not None for user in room.users)
    ):
        return Room(like)
    # A copy that only the graph of some backward still has makes this a copy, not an error.
    tensor.data_ptr()
    room.users.clear()
    return room


def give_back(room: Room) -> None:
    """Keep large memory as the spare one."""
    if _WORTH <= room.tensor.numel() * room.tensor.element_size() <= _MOST_KEPT:
        _spare[:] = [room]


def empty_like(tensor: Tensor) -> Tensor:
    """Return contiguous memory of a tensor's shape, dtype and device, not yet written to."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    size = room.numel() * room.element_size()
    if _libc is not None and size >= _WORTH and room.device.type == "cpu":
        start = -(-room.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (room.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_ADVICE))
    return room
