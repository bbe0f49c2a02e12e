"""Standstill: nothing is compiled while a shard runs, in any thread of the process.

Tracing is process-wide in torch: while one thread traces, a compiled function that another thread
calls raises or runs uncompiled, and calls of modules are patched. Every compilation of dynamo takes
one lock, so that lock is replaced by one that also waits until no shard runs, and keeps new ones from
starting. A shard that waits for others in an exchange, or to compile, does not run.

Shards of a call that is likely to compile take turns besides, one at a time in the whole process, so
that the others find what the first has compiled. A shard that waits for the others lets them run.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from funcpar import _random
from funcpar._errors import CollectiveTimeoutError, ShardAborted
from funcpar._isolation import owned_clone
from funcpar._limits import waiting_time
from funcpar._world import untraced


class _Here(threading.local):
    """This thread's part: how many shards it is in, one within the other, and what it holds."""

    depth = 0
    has_turn = False
    setting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


_here = _Here()


class _Standstill:
    """How many threads run shards, who compiles, and whose turn it is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.turn = _thread.allocate_lock()
        self.running = 0
        self.pending = 0
        self.owner: int | None = None
        self.depth = 0
        self.num_compiled = 0

    def start(self, joins: bool) -> None:
        """Count this thread in. It waits while something is compiled; one that joins a call, only then."""
        with self.lock:
            if self.owner is not None or (self.pending and not joins):
                self.changed.wait_for(lambda: self.owner is None and (joins or not self.pending))
            self.running += 1

    def end(self) -> None:
        with self.lock:
            self.running -= 1
            if self.pending:
                self.changed.notify_all()

    def halt(self) -> None:
        """Wait until no shard runs, and keep all from running."""
        inside = _here.depth > 0
        limit = waiting_time()
        with self.changed:
            self.pending += 1
            self.running -= inside
            self.changed.notify_all()
            try:
                if not self.changed.wait_for(lambda: self.owner is None and self.running == 0, limit):
                    raise CollectiveTimeoutError(
                        f"torch.compile: nothing is compiled while shards run, and {self.running} did not "
                        f"end within {limit:g} seconds.\nCall the compiled function once before, or let "
                        f"shards wait for each other in collectives only; FUNCPAR_TIMEOUT sets the limit."
                    )
                self.owner = _thread.get_ident()
            except BaseException:
                self.running += inside
                raise
            finally:
                self.pending -= 1
                self.changed.notify_all()

    def resume(self) -> None:
        """Let shards run again, first of all this thread if it is one."""
        with self.changed:
            self.owner = None
            self.running += _here.depth > 0
            self.num_compiled += 1
            self.changed.notify_all()


_state = _Standstill()


class Presence:
    """The shards of one call, as far as compilations have to know of them.

    Args:
        takes_turns: Whether only one of them, and of all others that take turns, runs at a time.
        waits: What one that waits for others does first, so that all have begun.
    """

    __slots__ = ("_started", "_waits", "failed", "takes_turns")

    def __init__(self, takes_turns: bool = False, waits: Callable[[], None] | None = None) -> None:
        self.takes_turns = takes_turns
        self._waits = waits
        self.failed = False
        self._started = False

    def enter(self) -> None:
        """Begin a shard in this thread, once nothing is being compiled.

        Raises:
            ShardAborted: One whose turn was before has failed; what cannot be compiled is tried once.
        """
        if _here.depth == 0:
            self._start()
            if self.failed and self.takes_turns:
                self._stop()
                raise ShardAborted("another shard failed")
        _here.depth += 1

    def leave(self) -> None:
        """End the shard."""
        _here.depth -= 1
        if _here.depth == 0:
            self._stop()

    def pause(self) -> None:
        """Stop running, to wait for other shards."""
        if self._waits is not None:
            self._waits()
        if _here.depth:
            self._stop()

    def go_on(self) -> None:
        """Run again."""
        if _here.depth:
            self._start()

    def _start(self) -> None:
        # Turns only keep two shards from compiling the same. Where shards wait for each other out of sight,
        # with a lock of the user's say, one goes on without.
        if self.takes_turns:
            _here.has_turn = _state.turn.acquire(timeout=waiting_time())
        try:
            _state.start(self._started)
        except BaseException:
            self._end_turn()
            raise
        self._started = True

    def _stop(self) -> None:
        _state.end()
        self._end_turn()

    def _end_turn(self) -> None:
        if _here.has_turn:
            _here.has_turn = False
            _state.turn.release()


class CompileLock:
    """The lock of every compilation in this process, in the place of dynamo's: reentrant, like it."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self._setting: Any = None
        self._stream: _random.Stream | None = None

    @untraced
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for a standstill. No compilation asks for less, so the arguments are not looked at."""
        if _state.owner == _thread.get_ident():
            _state.depth += 1
            return True
        _state.halt()
        try:
            # Who waited for it when it was replaced has it still.
            self.original.acquire()
            self._setting = _here.setting()
            self._setting.__enter__()
        except BaseException:
            _state.resume()
            raise
        _state.depth = 1
        # Dynamo saves the random state and sets it back, for which a shard's stream would have to be seeded.
        self._stream = _random.current()
        if self._stream is not None:
            _random.enter(_random.nobodys)
        return True

    @untraced
    def release(self) -> None:
        """End the standstill."""
        _state.depth -= 1
        if _state.depth == 0:
            _random.leave(self._stream)
            try:
                self._setting.__exit__(None, None, None)
            finally:
                self.original.release()
                _state.resume()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def num_compiled() -> int:
    """Return how often something was compiled since the lock was installed."""
    return _state.num_compiled


@contextlib.contextmanager
def compiling_under(setting: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Let what this thread compiles inside the block be compiled under a setting."""
    before, _here.setting = _here.setting, setting
    try:
        yield
    finally:
        _here.setting = before


def install() -> None:
    """Replace dynamo's lock, and keep dynamo out of this package, if dynamo is there; cheap to call again."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    lock = getattr(dynamo, "compile_lock", None)
    if lock is None or isinstance(lock, CompileLock):
        return
    with _install_lock:
        if isinstance(dynamo.compile_lock, CompileLock):
            return
        _keep_out()
        _count_outside_of_shards()
        sys.modules["torch._dynamo"].allow_in_graph(owned_clone)
        dynamo.compile_lock = CompileLock(lock)


def _keep_out() -> None:
    """Let dynamo trace nothing of this package, but for parts that a graph may contain."""
    rules: Any = sys.modules["torch._dynamo.trace_rules"]
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    for path in Path(__file__).parent.glob("*.py"):
        if path.stem not in _TRACED:
            rules.FORCE_SKIP_FILES.add(path.as_posix())
            continue
        for value in vars(sys.modules.get(f"{__package__}.{path.stem}", object)).values():
            for fun in vars(value).values() if isinstance(value, type) else (value,):
                # Called by what is not traced, it is not worth a graph of its own.
                if isinstance(fun, types.FunctionType) and fun.__code__.co_filename == str(path):
                    frames.skip_code(fun.__code__)


def _count_outside_of_shards() -> None:
    """Keep shards from a count of torch's, of frames under ``fullgraph=True``, that is one for the process.

    Two threads in such functions at once may leave it at 0, and then nothing behind a graph break is compiled
    any more in any thread; or one is told that it has compiled nothing. A thread without a shard counts.
    """
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    original = frames.set_fullgraph_compiled_frame_count

    def set_fullgraph_compiled_frame_count(count: int) -> int:
        return 0 if _here.depth else int(original(count))

    frames.set_fullgraph_compiled_frame_count = set_fullgraph_compiled_frame_count


# What a compiled function may call as part of its graph. All else here would be torn into pieces: it
# asks which thread it is in, and meets other shards.
_TRACED = (
    "tree", "_nodes", "_functional", "_isolation", "_grad", "_differentiate", "_graph", "_reduce", "_steps",
)  # fmt: skip
_install_lock = threading.Lock()


def _after_fork() -> None:
    # The parent's shards and compilations are not in the child.
    global _state, _here, _install_lock
    _state, _here, _install_lock = _Standstill(), _Here(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
