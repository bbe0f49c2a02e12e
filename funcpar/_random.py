"""Give each shard a stream of random numbers of its own.

Torch has one default CPU generator per process, so shards that run at the same time would race for its
numbers. Here every random op of a thread that has a current `Stream` draws from that stream, and torch's
`manual_seed`, `get_rng_state`, `fork_rng` and activation checkpointing follow it. An accelerator has a
default generator of its own, which is left alone.

The ops are met at the dispatcher's BackendSelect key, which is part of every call and sits just above the
device's kernel: autograd, vmap, autocast, fake tensors and tracing are done with the op by then, no kernel of
torch is replaced, and the kernel runs without the GIL (one that `torch.library.get_kernel` returns holds it).
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_CPU = torch._C.DispatchKey.CPU
_MASK32 = (1 << 32) - 1


class _Here(threading.local):
    """The state of one thread: the stream it draws from."""

    stream: "Stream | None" = None


_here = _Here()
# Reentrant, since drawing for a nested call may have to seed the stream of the outer one first.
_lock = threading.RLock()
_library: torch.library.Library | None = None


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Streams:
    """The streams of one call, one per shard, derived from the caller's generator.

    Creating it draws nothing. The first shard that draws takes one number from the caller's generator: that
    of the stream current in the thread that created this object, otherwise torch's default one.
    """

    __slots__ = ("_source", "_streams")

    def __init__(self, offset: int = 0) -> None:
        """Make the streams of shards that are numbered from `offset` on."""
        self._source = _Source(offset)
        self._streams: dict[int, Stream] = {}

    def __getitem__(self, rank: int) -> "Stream":
        """Return the stream of shard `rank`, the same object every time."""
        stream = self._streams.get(rank)
        # setdefault is atomic: two threads that ask at once get one stream.
        return stream if stream is not None else self._streams.setdefault(rank, Stream(self._source, rank))

    def seed(self, rank: int) -> int:
        """Return the seed of shard `rank`."""
        return self._source.seed(rank)


class _Source:
    """The base seed of one call, drawn when the first shard needs it."""

    __slots__ = ("_base", "_offset", "_parent")

    def __init__(self, offset: int = 0) -> None:
        self._parent = _here.stream
        self._offset = offset
        self._base: int | None = None

    def seed(self, rank: int) -> int:
        """Return the seed of shard `rank`, drawing the base seed of the call if no shard has done so yet."""
        base = self._base
        if base is None:
            with _lock:
                if self._base is None:
                    parent = self._parent
                    self._base = _draw(torch.default_generator if parent is None else parent.generator)
                base = self._base
        return _mix(base, self._offset + rank)


class Stream:
    """The random numbers of one shard, for one thread at a time.

    Its generator is made at the first use, so that a shard that draws nothing costs nothing.
    """

    __slots__ = ("_generator", "_rank", "_source")

    def __init__(self, source: _Source, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._generator: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        """The torch generator behind this stream."""
        if self._generator is None:
            generator = torch.Generator()
            generator.manual_seed(self._source.seed(self._rank))
            self._generator = generator
        return self._generator

    def replay(self) -> "Stream":
        """Return a stream that draws this one's numbers again, from the first: for a shard run once more."""
        return Stream(self._source, self._rank)


def current() -> Stream | None:
    """Return the stream this thread draws from, None for torch's default generator."""
    return _here.stream


def enter(stream: Stream | None) -> Stream | None:
    """Make `stream` the current one of this thread and return the previous one, for `leave`."""
    previous = _here.stream
    _here.stream = stream
    return previous


def leave(previous: Stream | None) -> None:
    """Make the stream that `enter` returned current again."""
    _here.stream = previous


@contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    """Make `stream` the current one of this thread inside the block."""
    previous = enter(stream)
    try:
        yield
    finally:
        leave(previous)


def install() -> None:
    """Let torch's random CPU ops follow the current stream, from now on and in every thread.

    Cheap and harmless to call again. Outside a shard every op gives the numbers it gave before.
    """
    global _library
    if _library is not None:
        return
    with _lock:
        if _library is not None:
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for op in random_ops():
            library.impl(op, _routed(op), "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
        # torch.random's functions read this global; torch.default_generator itself stays what it was.
        torch.random.default_generator = _default  # type: ignore[attr-defined]
        _library = library


def random_ops() -> list[torch._ops.OpOverload[..., Any]]:
    """List the aten ops that draw on a CPU: those with a generator argument and a CPU kernel of their own.

    All other random ops (dropout, rand, randint, attention, recurrent layers) are composed of these.
    """
    ops = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if any(argument.name == "generator" for argument in op._schema.arguments):
                ops.append(op)
    return ops


def _routed(op: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """Return a BackendSelect kernel for `op` that puts the current stream's generator in the call."""
    position = [argument.name for argument in op._schema.arguments].index("generator")
    # Few key sets ever come up, and looking one up is four times as fast as working it out.
    ways: dict[int, tuple[bool, Callable[..., Any]]] = {}
    without_torch_function = torch._C.DisableTorchFunction

    def kernel(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        way = ways.get(keyset.raw_repr())
        if way is None:
            way = ways[keyset.raw_repr()] = _way_on(op, keyset)
        on_cpu, call = way
        if on_cpu:
            if len(args) > position:
                kwargs["generator"] = args[position]
                args = args[:position]
            if _here.stream is not None or "generator" in kwargs:
                kwargs["generator"] = _chosen(kwargs.get("generator"))
        # Torch function modes and tensor subclasses have seen this op already.
        with without_torch_function():
            return call(*args, **kwargs)

    return kernel


def _way_on(
    op: torch._ops.OpOverload[..., Any], keyset: torch._C.DispatchKeySet
) -> tuple[bool, Callable[..., Any]]:
    """Return whether `op` called with `keyset` is bound for the CPU, and what takes the call on."""
    keys = torch._C.DispatchKey
    below = torch._C._dispatch_keyset_full_after(keys.BackendSelect) & keyset
    backend = below.remove(keys.PythonDispatcher).highestPriorityTypeId()
    # Only a trace uses the Python dispatcher, which wants to be asked again at every key; else the kernel is
    # called by its key, which unlike redispatching releases the GIL.
    if below.has(keys.PythonDispatcher):
        return backend == _CPU, partial(op.redispatch, below)
    return backend == _CPU, partial(op._op_dk, backend)


def _chosen(given: Any) -> torch.Generator:
    """Return the generator to draw from where the caller gave `given`, None or a torch generator."""
    # Every trip through the dispatcher makes a new Python object of the same generator.
    if given is not None and given._cdata not in _default_ids:
        return given  # type: ignore[no-any-return]
    return _target()


def _target() -> torch.Generator:
    """Return the generator that is the default one in this thread."""
    stream = _here.stream
    return torch.default_generator if stream is None else stream.generator


class _DefaultGenerator(torch.Generator):
    """What `torch.random` takes for the default generator: the current stream's, or else the process's.

    It is a real generator for isinstance and for torch's argument parser; its own state is never used, as the
    routed ops know it by its address.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _target().__reduce__()

    def get_state(self) -> torch.Tensor:
        return _target().get_state()

    def set_state(self, _new_state: torch.Tensor) -> torch.Generator:
        return _target().set_state(_new_state)

    def clone_state(self) -> torch.Generator:
        return _target().clone_state()

    def graphsafe_get_state(self) -> torch.Generator:
        return _target().graphsafe_get_state()

    def graphsafe_set_state(self, _new_state: torch.Generator) -> torch.Generator:
        return _target().graphsafe_set_state(_new_state)

    def get_offset(self) -> int:
        return _target().get_offset()

    def set_offset(self, offset: int) -> torch.Generator:
        return _target().set_offset(offset)

    def manual_seed(self, seed: int) -> torch.Generator:
        return _target().manual_seed(seed)

    def seed(self) -> int:
        return _target().seed()

    def initial_seed(self) -> int:
        return _target().initial_seed()


_default = _DefaultGenerator()
_default_ids = frozenset(generator._cdata for generator in (torch.default_generator, _default))  # type: ignore[attr-defined]
_scratch = torch.zeros((), dtype=torch.int64)
_scratch_value = _scratch.numpy()


def _draw(generator: torch.Generator) -> int:
    """Draw one integer in [0, 2**63) from `generator`; the caller holds the lock."""
    # The kernel itself, and a buffer read through numpy: a tensor made here could belong to a torch.func
    # level or a fake tensor mode that is active in the shard, or be refused by vmap.
    with torch._C.DisableTorchFunction():
        torch.ops.aten.random_.default._op_dk(_CPU, _scratch, generator=generator)
    return int(_scratch_value)


def _mix(base: int, rank: int) -> int:
    """Hash the seed of a call and a rank into the seed of that shard."""
    # The CPU generator takes 32 bits of its seed only. Every step below is a bijection of 32 bits (odd
    # factors, shifted xors), so two shards of a call can never get the same ones.
    word = (base + rank * ((base >> 31) | 1)) & _MASK32
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _MASK32
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _MASK32
    return word ^ (word >> 15)
