"""Memory that the last reference frees, without the cycle collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def settle() -> None:
    """Free what only cycles keep, and let later collections pass over what is here now.

    Torch's compiler, pytest and thousands of tests are a million objects: half a second a collection.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Let only the last reference to an object free it."""
    settle()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
