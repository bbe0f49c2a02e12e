"""Batches made ahead of time, while the step before runs."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from funcpar import _random, _streams, tree
from funcpar._devices import Device, resolve
from funcpar._transfer import send_rows, stage_leaves
from funcpar._world import World

# A loader may take its time; this is how often is looked whether it is still there.
_LOOK = 1.0


def stage(tree_of_params: Any, devices: Any = None) -> Any:
    """Place a tree on every device ahead of time.

    The tree that comes back holds the same tensors. Accelerators get copies, which pmap finds again
    as long as a tensor has the same memory and version; a changed one, also by an optimizer step, is
    sent once by the next call. What changes memory behind torch's back (``.data``, numpy) is not
    noticed: stage again. Copies live as long as their tensors. The host does not wait for them. On
    virtual CPU devices, which share memory, nothing is ever copied.

    Args:
        tree_of_params: Any tree; leaves that are no tensors stay as they are.
        devices: Where to; see :func:`pmap`.

    Returns:
        A tree of the same structure and tensors.

    Raises:
        ValueError: A device is not there.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.stage({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}

    References:
        ``flax.jax_utils.replicate``, which adds a leading axis; here shapes stay as they are.
    """
    chosen = resolve(devices, "stage")
    leaves, spec = tree.flatten(tree_of_params)
    if not chosen[0].is_cpu:
        stage_leaves(leaves, chosen)
    return tree.unflatten(spec, leaves)


def prefetch(iterable: Iterable[Any], size: int = 2, devices: Any = None) -> Iterator[Any]:
    """Make the next batches in the background while the current one is used.

    Order is kept, and an exception of the iterable comes where its batch would have come. The first
    batch is made by the caller, so that a loader that shuffles shuffles as it would without this; a
    loader that draws random numbers later draws them from a stream of its own. The background thread
    ends with the iteration, also where that is left early.

    Accelerators get their rows of every tensor of the next batches, cut along dimension 0 as
    :func:`pmap` cuts them, while they work on the current one; a call on the same devices finds them
    once. What it splits otherwise, it sends again.

    Args:
        iterable: Batches: a DataLoader, say.
        size: How many batches are kept ready at most, at least 1.
        devices: Where the batches will be used; see :func:`pmap`. Virtual CPU devices share memory.

    Returns:
        An iterator over the batches themselves.

    Raises:
        ValueError: ``size`` is less than 1, or a device is not there.
        TypeError: ``size`` is not an integer.
        RuntimeError: From the iterator: the process was forked after the iteration had begun.

    Example:
        >>> import funcpar as fp
        >>> list(fp.prefetch(range(4)))
        [0, 1, 2, 3]

    References:
        ``flax.jax_utils.prefetch_to_device``.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"prefetch: size={size!r} is not an integer.\nGive how many batches to keep ready.")
    if size < 1:
        raise ValueError(f"prefetch: size={size} keeps no batch ready.\nGive 1 or more.")
    chosen = resolve(devices, "prefetch")
    return _batches(iter(iterable), size, chosen)


def _batches(iterator: Iterator[Any], size: int, devices: tuple[Device, ...]) -> Iterator[Any]:
    try:
        batch = next(iterator)
    except StopIteration:
        return
    with _Background(iterator, size, devices) as background:
        yield batch
        del batch
        yield from background.batches()


class _Background:
    """A thread that runs an iterator ahead, for a ``with`` block."""

    def __init__(self, iterator: Iterator[Any], size: int, devices: tuple[Device, ...]) -> None:
        self._iterator = iterator
        self._devices = devices
        # One more is being made while `size` of them are ready or in use.
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=size)
        self._stopped = threading.Event()
        self._world = World()
        self._stream = _random.Streams()[0]
        context = contextvars.copy_context()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="funcpar-prefetch", daemon=True
        )

    def __enter__(self) -> _Background:
        _random.install(start=not self._devices[0].is_cpu)
        _ = self._stream.generator  # Seeded now: later the caller may be drawing at the same time.
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_here():
            self._stopped.set()
            self._thread.join(timeout=60)

    def batches(self) -> Iterator[Any]:
        """Yield what the thread makes.

        Raises:
            RuntimeError: There is no such thread any more.
        """
        while True:
            kind, value = self._next()
            if kind == "batch":
                yield value
            elif kind == "error":
                try:
                    raise value
                finally:
                    del value  # Its traceback has this frame.
            else:
                return
            del value

    def _is_here(self) -> bool:
        """Tell whether this process is not a copy, without the thread, maybe with locks that it held."""
        return os.getpid() == self._process

    def _next(self) -> tuple[str, Any]:
        is_alive = self._is_here()
        while is_alive:
            is_alive = self._thread.is_alive()  # Asked first: its last word may come before it ends.
            try:
                return self._ready.get(timeout=_LOOK if is_alive else 0.0)
            except queue.Empty:
                continue
        raise RuntimeError(
            "prefetch: the thread that makes the batches is not there; this process was forked after the "
            "iteration had begun.\nCall prefetch in the process that uses the batches."
        )

    def _run(self) -> None:
        before, outer = self._world.enter(), _random.enter(self._stream)
        try:
            if not self._devices[0].is_cpu:
                _streams.use_new_streams(self._devices)
            for batch in self._iterator:
                if not self._devices[0].is_cpu:
                    send_rows(tree.leaves(batch), self._devices)
                if not self._put("batch", batch):
                    return
                del batch
            self._put("end", None)
        except BaseException as error:
            self._put("error", error)
        finally:
            _random.leave(outer)
            self._world.leave(before)

    def _put(self, kind: str, value: Any) -> bool:
        """Hand something over; False if nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._ready.put((kind, value), timeout=0.05)
                return True
            except queue.Full:
                continue
        return False
