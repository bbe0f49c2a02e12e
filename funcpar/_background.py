"""Threads that other libraries run in the background: gloo's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

# Seconds. A core that has gone to sleep takes longer to wake up than a small sum takes on one machine.
_PATIENCE = 1e-3
_yield = getattr(os, "sched_yield", None)


@contextmanager
def in_background() -> Iterator[None]:
    """Let threads that are started in this block wait for a free core, and never take that of another.

    A thread of this process may hold a connection when gloo's own thread takes its core. Gloo's then asks
    for the connection without a pause until the kernel ends its turn, after 3 or 4 ms; where processes are
    as many as cores, that doubles the mean time of a small sum. A thread inherits its policy, and on
    Linux one of SCHED_BATCH takes no core from others (sched(7)). Elsewhere nothing is done.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # A sandbox may forbid it: then sums take longer.
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def stay_awake(work: Any) -> None:
    """Wait for work of gloo's without sleep, for a moment at most; whoever else wants the core goes first."""
    if _yield is None:
        return
    end = perf_counter() + _PATIENCE
    while not work.is_completed() and perf_counter() < end:
        _yield()
