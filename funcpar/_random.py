"""Give each shard a stream of random numbers of its own.

Torch has one default generator for the CPU and one for each accelerator, so shards that run at the same time
would race for their numbers. Here every random op of a thread that has a current `Stream` draws from that
stream, and torch's `manual_seed`, `get_rng_state`, `fork_rng` and activation checkpointing follow it.

The ops are met at the dispatcher's BackendSelect key, which is part of every call and sits just above the
device's kernel: autograd, vmap, autocast, fake tensors and tracing are done with the op by then, no kernel of
torch is replaced, and the kernel runs without the GIL (one that `torch.library.get_kernel` returns holds it).
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from funcpar import _generators
from funcpar._devices import accelerator_kind
from funcpar._generators import Accelerators, DefaultGenerator
from funcpar._ops import Op, dropouts, names, random_ops, way_on

# Whether a call is bound for the CPU, and what makes it.
Way: TypeAlias = tuple[bool, Callable[..., Any]]

_CPU = torch._C.DispatchKey.CPU
_MASK32 = (1 << 32) - 1


class _Here(threading.local):
    """The state of one thread: the stream it draws from."""

    stream: "Stream | None" = None


here = _Here()
# Reentrant, since drawing for a nested call may have to seed the stream of the outer one first.
_lock = threading.RLock()
_library: torch.library.Library | None = None
_accelerators: Accelerators | None = None


def _renew_lock() -> None:
    """Replace the locks in a forked child, where the thread that held one does not exist."""
    global _lock
    _lock = threading.RLock()
    if _accelerators is not None:
        _accelerators.lock = threading.Lock()


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

    def __init__(self, offset: int = 0, base: int | None = None) -> None:
        self._parent = here.stream
        self._offset = offset
        self._base = base

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

    __slots__ = ("_elsewhere", "_generator", "_rank", "_source")

    def __init__(self, source: _Source, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._generator: torch.Generator | None = None
        self._elsewhere: dict[int, torch.Generator] = {}

    @property
    def generator(self) -> torch.Generator:
        """The torch generator behind this stream."""
        if self._generator is None:
            generator = torch.Generator()
            generator.manual_seed(self._source.seed(self._rank))
            self._generator = generator
        return self._generator

    def on(self, device: torch.device) -> torch.Generator:
        """Return the torch generator behind this stream on an accelerator."""
        generator = self._elsewhere.get(device.index)
        if generator is None:
            generator = _generators.new_generator(device)
            generator.manual_seed(_mix_on(self._source.seed(self._rank), device.index))
            self._elsewhere[device.index] = generator
        return generator

    def number(self) -> int:
        """Draw an integer in [0, 2**63)."""
        with _lock:
            return _draw(self.generator)

    def replay(self) -> "Stream":
        """Return a stream that draws this one's numbers again, from the first: for a shard run once more."""
        return Stream(self._source, self._rank)


# Draws for nobody, and takes no number from anybody: for one thread at a time.
nobodys = Stream(_Source(base=0), 0)


def current() -> Stream | None:
    """Return the stream this thread draws from, None for torch's default generator."""
    return here.stream


def enter(stream: Stream | None) -> Stream | None:
    """Make `stream` the current one of this thread and return the previous one, for `leave`."""
    previous = here.stream
    here.stream = stream
    return previous


def leave(previous: Stream | None) -> None:
    """Make the stream that `enter` returned current again."""
    here.stream = previous


@contextlib.contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    """Make `stream` the current one of this thread inside the block."""
    previous = enter(stream)
    try:
        yield
    finally:
        leave(previous)


def install(start: bool = False) -> None:
    """Let torch's random ops follow the current stream, from now on and in every thread.

    Cheap and harmless to call again. Outside a shard every op gives the numbers it gave before. Default
    generators of accelerators are followed as soon as torch has made them, which it does now to `start`.
    """
    global _library, _accelerators
    if _library is None:
        with _lock:
            if _library is not None:
                return
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            kind = accelerator_kind()  # Whether there is one is not asked: that can spoil a later fork.
            _accelerators = None if kind is None else Accelerators(kind, current)
            for op, kernel in _kernels():
                library.impl(op, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
            # torch.random's functions read this global; torch.default_generator itself stays what it was.
            torch.random.default_generator = _default  # type: ignore[attr-defined]
            _library = library
    if _accelerators is not None and not _accelerators.are_met:
        _accelerators.meet(start)


def _kernels() -> Iterator[tuple[Op, Callable[..., Any]]]:
    """Yield the ops to route, each with its BackendSelect kernel."""
    ops = random_ops()
    if _accelerators is not None:
        ops = list(dict.fromkeys([*ops, *random_ops(_accelerators.key)]))
        yield from ((op, _lent(op)) for op in dropouts(_accelerators.key))
    yield from ((op, _routed(op)) for op in ops)


def _routed(op: Op) -> Callable[..., Any]:
    """Return a BackendSelect kernel for `op` that puts the current stream's generator in the call."""
    position = names(op).index("generator")
    # Few key sets ever come up, and looking one up is four times as fast as working it out.
    ways: dict[int, Way] = {}
    without_torch_function = torch._C.DisableTorchFunction

    def kernel(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        way = ways.get(keyset.raw_repr())
        if way is None:
            way = ways[keyset.raw_repr()] = _way(op, keyset)
        on_cpu, call = way
        if len(args) > position:
            kwargs["generator"] = args[position]
            args = args[:position]
        if on_cpu and (here.stream is not None or "generator" in kwargs):
            kwargs["generator"] = _chosen(kwargs.get("generator"))
        # Torch function modes and tensor subclasses have seen this op already.
        with without_torch_function():
            return call(*args, **kwargs)

    return kernel


def _lent(op: Op) -> Callable[..., Any]:
    """Return a BackendSelect kernel for `op`, which takes no generator."""
    ways: dict[int, Way] = {}
    without_torch_function = torch._C.DisableTorchFunction

    def kernel(keyset: torch._C.DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        way = ways.get(keyset.raw_repr())
        if way is None:
            way = ways[keyset.raw_repr()] = _way(op, keyset)
        with without_torch_function():
            return way[1](*args, **kwargs)

    return kernel


def _way(op: Op, keyset: torch._C.DispatchKeySet) -> Way:
    """Return whether `op` called with `keyset` is bound for the CPU, and what makes the call."""
    key, call = way_on(op, keyset)
    if _accelerators is not None and key == _accelerators.key:
        call = _accelerators.routed(op, call)
    return key == "CPU", call


def _chosen(given: Any) -> torch.Generator:
    """Return the generator to draw from where the caller gave `given`, None or a torch generator."""
    # Every trip through the dispatcher makes a new Python object of the same generator.
    if given is not None and given._cdata not in _default_ids:
        return given  # type: ignore[no-any-return]
    return _target()


def _target() -> torch.Generator:
    """Return the generator that is the default one in this thread."""
    stream = here.stream
    return torch.default_generator if stream is None else stream.generator


_default = DefaultGenerator(_target, contextlib.nullcontext(), torch.device("cpu"))
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
    return _scramble((base + rank * ((base >> 31) | 1)) & _MASK32)


def _mix_on(seed: int, index: int) -> int:
    """Hash the seed of a shard and the index of an accelerator into the seed of its numbers there."""
    # Accelerators take 64 bits: the upper half keeps devices apart, the lower one shards and the CPU.
    return ((index + 1) << 32) | _scramble((seed + (index + 1) * 0x9E3779B9) & _MASK32)


def _scramble(word: int) -> int:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _MASK32
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _MASK32
    return word ^ (word >> 15)
