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
import os
import threading
from collections.abc import Callable

from funcpar._errors import CollectiveTimeoutError, ShardAborted
from funcpar._limits import waiting_time


class _Here(threading.local):
    """This thread's part: how many shards it is in, one within the other, and what it holds."""

    depth = 0
    has_turn = False


here = _Here()


class Standstill:
    """Which threads run shards, who compiles, and whose turn it is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.turn = _thread.allocate_lock()
        self.running: set[int] = set()
        self.pending = 0
        self.owner: int | None = None
        self.depth = 0
        self.num_compiled = 0

    def start(self, joins: bool) -> None:
        """Count this thread in. It waits while something is compiled; one that joins a call, only then."""
        with self.lock:
            if self.owner is not None or (self.pending and not joins):
                self.changed.wait_for(lambda: self.owner is None and (joins or not self.pending))
            self.running.add(_thread.get_ident())

    def end(self) -> None:
        """Count it out."""
        with self.lock:
            self.running.discard(_thread.get_ident())
            if self.pending:
                self.changed.notify_all()

    def halt(self) -> None:
        """Wait until no shard runs, and keep all from running."""
        mine = self.running & {_thread.get_ident()}
        limit = waiting_time()
        with self.changed:
            self.pending += 1
            self.running -= mine
            self.changed.notify_all()
            try:
                if not self.changed.wait_for(lambda: self.owner is None and not self.running, limit):
                    raise CollectiveTimeoutError(
                        f"torch.compile: nothing is compiled while shards run, and {len(self.running)} did "
                        f"not end within {limit:g} seconds.\nCall the compiled function once before, or let "
                        f"shards wait for each other in collectives only; FUNCPAR_TIMEOUT sets the limit."
                    )
                self.owner = _thread.get_ident()
            except BaseException:
                self.running |= mine
                raise
            finally:
                self.pending -= 1
                self.changed.notify_all()

    def resume(self) -> None:
        """Let shards run again, first of all this thread if it is one."""
        with self.changed:
            self.owner = None
            if here.depth:
                self.running.add(_thread.get_ident())
            self.num_compiled += 1
            self.changed.notify_all()


state = Standstill()


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
        if here.depth == 0:
            self._start()
            if self.failed and self.takes_turns:
                self._stop()
                raise ShardAborted("another shard failed")
        here.depth += 1

    def leave(self) -> None:
        """End the shard."""
        here.depth -= 1
        if here.depth == 0:
            self._stop()

    def pause(self) -> None:
        """Stop running, to wait for other shards."""
        if self._waits is not None:
            self._waits()
        if here.depth:
            self._stop()

    def go_on(self) -> None:
        """Run again."""
        if here.depth:
            self._start()

    def _start(self) -> None:
        # Turns only keep two shards from compiling the same. Where shards wait for each other out of sight,
        # with a lock of the user's say, one goes on without.
        if self.takes_turns:
            here.has_turn = state.turn.acquire(timeout=waiting_time())
        try:
            state.start(self._started)
        except BaseException:
            _end_turn()
            raise
        self._started = True

    def _stop(self) -> None:
        state.end()
        _end_turn()


def _end_turn() -> None:
    if here.has_turn:
        here.has_turn = False
        state.turn.release()


def settle(depth: int) -> None:
    """Let this thread be as deep in shards as it was, should an interrupt have come in between."""
    here.depth = depth
    if depth:
        return
    if _thread.get_ident() in state.running:
        state.end()
    _end_turn()


def num_compiled() -> int:
    """Return how often something was compiled since the lock was installed."""
    return state.num_compiled


def _after_fork() -> None:
    # The parent's shards and compilations are not in the child.
    global state, here
    state, here = Standstill(), _Here()


os.register_at_fork(after_in_child=_after_fork)
