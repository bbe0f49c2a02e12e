"""What is replaced in dynamo, so that shards of one process can run what it compiles.

Its lock, which every compilation takes, becomes one that waits for a standstill, see ``_standstill``. It
is kept from taking this package to pieces, and from a count that threads would spoil for each other.
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

from funcpar import _random, _standstill
from funcpar._isolation import owned_clone
from funcpar._world import untraced


class _Here(threading.local):
    """What this thread compiles under."""

    setting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


_here = _Here()


class CompileLock:
    """The lock of every compilation in this process, in the place of dynamo's: reentrant, like it."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self._setting: Any = None
        self._stream: _random.Stream | None = None

    @untraced
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for a standstill. No compilation asks for less, so the arguments are not looked at."""
        if _standstill.state.owner == _thread.get_ident():
            _standstill.state.depth += 1
            return True
        _standstill.state.halt()
        try:
            # Who waited for it when it was replaced has it still.
            self.original.acquire()
            self._setting = _here.setting()
            self._setting.__enter__()
        except BaseException:
            _standstill.state.resume()
            raise
        _standstill.state.depth = 1
        # Dynamo saves the random state and sets it back, for which a shard's stream would have to be seeded.
        self._stream = _random.current()
        if self._stream is not None:
            _random.enter(_random.nobodys)
        return True

    @untraced
    def release(self) -> None:
        """End the standstill."""
        _standstill.state.depth -= 1
        if _standstill.state.depth == 0:
            _random.leave(self._stream)
            try:
                self._setting.__exit__(None, None, None)
            finally:
                self.original.release()
                _standstill.state.resume()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


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
        return 0 if _standstill.here.depth else int(original(count))

    frames.set_fullgraph_compiled_frame_count = set_fullgraph_compiled_frame_count


# What a compiled function may call as part of its graph. All else here would be torn into pieces: it
# asks which thread it is in, and meets other shards.
_TRACED = (
    "tree", "_nodes", "_functional", "_isolation", "_grad", "_differentiate", "_graph", "_reduce", "_steps",
)  # fmt: skip
_install_lock = threading.Lock()


def _after_fork() -> None:
    # The parent's threads are not in the child.
    global _here, _install_lock
    _here, _install_lock = _Here(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
