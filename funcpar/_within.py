"""The gradient function within what pmap is given: under partial and wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from funcpar._grad import GradientFunction


def is_pmapped(fun: Any) -> bool:
    """Tell whether a function is what pmap returned, and no wrapper of it."""
    return getattr(fun, "__funcpar__", (None, None))[1] == id(fun)


def gradient_within(fun: Callable[..., Any]) -> tuple[GradientFunction | None, bool]:
    """Return the gradient function under partial and wraps, and whether code of the user wraps it."""
    wrapped = False
    while not isinstance(fun, GradientFunction):
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif hasattr(fun, "__wrapped__") and not is_pmapped(fun):
            fun, wrapped = fun.__wrapped__, True
        else:
            return None, False
    return fun, wrapped


def specs_of(call: str, gradient: GradientFunction, out_axes: Any) -> tuple[str, Any]:
    """Return what ``out_axes`` says of the value and of aux.

    Raises:
        ValueError: The value has a spec under which there is no one gradient.
    """
    value, aux = out_axes, out_axes
    if gradient.has_aux and isinstance(out_axes, tuple | list) and len(out_axes) == 2:
        value, aux = out_axes
    if gradient.has_aux and isinstance(value, tuple | list):
        raise ValueError(
            f"{call}: out_axes={out_axes!r} is like what {gradient.call} returns, and describes what the "
            f'function itself returns, (value, aux).\nGive each one spec, such as out_axes=("mean", "sum").'
        )
    if value not in ("auto", "mean", "sum"):
        raise ValueError(
            f"{call}: out_axes={out_axes!r} asks for a value that is neither a mean nor a sum over shards, "
            f'and {gradient.call} differentiates one number.\nGive "mean" or "sum" for the value.'
        )
    return ("mean" if value == "auto" else value), aux
