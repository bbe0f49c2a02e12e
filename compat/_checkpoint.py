"""Reentrant checkpoints in a wrapper's forward: what is computed again is computed with the stand-ins too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias

from torch.utils import checkpoint

Stage: TypeAlias = Callable[[], AbstractContextManager[None]]
# How the running forward of a wrapper puts its stand-ins in place.
stage: ContextVar[Stage | None] = ContextVar("stage", default=None)

_function: Any = checkpoint.CheckpointFunction
_plain = _function.forward


@functools.wraps(_plain)
def _forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    staged = stage.get()
    if staged is None:
        return _plain(ctx, run_function, preserve_rng_state, *args)

    @functools.wraps(run_function)
    def again(*inputs: Any) -> Any:
        with staged():
            return run_function(*inputs)

    return _plain(ctx, again, preserve_rng_state, *args)


_function.forward = staticmethod(_forward)
