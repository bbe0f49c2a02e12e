"""What pmap has asked of the gradient functions that a thread calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def handled(target: Any, handler: Handler | None) -> Iterator[None]:
    """Let a handler answer the calls of one gradient function in this thread."""
    before = asked.target, asked.handler
    asked.target, asked.handler = target, handler
    try:
        yield
    finally:
        asked.target, asked.handler = before


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect what gradient functions return in this thread: gradients, each with its leaf."""
    before, asked.seen = asked.seen, []
    try:
        yield asked.seen
    finally:
        asked.seen = before
