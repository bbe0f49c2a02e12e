"""Rebind what a module keeps in its attributes, so that nothing on a copy points back at the original."""

import argparse
import copy
import functools
import gc
import itertools
import logging
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), type(...), type, range,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip
CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))
_LEAVES = (type, types.ModuleType, logging.Logger, logging.Handler, random.Random, torch.fx.Graph, Tensor)
_COPIED_STDLIB = (types.SimpleNamespace, argparse.Namespace)
_MOST_OBJECTS = 100_000


class SlotNamespace:
    """The `__slots__` of an object, to be written like a dictionary."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self._owner, key, value)


Kept = tuple[dict[str, Any] | SlotNamespace, str, Any, str]


def slots_of(value: object) -> Iterator[str]:
    """Iterate over the names of an object's filled `__slots__`."""
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            mangled = f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                yield mangled


def is_plain(container: Any) -> bool:
    """Tell whether a container holds numbers, strings and the like only; fast, as vocabularies are long."""
    plain = PLAIN.issuperset(map(type, container))
    return plain and (not isinstance(container, dict) or PLAIN.issuperset(map(type, container.values())))


def rebind(kept: list[Kept], members: dict[int, Any]) -> None:
    """Put into each `(namespace, key, value, path)` the value with every member of the tree replaced.

    Args:
        kept: what modules hold; `path` is the code that reaches the value, for messages.
        members: from the `id` of a module, parameter or buffer of the tree to what stands for it.

    Raises:
        TypeError: a value that points into the tree cannot be rebuilt.
    """
    search = _Search(members)
    for _, _, value, path in kept:
        if type(value) in CONTAINERS:
            # What a forward appends or caches must not reach the user's module, nor another thread.
            search.stale.add(id(value))
        search.explore(value, path)
    search.spread()
    for namespace, key, value, _ in kept:
        namespace[key] = search.rebuilt(value)


class _Search:
    """Find the objects from which the tree can be reached, and make copies of them that reach the shells."""

    def __init__(self, members: dict[int, Any]) -> None:
        self.members = members
        self.seen: dict[int, tuple[Any, str]] = {}
        self.parents: dict[int, list[int]] = {}
        self.stale: set[int] = set()
        self.memo: dict[int, Any] = {}

    def explore(self, value: Any, path: str) -> None:
        """Note what refers to what, starting at one value."""
        stack = [(value, path)]
        while stack:
            value, path = stack.pop()
            key = id(value)
            if key in self.seen:
                continue
            if len(self.seen) > _MOST_OBJECTS:
                raise TypeError(
                    f"functionalize: {path} is one of more than {_MOST_OBJECTS:,} objects, too many to "
                    "search for references to the module.\nKeep them outside the module."
                )
            self.seen[key] = (value, path)
            if key in self.members:
                self.stale.add(key)
                continue
            for step, child in _children(value, path):
                self.parents.setdefault(id(child), []).append(key)
                stack.append((child, path + step))
            self._refuse_globals(value, path)

    def _refuse_globals(self, value: Any, path: str) -> None:
        if type(value) is not types.FunctionType:
            return
        for name in value.__code__.co_names:
            if isinstance(known := value.__globals__.get(name), nn.Module) and id(known) in self.members:
                raise TypeError(
                    f"functionalize: {path} reads the module through the global variable {name!r}, "
                    "which cannot be rebound.\nUse the module that the hook is given as its first argument."
                )

    def spread(self) -> None:
        """Mark everything from which something stale can be reached."""
        queue = list(self.stale)
        while queue:
            for parent in self.parents.get(queue.pop(), ()):
                if parent not in self.stale:
                    self.stale.add(parent)
                    queue.append(parent)

    def rebuilt(self, value: Any) -> Any:
        """Return a value that holds shells where it held members; itself where it held none."""
        key = id(value)
        if key in self.members:
            return self.members[key]
        if key not in self.stale:
            return value
        if key not in self.memo:
            self.memo[key] = self._rebuild(value)
        return self.memo[key]

    def _rebuild(self, value: Any) -> Any:
        for kind, rebuild in _REBUILDERS:
            if isinstance(value, kind):
                return rebuild(self, value)
        return self._rebuild_object(value)

    def _rebuild_dict(self, value: dict[Any, Any]) -> Any:
        new = self._blank(value)
        items = [(self.rebuilt(key), self.rebuilt(item)) for key, item in value.items()]
        new.clear()
        new.update(items)
        return new

    def _rebuild_list(self, value: Any) -> Any:
        new = self._blank(value)
        items = [self.rebuilt(item) for item in value]
        new.clear()
        new.update(items) if isinstance(new, set) else new.extend(items)
        return new

    def _blank(self, value: Any) -> Any:
        # A copy first, so that subclasses keep their factory, length or attributes.
        new = self.memo[id(value)] = copy.copy(value)
        if hasattr(value, "__dict__") and type(value) not in CONTAINERS:
            new.__dict__.update({name: self.rebuilt(item) for name, item in value.__dict__.items()})
        return new

    def _rebuild_tuple(self, value: tuple[Any, ...] | frozenset[Any]) -> Any:
        items = [self.rebuilt(item) for item in value]
        if hasattr(value, "_make"):
            return value._make(items)
        return type(value)(items)

    def _rebuild_method(self, value: types.MethodType) -> Any:
        return types.MethodType(self.rebuilt(value.__func__), self.rebuilt(value.__self__))

    def _rebuild_builtin(self, value: types.BuiltinFunctionType) -> Any:
        return getattr(self.rebuilt(value.__self__), value.__name__)

    def _rebuild_partial(self, value: functools.partial[Any]) -> Any:
        keywords = {name: self.rebuilt(item) for name, item in value.keywords.items()}
        return type(value)(self.rebuilt(value.func), *map(self.rebuilt, value.args), **keywords)

    def _rebuild_weakref(self, value: weakref.ref[Any]) -> Any:
        return weakref.ref(self.rebuilt(value()))

    def _rebuild_proxy(self, value: Any) -> Any:
        return weakref.proxy(self.rebuilt(_referent(value)))

    def _rebuild_function(self, value: types.FunctionType) -> Any:
        if hasattr(value, "_torchdynamo_orig_callable"):
            # Compiled code is bound to the original; its shell runs eagerly.
            return self.rebuilt(value._torchdynamo_orig_callable)
        cells = tuple(map(self._cell, value.__closure__ or ()))
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self.memo[id(value)] = new
        new.__defaults__ = value.__defaults__ and tuple(map(self.rebuilt, value.__defaults__))
        new.__kwdefaults__ = {name: self.rebuilt(item) for name, item in (value.__kwdefaults__ or {}).items()}
        new.__qualname__, new.__doc__, new.__module__ = value.__qualname__, value.__doc__, value.__module__
        new.__dict__.update({name: self.rebuilt(item) for name, item in value.__dict__.items()})
        for old, cell in zip(value.__closure__ or (), cells, strict=True):
            if cell is not old:
                cell.cell_contents = self.rebuilt(old.cell_contents)
        return new

    def _cell(self, cell: types.CellType) -> types.CellType:
        # Cells without a member stay shared, so that a hook's `nonlocal` counter still counts.
        if _is_empty(cell) or (id(cell.cell_contents) not in self.stale):
            return cell
        made: types.CellType = self.memo.setdefault(id(cell), types.CellType())
        return made

    def _rebuild_object(self, value: Any) -> Any:
        cls = type(value)
        root = cls.__module__.partition(".")[0]
        try:
            if root in sys.stdlib_module_names and not isinstance(value, _COPIED_STDLIB):
                raise TypeError(root)
            make: Any = cls.__new__ if isinstance(value, _COPIED_STDLIB) else object.__new__
            new = self.memo[id(value)] = make(cls)
        except TypeError:
            raise TypeError(
                f"functionalize: {self.seen[id(value)][1]} is a {cls.__module__}.{cls.__qualname__} that "
                "points back into the module and cannot be copied.\n"
                "Make it in forward instead of keeping it there."
            ) from None
        if hasattr(value, "__dict__"):
            new.__dict__.update({name: self.rebuilt(item) for name, item in value.__dict__.items()})
        for name in slots_of(value):
            object.__setattr__(new, name, self.rebuilt(getattr(value, name)))
        return new


_REBUILDERS: list[tuple[type | tuple[type, ...], Callable[[_Search, Any], Any]]] = [
    (weakref.ProxyTypes, _Search._rebuild_proxy),
    (dict, _Search._rebuild_dict),
    ((list, set, deque), _Search._rebuild_list),
    ((tuple, frozenset), _Search._rebuild_tuple),
    (types.MethodType, _Search._rebuild_method),
    (types.BuiltinMethodType, _Search._rebuild_builtin),
    (functools.partial, _Search._rebuild_partial),
    (weakref.ref, _Search._rebuild_weakref),
    (types.FunctionType, _Search._rebuild_function),
]


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _referent(proxy: Any) -> Any:
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Iterate over `(step, child)` of what an object refers to, without plain values."""
    # No isinstance before the class is known not to be a proxy's: a dead one raises.
    if type(value) in weakref.ProxyTypes:
        yield "", _referent(value)
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
        kinds = (nn.Module, Tensor, types.MethodType)
        yield from (("", item) for item in gc.get_referents(value) if isinstance(item, kinds))
    yield from ((f".{name}", getattr(value, name)) for name in slots_of(value))
    if hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in value.__dict__.items())


def _referred_by_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "_torchdynamo_orig_callable"):
        yield "", value._torchdynamo_orig_callable
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if not _is_empty(cell):
            yield f" (its {name!r})", cell.cell_contents
    yield from ((" (a default)", item) for item in value.__defaults__ or ())
    yield from ((" (a default)", item) for item in (value.__kwdefaults__ or {}).values())
    yield from ((f".{name}", item) for name, item in value.__dict__.items())
