"""Whether the shards of a call are done sooner at the same time, or one after another in one thread.

Python code of several threads takes turns at the interpreter lock, and every turn costs a switch of
threads. Where a shard takes some tenths of a millisecond, that costs more than a second core gives. No
rule tells where: it depends on the function and on the machine, so it is measured. What the
shards compute is the same either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

# Calls that take longer, in seconds, are worth all cores.
_LONG = 0.004
# A way is tried in so many calls in a row, the first of which are slow; of the latest the fastest counts.
_TRIED = 8
_LATEST = 5
# Every so many calls the other way is tried again.
_AGAIN = 256
# So many kinds of calls are kept apart.
_MANY = 64


class Pace:
    """What was measured of calls of one kind."""

    __slots__ = ("_apart", "_backward", "_calls", "_together")

    def __init__(self) -> None:
        self._together: deque[float] = deque(maxlen=_LATEST)
        self._apart: deque[float] = deque(maxlen=_LATEST)
        self._calls = 0
        self._backward: Pace | None = None

    @property
    def backward(self) -> Pace:
        """Return the pace of the backward of such calls."""
        if self._backward is None:
            self._backward = Pace()
        return self._backward

    def is_together(self) -> bool:
        """Tell whether the shards of the next call should run at the same time."""
        number = self._calls
        self._calls += 1
        fastest = min(self._together, default=0.0)
        if number < _TRIED or fastest > _LONG:
            return True
        if number < 2 * _TRIED or len(self._apart) < _LATEST:
            return False
        together = fastest <= min(self._apart)
        return together if number % _AGAIN >= _TRIED else not together

    def took(self, together: bool, seconds: float) -> None:
        """Take note of a call."""
        (self._together if together else self._apart).append(seconds)


class Paces:
    """The paces of one function, by what tells its calls apart."""

    def __init__(self) -> None:
        self._paces: dict[Hashable, Pace] = {}

    def __getitem__(self, kind: Hashable) -> Pace:
        """Return the pace of one kind of calls."""
        pace = self._paces.get(kind)
        if pace is None:
            if len(self._paces) >= _MANY:
                self._paces.clear()
            pace = self._paces.setdefault(kind, Pace())
        return pace
