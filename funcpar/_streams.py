"""Streams and events: in which order accelerators do what threads ask of them.

Work on one stream is done in order; between streams only events order it, and the host waits for
neither. A worker has a stream of its own. It starts after what its caller had asked for, and the
caller's streams go on after it, also after a failure. Where shards meet, each goes on after what
all others had asked for until then, so that it may read what they brought.

The allocator gives freed memory to the stream that it was made on, so a tensor that another stream
uses is recorded on that one. Nothing else in this package names a stream or an event.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from funcpar._devices import Device


class Runtime:
    """What is asked of an accelerator's runtime, and the one place that asks: tests put another here."""

    def new_stream(self, device: torch.device) -> Any:
        """Return a stream of a device that nobody else uses."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """Return what this thread's work on a device goes to."""
        return torch.accelerator.current_stream(device)

    def use(self, stream: Any) -> None:
        """Let this thread's work go to a stream, and to its device."""
        torch.accelerator.set_stream(stream)

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Make a device this thread's current one for a ``with`` block."""
        return torch.accelerator.device_index(device.index)

    def record(self, stream: Any) -> Any:
        """Return an event that comes when a stream has done what it was asked for."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream go on only after an event."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Let nobody have a tensor's memory before a stream has done what it was asked for."""
        tensor.record_stream(stream)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a copy of a CPU tensor that an accelerator can read while the host goes on."""
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def pinned_room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return such memory, not yet written to."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor to an accelerator, on this thread's streams; the host does not wait."""
        return tensor.to(device, non_blocking=True)

    def broadcast(self, bucket: Tensor, device: torch.device) -> Tensor:
        """The same for a bucket that holds many leaves."""
        return bucket.to(device, non_blocking=True)

    def fill(self, room: Tensor, part: Tensor) -> None:
        """Copy a tensor into memory on another device, on this thread's streams; the host does not wait."""
        room.copy_(part, non_blocking=True)

    def can_sum(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether the vendor's library, NCCL, sums over devices within one process."""
        nccl: Any = torch.cuda.nccl
        return tensors[0].is_cuda and hasattr(torch._C, "_nccl_reduce") and bool(nccl.is_available(tensors))

    def sum_to_first(self, tensors: Sequence[Tensor], total: Tensor, streams: Sequence[Any]) -> None:
        """Sum one tensor of each device into ``total`` on the first, each part on its device's stream."""
        nccl: Any = torch.cuda.nccl
        kind: Any = torch.cuda.Stream
        own = [
            kind(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)
            for s in streams
        ]
        nccl.reduce(tensors, output=total, root=0, streams=own)


runtime = Runtime()


class _Here(threading.local):
    """The device of a worker, its stream, and one beside it; None in all other threads."""

    device: torch.device | None = None
    stream: Any = None
    side: Any = None


_here = _Here()


def open_stream(device: Device) -> None:
    """Give this thread, a worker's, a stream of its own on its device."""
    if not device.is_cpu:
        _here.device, _here.stream = device.torch_device, runtime.new_stream(device.torch_device)
        runtime.use(_here.stream)


def use_new_streams(devices: Iterable[Device]) -> None:
    """Let this thread work beside all others: give it a stream of its own on each device."""
    for place in {device.torch_device: None for device in devices if not device.is_cpu}:
        runtime.use(runtime.new_stream(place))


def local_clone(tensor: Tensor) -> Tensor:
    """Copy a tensor, to the accelerator that this thread works for if there is one."""
    if _here.device is None or tensor.device == _here.device:
        return tensor.clone()
    return bring(tensor, _here.device)


@contextlib.contextmanager
def at(device: Device) -> Iterator[None]:
    """Work for an accelerator in the thread that calls, on its own streams."""
    outer = _here.device
    _here.device = device.torch_device
    try:
        with runtime.on(device.torch_device):
            yield
    finally:
        _here.device = outer


def current_streams(devices: Iterable[torch.device]) -> list[Any]:
    """Return this thread's stream of each accelerator among some devices."""
    return [runtime.current_stream(device) for device in dict.fromkeys(devices) if device.type != "cpu"]


class Order:
    """The edges of one call: between the streams of the thread that makes it and those of its shards.

    Args:
        devices: The devices of the shards.
        others: Further streams of the caller that what the shards read may have been made on.
    """

    __slots__ = ("_callers", "_ends", "_starts")

    def __init__(self, devices: Sequence[Device], others: Iterable[Any] = ()) -> None:
        own = current_streams(device.torch_device for device in devices)
        self._callers = list(dict.fromkeys([*own, *others]))
        self._starts = [runtime.record(stream) for stream in self._callers]
        self._ends: list[Any] = []

    def run(self, body: Callable[[], Any]) -> Any:
        """Run a shard in its worker, after what the caller had asked for."""
        runtime.use(_here.stream)  # A function before may have left another one.
        for event in self._starts:
            runtime.wait(_here.stream, event)
        try:
            return body()
        finally:
            self._ends.append(runtime.record(_here.stream))

    def join(self) -> None:
        """In the caller, once all workers are through: its streams go on after theirs."""
        for stream in self._callers:
            for event in self._ends:
                runtime.wait(stream, event)


def mark() -> Any:
    """Return an event for what this worker has asked for until now."""
    return runtime.record(runtime.current_stream(_worker_device()))


def meet(brought: Sequence[tuple[Any, Any]], rank: int) -> list[Any]:
    """Go on after the marks of all others, and return the values they came with."""
    stream = runtime.current_stream(_worker_device())
    for other, (value, event) in enumerate(brought):
        if other != rank:
            runtime.wait(stream, event)
            received(value)
    return [value for value, _ in brought]


def is_at_home() -> bool:
    """Tell whether this thread, a worker, is on its own stream, not on one that the user chose."""
    return _here.stream is not None and bool(runtime.current_stream(_worker_device()) == _here.stream)


def side() -> tuple[torch.device, Any]:
    """Return this worker's device, and a second stream there, for what others may do beside its work."""
    if _here.side is None:
        _here.side = runtime.new_stream(_worker_device())
    return _worker_device(), _here.side


@contextlib.contextmanager
def aside(sides: Sequence[tuple[torch.device, Any]], marks: Sequence[Any]) -> Iterator[None]:
    """Work on second streams of some workers, one of each device, after the mark of each worker."""
    chosen = dict(reversed(sides))  # Of a device that has several the first, whoever works.
    mine = _worker_device()
    before = [runtime.current_stream(device) for device in sorted(chosen, key=lambda d: d == mine)]
    for (device, _), event in zip(sides, marks, strict=True):
        runtime.wait(chosen[device], event)
    for stream in chosen.values():
        runtime.use(stream)
    try:
        yield
    finally:
        for stream in before:  # The worker's own device last: it becomes the current one again.
            runtime.use(stream)


def received(given: Any, others: Sequence[Any] = ()) -> None:
    """Record tensors, in lists, tuples and dicts, on this thread's streams, and others: workers made them."""
    if isinstance(given, Tensor):
        if not given.is_cpu:
            keep(given)
            for stream in others:
                if stream.device == given.device:
                    runtime.keep(given, stream)
    elif isinstance(given, list | tuple):
        for item in given:
            received(item, others)
    elif isinstance(given, dict):
        received(list(given.values()), others)


def keep(tensor: Tensor) -> None:
    """Record one tensor on this thread's stream of its device."""
    if forward_ad._current_level >= 0:
        tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
        if tangent is not None:
            received(tangent)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        received(torch._C._functorch.get_unwrapped(tensor))
    elif tensor.layout is torch.strided:
        runtime.keep(tensor, runtime.current_stream(tensor.device))
    elif tensor.layout is torch.sparse_coo:
        received([tensor._indices(), tensor._values()])


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on an accelerator, a copy if it is elsewhere; the host does not wait.

    Memory of the host is copied to pinned memory first, so that the caller may write to its own again.
    """
    if tensor.device == device:
        keep(tensor)
        return tensor
    if tensor.is_cpu:
        if tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = runtime.pinned(tensor)
    else:
        keep(tensor)
    return runtime.send(tensor, device)


def ready_on(device: torch.device) -> Any:
    """Return an event for what this thread has asked of a device until now."""
    return runtime.record(runtime.current_stream(device))


def wait(event: Any, device: torch.device) -> None:
    """Let this thread's work on a device go on only after an event."""
    runtime.wait(runtime.current_stream(device), event)


def sum_to_first(tensors: Sequence[Tensor], total: Tensor) -> bool:
    """Sum tensors, one on each device, into ``total`` in the first worker, if one library call can."""
    if not runtime.can_sum(tensors):
        return False
    first, *others = [runtime.current_stream(tensor.device) for tensor in tensors]
    start = runtime.record(first)
    for stream in others:
        runtime.wait(stream, start)
    runtime.sum_to_first(tensors, total, [first, *others])
    for stream in others:
        runtime.wait(first, runtime.record(stream))
    return True


def home(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device that it belongs to; the host waits if that is the CPU."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def _worker_device() -> torch.device:
    assert _here.device is not None
    return _here.device
