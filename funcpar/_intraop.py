"""The number of threads that one op takes, set for the ops of one thread alone.

``torch.set_num_threads`` sets what OpenMP and MKL give the thread that calls it, and besides what every
thread that is started later begins with. Only the former is done here, by the same two functions, in
the libraries that torch itself uses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

Setter: TypeAlias = Callable[[int], Any]


@functools.cache
def _setters() -> tuple[Setter, Setter] | None:
    """Return what sets OpenMP's number for this thread, and MKL's, which returns the one before; or None."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        path = next(path for path in folder.iterdir() if path.stem in ("libtorch_cpu", "torch_cpu"))
        library = ctypes.PyDLL(str(path))  # Its symbols and those of what it was linked to.
        openmp: Setter = library.omp_set_num_threads
    except (OSError, AttributeError, StopIteration):
        return None
    before = torch.get_num_threads()
    openmp(before + 1)
    is_torchs_own = torch.get_num_threads() == before + 1
    openmp(before)
    return (openmp, getattr(library, "MKL_Set_Num_Threads_Local", lambda count: 0)) if is_torchs_own else None


def can_take(count: int) -> bool:
    """Tell whether ops of this thread can be given so many threads, and no other thread's."""
    return torch.get_num_threads() == count or _setters() is not None


class taking:
    """Let ops of this thread take so many threads for a ``with`` block; see :func:`can_take`.

    It may be left twice: Ctrl-C may come as it is entered or left.
    """

    __slots__ = ("_count", "_mkl", "_openmp")

    def __init__(self, count: int) -> None:
        self._count = count
        self._openmp: int | None = None
        self._mkl: int | None = None

    def __enter__(self) -> None:
        self._openmp = torch.get_num_threads()
        if self._openmp != self._count and (setters := _setters()) is not None:
            setters[0](self._count)
            self._mkl = setters[1](self._count)

    def __exit__(self, *_: object) -> None:
        if self._openmp is None or (setters := _setters()) is None:
            return
        # Where nothing was set here, the block itself may have set a number.
        if self._mkl is not None or torch.get_num_threads() != self._openmp:
            setters[0](self._openmp)
            # Torch gives both the same number.
            setters[1](self._openmp if self._mkl is None else self._mkl)
