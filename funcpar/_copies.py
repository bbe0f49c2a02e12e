"""Copies on accelerators that are remembered between calls, and when they are no longer true.

Only tensors that were staged, prefetched, or came out of a pmap as replicated have any. A copy
counts as long as its original is that object, with that memory and that version. An optimizer step
makes it forgotten whatever the version says: ``fused=True`` changes parameters and leaves
``_version`` alone. A copy lives no longer than its original, and never keeps it alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

# A device, and for a part of the rows from where to where.
Key: TypeAlias = Hashable


class _Entry:
    """What is remembered of one tensor."""

    __slots__ = ("copies", "ref", "state")

    def __init__(self, ref: weakref.ref[Tensor]) -> None:
        self.ref = ref
        self.state: tuple[int, int, int] | None = None
        # Each copy with the event after which it is there, and its version, as results may be views of it.
        self.copies: dict[Key, tuple[Tensor, Any, int]] = {}


_entries: dict[int, _Entry] = {}
_lock = threading.RLock()
_hooked = False


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _entries.clear()  # A child has no use of its parent's accelerators.


os.register_at_fork(after_in_child=_after_fork)


def is_known(tensor: Tensor) -> bool:
    """Tell whether copies of a tensor are remembered, or were until it changed."""
    return _entry(tensor) is not None


def find(tensor: Tensor, key: Key) -> tuple[Tensor, Any] | None:
    """Return a copy that is still true, and the event after which it is there."""
    entry = _entry(tensor)
    if entry is None:
        return None
    with _lock:
        if entry.state != _state(tensor):
            entry.copies.clear()
            return None
        copy, event, version = entry.copies.get(key, (None, None, 0))
        return None if copy is None or _version(copy) != version else (copy, event)


def take(tensor: Tensor, key: Key) -> tuple[Tensor, Any] | None:
    """Find a copy, for its only use."""
    found = find(tensor, key)
    if found is not None:
        with _lock:
            entry = _entry(tensor)
            if entry is not None:
                entry.copies.pop(key, None)
    return found


def forget(tensor: Tensor) -> None:
    """Forget a tensor and its copies."""
    if _entry(tensor) is not None:
        _entries.pop(id(tensor), None)


def remember(tensor: Tensor, copies: dict[Key, tuple[Tensor, Any]]) -> None:
    """Remember copies of what a tensor holds now."""
    global _hooked
    state = _state(tensor)
    if state is None:
        return
    with _lock:
        if not _hooked:
            register_optimizer_step_post_hook(_forget_stepped)
            _hooked = True
        entry = _entry(tensor)
        if entry is None:
            entry = _entries[id(tensor)] = _Entry(weakref.ref(tensor, _Forget(id(tensor))))
        if entry.state != state:
            entry.copies.clear()
        entry.state = state
        entry.copies.update({key: (copy, event, _version(copy)) for key, (copy, event) in copies.items()})


class _Forget:
    """What happens when a tensor dies; without a lock, since it may happen anywhere."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __call__(self, _: object) -> None:
        _entries.pop(self.key, None)


def _entry(tensor: Tensor) -> _Entry | None:
    entry = _entries.get(id(tensor)) if _entries else None
    return entry if entry is not None and entry.ref() is tensor else None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _state(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return what changes when a tensor is written to or given other memory; None if nothing tells."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return None
    return int(tensor._version), tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _forget_stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Drop the copies of what an optimizer has changed; its tensors stay known."""
    if not _entries:
        return
    with _lock:
        for group in optimizer.param_groups:
            for param in group["params"]:
                entry = _entry(param)
                if entry is not None:
                    entry.copies.clear()
