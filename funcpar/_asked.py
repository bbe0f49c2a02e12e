"""What pmap has asked of the gradient functions that a thread calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

# Given the gradient function, args and kwargs.
Handler: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Here(threading.local):
    """What pmap has asked of gradient functions that this thread calls."""

    target: Any = None
    handler: Handler | None = None
    seen: list[tuple[Tensor, Tensor]] | None = None


asked = _Here()


class handled:
    """Let a handler answer the calls of one gradient function in this thread, for a ``with`` block."""

    __slots__ = ("_before", "_now")

    def __init__(self, target: Any, handler: Handler | None) -> None:
        self._now = target, handler

    def __enter__(self) -> None:
        self._before = asked.target, asked.handler
        asked.target, asked.handler = self._now

    def __exit__(self, *_: object) -> None:
        asked.target, asked.handler = self._before


class recorded:
    """Collect what gradient functions return in this thread: gradients, each with its leaf."""

    __slots__ = ("_before",)

    def __enter__(self) -> list[tuple[Tensor, Tensor]]:
        seen: list[tuple[Tensor, Tensor]] = []
        self._before, asked.seen = asked.seen, seen
        return seen

    def __exit__(self, *_: object) -> None:
        asked.seen = self._before
