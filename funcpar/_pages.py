"""Large results in large pages.

The first write to fresh memory costs a page fault per 4 KiB, which for tens of megabytes takes
several times as long as the addition that fills them. Linux hands out pages of 2 MiB where it is
asked to; elsewhere, and where it refuses, nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_WORTH = 4 << 20  # Bytes.
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", 0)
_libc = ctypes.CDLL(None) if sys.platform == "linux" and _ADVICE else None


def empty_like(tensor: Tensor) -> Tensor:
    """Return contiguous memory of a tensor's shape, dtype and device, not yet written to."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    size = room.numel() * room.element_size()
    if _libc is not None and size >= _WORTH and room.device.type == "cpu":
        start = -(-room.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (room.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_ADVICE))
    return room
