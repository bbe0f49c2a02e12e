"""Run a function in fresh processes that torch.distributed can join, as torchrun's workers; a file in one."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Children fork from a server that has imported torch once, so a process costs some 0.1 s; and torch's
# compiler, which optimizers import at their first step.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])


@dataclass(slots=True)
class Outcome:
    """How one process ended: what it returned, or the text of what it raised, or neither if it was killed."""

    value: Any = None
    error: str | None = None
    traceback: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


def free_port() -> int:
    """Return a port that nobody uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(fun: Callable[..., Any], size: int, *args: Any, timeout: float = 60, **env: str) -> list[Outcome]:
    """Call ``fun(*args)`` in ``size`` processes whose environment is that of torchrun's workers.

    Returns one outcome per rank. A process that is still there after ``timeout`` seconds is killed
    and the test fails.
    """
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        **env,
    }
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return _run(fun, args, ranks, timeout)


def _run(
    fun: Callable[..., Any], args: tuple[Any, ...], environments: list[dict[str, str]], timeout: float
) -> list[Outcome]:
    size = len(environments)
    outcomes = [Outcome() for _ in range(size)]
    processes, pipes = [], []
    for env in environments:
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_child, args=(fun, args, env, sender))
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    start = time.monotonic()
    try:
        _collect(outcomes, pipes, start, timeout)
        for process, outcome in zip(processes, outcomes, strict=True):
            process.join(max(0.1, start + timeout - time.monotonic()))
            outcome.exitcode = process.exitcode
        stuck = [rank for rank, outcome in enumerate(outcomes) if outcome.exitcode is None]
        assert not stuck, f"processes {stuck} of {size} are still there after {timeout} s: {outcomes}"
        return outcomes
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            if process.is_alive():
                process.kill()
            process.join(10)
            process.close()
            pipe.close()


def values(fun: Callable[..., Any], size: int, *args: Any, timeout: float = 60, **env: str) -> list[Any]:
    """Return what ``fun(*args)`` returns in every process; the test fails if any of them fails."""
    outcomes = run(fun, size, *args, timeout=timeout, **env)
    failed = [
        f"process {rank}: {outcome.traceback or outcome}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None or outcome.exitcode != 0
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def program(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a file, or "-m" and a module, in a fresh process, as ``python -W error words...`` would."""
    with tempfile.TemporaryDirectory() as folder:
        # One intra-op thread: on a busy machine torch's threads wait for each other longer than they work.
        (outcome,) = _run(
            _program, (words, folder, str(cwd or os.getcwd())), [{"OMP_NUM_THREADS": "1", **env}], 180
        )
        out, err = (Path(folder, name).read_text() for name in _STREAMS)
    status = outcome.exitcode if outcome.value is None else outcome.value
    return subprocess.CompletedProcess(
        words, status or int(outcome.error is not None), out, err + outcome.traceback
    )


_STREAMS = ("out", "err")


def _program(words: tuple[str, ...], folder: str, cwd: str) -> int:
    for number, name in enumerate(_STREAMS, 1):
        with open(Path(folder, name), "wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    warnings.simplefilter("error")
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:0] = ["-m", *words[2:]], [cwd]
            runpy._run_module_as_main(words[1])  # What python -m does.
        else:
            sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).parent)]
            runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return int(end.code or 0)
    finally:
        atexit._run_exitfuncs()  # Processes of multiprocessing do not.
        sys.stdout.flush()
        sys.stderr.flush()


def _collect(outcomes: list[Outcome], pipes: list[Connection], start: float, timeout: float) -> None:
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    while ranks:
        ready = wait(list(ranks), max(0.0, start + timeout - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            outcome = outcomes[ranks.pop(pipe)]
            outcome.seconds = time.monotonic() - start
            try:
                outcome.value, outcome.error, outcome.traceback = pickle.loads(pipe.recv_bytes())
            except EOFError:  # It was killed, or exited, before it could say anything.
                continue


def _child(fun: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], sender: Connection) -> None:
    os.environ.update(env)
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    try:
        message = (fun(*args), None, "")
    except BaseException as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        message = (None, f"{type(error).__name__}: {error}{notes}", traceback.format_exc())
    # As bytes: torch teaches multiprocessing's own pickler to share the memory of tensors, which ends here.
    sender.send_bytes(pickle.dumps(message))
    sender.close()
