"""What a Python object refers to, as far as it may lead back to a module."""

import argparse
import copyreg
import functools
import gc
import itertools
import logging
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), type(...), type, range,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip
CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}
_BASES = (OrderedDict, defaultdict, dict, deque, list, set, object)
_THREADS = frozenset(("_thread", "threading", "queue", "_queue", "asyncio", "multiprocessing", "concurrent"))
_LEAVES = (type, types.ModuleType, logging.Logger, logging.Handler, random.Random, torch.fx.Graph, Tensor)


def slots_of(value: object) -> Iterator[str]:
    """Iterate over the names of an object's filled `__slots__`."""
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            mangled = f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                yield mangled


@functools.lru_cache(maxsize=1024)
def is_copyable(cls: type) -> bool:
    """Tell whether objects of a class are no more than their attributes and items, for all that it says.

    Not so are classes that say how to copy or finalise them, keep state in C, or make sure of their identity.
    """
    if cls in CONTAINERS or cls in NAMESPACES:
        return True
    foreign = str(cls.__module__).partition(".")[0] in _FOREIGN
    if foreign and not str(cls.__module__).startswith("torch.nn.modules."):
        return False
    base = next(kind for kind in _BASES if issubclass(cls, kind))
    names = len(copyreg._slotnames(cls))  # type: ignore[attr-defined]
    words = names + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return (
        all(getattr(cls, name) is getattr(base, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
        and not any(hasattr(cls, name) for name in ("__copy__", "__deepcopy__", "__del__"))
        and cls.__basicsize__ <= base.__basicsize__ + words * tuple.__itemsize__
    )


def is_guard(value: Any) -> bool:
    """Tell whether a value is a lock, a thread, a queue or the like: what holds it is made to be shared."""
    return str(type(value).__module__).partition(".")[0] in _THREADS


def is_plain(container: Any) -> bool:
    """Tell whether a container holds numbers, strings and the like only; fast, as vocabularies are long."""
    plain = PLAIN.issuperset(map(type, container))
    return plain and (not isinstance(container, dict) or PLAIN.issuperset(map(type, container.values())))


def is_empty(cell: types.CellType) -> bool:
    """Tell whether a closure's cell has nothing in it yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def referent(proxy: Any) -> Any:
    """Return what a weak proxy stands for, or None if it is gone."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Iterate over `(step, child)` of what an object refers to, without plain values."""
    # No isinstance before the class is known not to be a proxy's: a dead one raises.
    if type(value) in weakref.ProxyTypes:
        yield "", referent(value)
    elif type(value) in CONTAINERS and is_plain(value):
        return
    elif type(value) not in PLAIN and not isinstance(value, _LEAVES):
        yield from ((step, child) for step, child in _referred(value) if type(child) not in PLAIN)


def _referred(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        yield from _referred_by_function(value)
        return
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield ".__self__", value.__self__
        yield ".__func__", getattr(value, "__func__", None)
        return
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(
            ((".keys()", key), (f"[{key!r}]" if isinstance(key, str | int) else "[...]", item))
            for key, item in list(value.items())
        )
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", item) for item in value)
    elif not hasattr(value, "__dict__"):
        # A generator or iterator goes on where it is, so that what it runs over matters.
        kinds = object if hasattr(value, "__next__") else (nn.Module, Tensor, types.MethodType)
        yield from (("", item) for item in gc.get_referents(value) if isinstance(item, kinds))
    yield from ((f".{name}", getattr(value, name)) for name in slots_of(value))
    if hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in value.__dict__.items())


def _referred_by_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "_torchdynamo_orig_callable"):
        yield "", value._torchdynamo_orig_callable
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if not is_empty(cell):
            yield f" (its {name!r})", cell.cell_contents
    yield from ((" (a default)", item) for item in value.__defaults__ or ())
    yield from ((" (a default)", item) for item in (value.__kwdefaults__ or {}).values())
    yield from ((f".{name}", item) for name, item in value.__dict__.items())
