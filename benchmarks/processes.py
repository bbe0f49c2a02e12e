"""Processes: a contender lives in its own, and runs steps when it is told to.

All contenders of a comparison exist at the same time, and wait for messages while others have their
turn. What one sets or leaves behind, as threads, JAX's runtime or the C library's memory, stays with it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import Contender, Place, Step
from benchmarks.measure import Cost, timed
from benchmarks.models import Model

LIMIT_S = 300
WARM_STEPS = 2

# Processes fork from a server that has started nothing, but imported torch and, since DDP and functional
# transforms want it sooner or later, its compiler: that takes seconds of processor time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
CAN_MEASURE_MEMORY = _CLEAR.exists()  # On Linux.
_NETWORK = Path("/proc/net/dev")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one process hands to other processes in a step.

    Attributes:
        collective: Bytes that it brings to collectives of torch.distributed, as the profiler saw them.
        loopback: Bytes that went over the loopback interface, of all processes on the machine, in a step.
    """

    collective: float
    loopback: float


class Team:
    """The processes of one contender: one, or one per device."""

    def __init__(self, contender: Contender, model: Model, devices: int) -> None:
        self.name = contender.name
        size = devices if contender.per_device else 1
        self._barrier = barrier = _CONTEXT.Barrier(size)  # Kept: processes look it up by name as they start.
        common = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
            # One process compiles, at its first step: workers would be left to compete with the rest.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            pipe, theirs = _CONTEXT.Pipe()
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (theirs, barrier, contender, model, Place(devices, rank), env)
            process = _CONTEXT.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, count: int) -> list[Cost]:
        """Run that many steps in all processes at once, after one that does not count.

        Returns the mean over processes of the seconds of each step, and sums of the rest.
        """
        return [
            Cost(
                statistics.fmean(each.seconds for each in step),
                sum(each.work for each in step),
                sum(each.faults for each in step),
            )
            for step in zip(*self.ask("run", count), strict=True)
        ]

    def ask(self, verb: str, *args: Any) -> list[Any]:
        """Let every process call a method of :class:`_Host`, and return what each returned."""
        for pipe in self._pipes:
            pipe.send((verb, args))
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(LIMIT_S):
            raise TimeoutError(f"{self.name}: process {rank} did not answer within {LIMIT_S} seconds")
        try:
            value, error = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{self.name}: process {rank} ended") from None
        if error is not None:
            raise RuntimeError(f"{self.name}: process {rank} failed:\n{error}")
        return value

    def close(self) -> None:
        """Let the processes end, which closes their connections to each other, and end those that do not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()


@contextlib.contextmanager
def teams(contenders: list[Contender], model: Model, devices: int) -> Iterator[dict[str, Team]]:
    """Start the processes of all contenders, and end them all."""
    with contextlib.ExitStack() as stack:
        found = {}
        for contender in contenders:
            found[contender.name] = Team(contender, model, devices)
            stack.callback(found[contender.name].close)
        yield found


class _Host:
    """A contender in its process. Public methods are what a team can ask for."""

    def __init__(self, barrier: Barrier, step: Step, size_before: int) -> None:
        self._barrier = barrier
        self._step = step
        self._size_before = size_before

    def run(self, count: int) -> list[Cost]:
        """Return what each of so many steps took."""
        self._barrier.wait(LIMIT_S)
        return timed(self._step)(count)

    def result(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients of one step as tensors."""
        loss, grads = self._step()
        return _tensor(loss), [_tensor(grad) for grad in grads]

    def peak(self, count: int) -> int:
        """Return the most bytes that were resident in so many steps, over those before anything was built."""
        for _ in range(WARM_STEPS):
            self._step()
        _CLEAR.write_text("5")  # The peak is now what is resident now.
        for _ in range(count):
            self._step()
        return _resident("VmHWM") - self._size_before

    def traffic(self, count: int) -> Traffic:
        """Return what so many steps sent, per step."""
        self._step()
        self._barrier.wait(LIMIT_S)
        before = _loopback_bytes()
        for _ in range(count):
            self._step()
        self._barrier.wait(LIMIT_S)
        after = _loopback_bytes()
        return Traffic(_collective_bytes(self._step, count) / count, (after - before) / count)


def _serve(
    pipe: Connection, barrier: Barrier, contender: Contender, model: Model, place: Place, env: dict[str, str]
) -> None:
    """Do as the messages say, until one of them is None or nobody is left to send any."""
    os.environ.update(env)
    host = None
    with contextlib.suppress(EOFError):
        while (message := pipe.recv()) is not None:
            verb, args = message
            answer: tuple[Any, str | None]
            try:
                if host is None:
                    size = _resident("VmRSS")
                    host = _Host(barrier, contender.make(model, place), size)
                answer = (getattr(host, verb)(*args), None)
            except Exception:
                answer = (None, traceback.format_exc())
            pipe.send(answer)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _resident(field: str) -> int:
    """Return a size from the system's record of this process, in bytes; 0 where there is none."""
    if not _STATUS.exists():
        return 0
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def _loopback_bytes() -> int:
    lines = _NETWORK.read_text().splitlines() if _NETWORK.exists() else []
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def _collective_bytes(step: Step, count: int) -> float:
    """Return the bytes of what the profiler shows as inputs of gloo's operations."""
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _ in range(count):
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return sum(
        float(np.prod(dims)) * _ENTRY_BYTES[kind]
        for event in events
        if event.get("name", "").startswith("gloo:")
        for dims, kind in zip(event["args"]["Input Dims"], event["args"]["Input type"], strict=True)
        if kind in _ENTRY_BYTES
    )


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what native code prints: the profiler tells of its start and its end."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# What the profiler calls C++ types, and the size of one entry.
_ENTRY_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long": 8, "long int": 8, "int": 4,
    "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
