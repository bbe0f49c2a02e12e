"""Somebody who looks whether what runs comes to an end, and does something if it does not."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds that it takes at least, and twice that at most, until something is done.
_PATIENCE = 0.01
# So many times nothing ran when it was looked at: then nobody looks until something does.
_QUIET = 50


class Watch:
    """A thread that looks after ``with watched(rescue)`` blocks, from the first of them on."""

    def __init__(self) -> None:
        self.running: set[watched] = set()
        self.is_needed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Look, from now on."""
        self.is_needed.set()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="funcpar-watch", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        before: set[watched] = set()
        num_quiet = 0
        while True:
            self.is_needed.wait()
            time.sleep(_PATIENCE)
            now = self.running.copy()
            for each in before & now:
                with contextlib.suppress(Exception):  # No thread could be started, say: it is tried again.
                    each.rescue()
            before = now
            num_quiet = 0 if now else num_quiet + 1
            if num_quiet >= _QUIET:
                self.is_needed.clear()
                if self.running:  # It began before it could see that.
                    self.is_needed.set()


_watch = Watch()


def _after_fork() -> None:
    # The parent's threads are not in the child.
    global _watch
    _watch = Watch()


os.register_at_fork(after_in_child=_after_fork)


class watched:
    """Let another thread call ``rescue``, again and again, while a ``with`` block takes too long."""

    __slots__ = ("_watch", "rescue")

    def __init__(self, rescue: Callable[[], Any]) -> None:
        self.rescue = rescue
        self._watch = _watch

    def __enter__(self) -> None:
        self._watch.running.add(self)
        if not self._watch.is_needed.is_set():
            self._watch.wake()

    def __exit__(self, *_: object) -> None:
        self._watch.running.discard(self)
