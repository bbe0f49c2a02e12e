"""A simulated accelerator that finds races: devices "sim:0", "sim:1", ... computed on the CPU.

Tensors are subclasses on torch's PrivateUse1 backend; an operation on tensors of two devices raises, as
on a real one. Operations are done at once, but in the books each belongs to the stream that is current
in its thread, and only waits for events order streams: a vector clock per stream. Reading what another
stream wrote, writing what it may still read, and freeing memory that a stream may still use, without an
edge or a record between, are written down in ``races``; what makes the host wait, in ``waits``.

It takes torch's one custom backend for the process, so it is used in processes of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils.backend_registration
from torch.utils._pytree import tree_leaves, tree_map

COUNT = 3
aten = torch.ops.aten
# Ops with a kernel of the device, which is called by way of torch's dispatcher.
kernels: dict[Any, Callable[..., Any]] = {}


class Stream:
    """The books of one stream: what it is known to come after."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self.name = device, name
        self.clock: dict[Stream, int] = {self: 0}

    def __repr__(self) -> str:
        return f"{self.device}/{self.name}"

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def follow(self, clock: dict[Stream, int]) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def is_after(self, stream: Stream, time: int) -> bool:
        return self.clock.get(stream, 0) >= time


class Memory:
    """The books of one allocation."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        # Of each part that was used: whether it was written, by which stream, when, and by what.
        self.uses: dict[tuple[int, int, bool, Stream], tuple[int, str]] = {}
        self.kept: set[Stream] = set()

    def __del__(self) -> None:
        with books.lock:
            for (_, _, _, stream), (time, what) in self.uses.items():
                if books.is_closed or stream in self.kept:
                    continue
                if not self.stream.is_after(stream, time):
                    books.races.append(
                        f"memory of {self.stream} freed, which {what} on {stream} may still use"
                    )


class Books:
    """All that has happened."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_closed = False
        self.races: list[str] = []
        self.waits: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self.defaults: dict[int, Stream] = {}
        self.here = threading.local()
        self.backend: Any = None

    def clear(self) -> None:
        self.races, self.waits, self.log = [], [], []

    def current(self, device: torch.device) -> Stream:
        chosen = self.here.__dict__.setdefault("streams", {})
        if device.index in chosen:
            return chosen[device.index]
        with self.lock:
            return self.defaults.setdefault(device.index, Stream(device, "default"))

    def use(self, stream: Stream) -> None:
        self.here.__dict__.setdefault("streams", {})[stream.device.index] = stream

    def done(self, name: str, stream: Stream, reads: list[Sim], writes: list[Sim]) -> None:
        """Enter one operation, and look for what should have come before it."""
        with self.lock:
            time = stream.tick()
            for tensor, writing in [(t, False) for t in reads] + [(t, True) for t in writes]:
                start, stop = tensor.reach
                for (first, end, written, other), (then, what) in tensor.memory.uses.items():
                    meets = start < end and first < stop and (writing or written)
                    if meets and not stream.is_after(other, then):
                        self.races.append(f"{name} on {stream} does not wait for {what} on {other}")
            for tensor, writing in [(t, False) for t in reads] + [(t, True) for t in writes]:
                tensor.memory.uses[(*tensor.reach, writing, stream)] = time, name


books = Books()


class Sim(torch.Tensor):
    """A tensor of the simulated device: its values on the CPU, and whose memory it is."""

    inner: torch.Tensor
    memory: Memory
    reach: tuple[int, int]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int, memory: Memory | None = None) -> Sim:
        books.backend.init()
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=torch.device("sim", index),
        )  # fmt: skip
        made.inner = inner
        made.memory = memory or Memory(books.current(made.device))
        start = inner.storage_offset()
        spread = sum((n - 1) * abs(step) for n, step in zip(inner.shape, inner.stride(), strict=True))
        made.reach = (start, start + (spread + 1 if inner.numel() else 0))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in kernels or torch.Tag.nondeterministic_seeded in func.tags:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
                return func(*args, **kwargs)
        if func in (aten.copy_.default, aten._to_copy.default):
            return _copied(func, args, kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {t.device for t in given if isinstance(t, Sim)}
        device = kwargs.get("device")
        if isinstance(device, torch.device):
            kwargs["device"] = "cpu"
            places.add(device)
        if len(places) > 1 or any(not isinstance(t, Sim) and t.dim() for t in given):
            raise RuntimeError(f"{func} mixes devices: {sorted({str(t.device) for t in given})}")
        (place,) = places
        if func is aten._local_scalar_dense.default or func is aten.equal.default:
            books.waits.append(str(func))
        return computed(func, place, args, kwargs, [t for t in given if isinstance(t, Sim)])


def computed(func: Any, place: torch.device, args: Any, kwargs: Any, given: list[Sim]) -> Any:
    written = _written(func, args, kwargs)
    kwargs.pop("pin_memory", None)
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    by_storage = {t.inner.untyped_storage()._cdata: t.memory for t in given}
    by_id = {id(t.inner): t for t in given}
    new: list[Sim] = []

    def wrapped(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in by_id:
            return by_id[id(result)]
        made = Sim(result, place.index, by_storage.get(result.untyped_storage()._cdata))
        if made.inner.untyped_storage()._cdata not in by_storage:
            new.append(made)
        return made

    result = tree_map(wrapped, out)
    if new or written:
        reads = [t for t in given if id(t) not in written]
        writes = [t for t in given if id(t) in written]
        books.done(str(func), books.current(place), reads, [*writes, *new])
    try:
        return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs, result)
    except (RuntimeError, AssertionError):
        return result


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Sim) else value


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    found: set[int] = set()
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found |= {id(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
    return found


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy within a device, between two, or from and to the host, as torch does it on its streams."""
    if func is aten.copy_.default:
        into, source = args[0], args[1]
        is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        into_place = into.device
        _inner(into).copy_(_inner(source))
        result = into
    else:
        source = args[0]
        into_place = kwargs.pop("device", None) or source.device
        is_async = kwargs.pop("non_blocking", False)
        kwargs.pop("pin_memory", None)
        inner = aten._to_copy.default(_inner(source), **kwargs)
        result = Sim(inner, into_place.index) if into_place.type == "sim" else inner
    into_memory = [result] if isinstance(result, Sim) else []
    read = [source] if isinstance(source, Sim) else []
    name = f"copy {source.device} to {into_place}"
    if not isinstance(source, Sim):
        books.done(name, books.current(into_place), [], into_memory)
        if not is_async:
            books.waits.append(name)
    elif not isinstance(result, Sim):
        books.done(name, books.current(source.device), read, [])
        (books.races if is_async else books.waits).append(name)
    else:
        here, there = books.current(source.device), books.current(into_place)
        with books.lock:
            here.follow(there.clock)
            books.done(name, here, read, [])
            there.follow(here.clock)
            books.done(name, there, [], into_memory)
    return result


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Sim:
    return Sim(torch.empty(size, dtype=dtype), (device.index or 0))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Sim:
    return Sim(torch.empty_strided(size, stride, dtype=dtype), (device.index or 0))


def _zeros(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Sim:
    return Sim(torch.zeros(size, dtype=dtype), (device.index or 0))


_library: list[Any] = []


def install(backend: Any) -> None:
    """Make the simulated devices this process's accelerators; `backend` is what torch takes for torch.sim."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=backend)
    books.backend = backend
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_efficientzerotensor", _zeros, "PrivateUse1")
    for op, kernel in kernels.items():
        library.impl(op, kernel, "PrivateUse1")
    _library.append(library)
    # The engine of torch knows one simulated device; without its threads it asks for none.
    torch._C._set_multithreading_enabled(False)
