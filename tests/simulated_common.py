"""What programs on the simulated accelerator share; importing it makes that the process's accelerator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import simulated
import simulated_random
import torch
from simulated import books

simulated.install(simulated_random.register())

import funcpar as fp  # noqa: E402
from funcpar import _generators, _graph, _streams  # noqa: E402

# One device, one named twice, all, both kinds at once, and not the one that results of others are on.
DEVICES = {"one": [0], "one twice": [0, 0], "all": [0, 1, 2], "mixed": [0, 0, 1], "others": [1, 2]}

ASIDE = " aside"

Event: TypeAlias = tuple[simulated.Stream, dict[simulated.Stream, int]]


def aside(stream: simulated.Stream) -> str:
    return ASIDE if stream.name.endswith(ASIDE) else ""


class Recorder:
    """In the place of ``_streams.Runtime``: streams and events in the books, and a log of what was asked."""

    def __init__(self) -> None:
        self.broken: frozenset[str] = frozenset()
        self.library = False
        self.pins: set[int] = set()
        self.here = threading.local()

    def note(self, what: str, *details: Any) -> None:
        books.log.append((what, threading.current_thread().name, *details))

    def new_stream(self, device: torch.device) -> simulated.Stream:
        """Return a stream; a worker's second one is where sums are made beside backward."""
        made = self.here.__dict__.setdefault("made", set())
        name = threading.current_thread().name + (ASIDE if device in made else "")
        made.add(device)
        return simulated.Stream(device, name)

    def current_stream(self, device: torch.device) -> simulated.Stream:
        return books.current(device)

    def use(self, stream: simulated.Stream) -> None:
        books.use(stream)

    def on(self, device: torch.device) -> Any:
        return contextlib.nullcontext()

    def record(self, stream: simulated.Stream) -> Event:
        self.note("record", stream)
        with books.lock:
            return stream, dict(stream.clock)

    def wait(self, stream: simulated.Stream, event: Event) -> None:
        self.note("wait", stream, event[0])
        if not self.broken & {"wait", f"wait{aside(stream)}", f"wait for{aside(event[0])}"}:
            with books.lock:
                stream.follow(event[1])

    def keep(self, tensor: torch.Tensor, stream: simulated.Stream) -> None:
        if isinstance(tensor, simulated.Sim) and tensor.memory.stream is not stream:
            self.note("keep", stream)
            if not self.broken & {"keep", f"keep{aside(stream)}"}:
                tensor.memory.kept.add(stream)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        self.note("pin", copy.numel())
        self.pins.add(copy.data_ptr())
        return copy

    def pinned_room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        room = torch.empty(numel, dtype=dtype)
        self.pins.add(room.data_ptr())
        return room

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.note("send", tensor.device, device, tensor.numel())
        if tensor.is_cpu and tensor.numel() and tensor.data_ptr() not in self.pins:
            books.races.append("the accelerator reads memory that is the user's")
        return tensor.to(device, non_blocking=True)

    def broadcast(self, bucket: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.note("broadcast", bucket.device, device, bucket.numel())
        return bucket.to(device, non_blocking=True)

    def fill(self, room: torch.Tensor, part: torch.Tensor) -> None:
        self.note("fill", room.numel())
        room.copy_(part, non_blocking=True)

    def can_sum(self, tensors: Any) -> bool:
        return self.library and len({t.device for t in tensors}) == len(tensors)

    def sum_to_first(self, tensors: Any, total: Any, streams: Any) -> None:
        self.note("library sum", total.numel())
        first, *others = streams
        with books.lock:
            for stream in others:
                first.follow(stream.clock)
            for stream in streams:
                stream.follow(first.clock)
            for tensor, stream in zip(tensors, streams, strict=True):
                books.done("library sum", stream, [tensor], [])
            for stream in others:
                first.follow(stream.clock)
            total.inner.copy_(sum(tensor.inner for tensor in tensors))
            books.done("library sum", first, [], [total])


recorder = Recorder()
_streams.runtime = recorder  # type: ignore[assignment]
_generators.new_generator = simulated_random.Generator
_graph.PLAIN_TYPES += (simulated.Sim,)

__all__ = ["DEVICES", "batch", "books", "close", "loss", "recorder", "registry", "weights"]


def registry() -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return an empty table of programs, and a decorator that puts them there."""
    programs: dict[str, Callable[[list[int]], None]] = {}

    def program(fun: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
        programs[fun.__name__] = fun
        return fun

    return programs, program


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(fp.tree.map(lambda t: t.cpu(), found), wanted)


def loss(p: Any, x: Any, y: Any) -> Any:
    return ((x @ p["w"] + p["b"]).tanh() - y).square().mean()


def weights(requires_grad: bool = False) -> dict[str, torch.Tensor]:
    made = {"w": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    return {name: tensor.requires_grad_(requires_grad) for name, tensor in made.items()}


def batch(rows: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)
