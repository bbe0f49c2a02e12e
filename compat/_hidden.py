"""What an object holds that is not taken apart: found by a bounded search through its references."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_MOST_SEARCHED = 10_000
# What holds nothing of a user, or all of a program.
_CLOSED = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.CodeType,
    types.BuiltinFunctionType, types.FrameType, torch.dtype, torch.device, torch.Size, torch.Generator,
)  # fmt: skip


class Original:
    """An object of the module itself, in the place of a replica's own one. No dataclass, so no container."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def loses_gradient(value: Any) -> bool:
    """Tell whether this is a tensor whose gradient ends in the replica. A parameter made there is its own."""
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and not (value.is_leaf and issubclass(type(value), nn.Parameter))
    )


def find(value: Any, is_wanted: Callable[[Any], bool]) -> str | None:
    """Return the code that reaches something wanted below an object, None if there is nothing."""
    seen = {id(value)}
    waiting = deque([("", value)])
    while waiting and len(seen) < _MOST_SEARCHED:
        path, one = waiting.popleft()
        for entry, child in _references(one):
            if isinstance(child, _CLOSED) or id(child) in seen:
                continue
            if is_wanted(child):
                return path + entry
            seen.add(id(child))
            waiting.append((path + entry, child))
    return None


def slots_of(value: Any) -> list[str]:
    """Return the names of the slots of an object that are filled."""
    names = []
    for cls in type(value).__mro__:
        given = cls.__dict__.get("__slots__", ())
        for name in (given,) if isinstance(given, str) else given:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)]


def _references(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (*_CLOSED, Tensor, Original)):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", child) for name, child in attributes.items())
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            yield from ((f".{name}", content) for content in gc.get_referents(cell))
        yield from ((".__defaults__", child) for child in value.__defaults__ or ())
        yield from ((f".{name}", child) for name, child in (value.__kwdefaults__ or {}).items())
        return
    if isinstance(value, functools.partial):
        yield from ((f".args[{k}]", child) for k, child in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", child) for key, child in value.keywords.items())
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{place}]", child) for place, child in enumerate(value))
    else:
        for name in slots_of(value):
            yield f".{name}", getattr(value, name)
    # Whatever is left: elements of a set, what an iterator goes over, keys.
    yield from (("", child) for child in gc.get_referents(value) if child is not attributes)
