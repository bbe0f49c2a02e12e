"""Rebind what a module keeps in its attributes, so that nothing on a copy points back at the original."""

import copy
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from funcpar._references import (
    CONTAINERS,
    NAMESPACES,
    children,
    is_copyable,
    is_empty,
    is_guard,
    is_plain,
    referent,
    slots_of,
)

_MOST_OBJECTS = 100_000
# To copy is to recurse; an object deeper than this in others stays shared.
_DEEPEST = 20


class SlotNamespace:
    """The `__slots__` of an object, to be written like a dictionary."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self._owner, key, value)


class Kept(NamedTuple):
    """A value that a module holds, and where on its shell the copy belongs."""

    namespace: dict[str, Any] | SlotNamespace
    key: str
    value: Any
    path: str
    is_hooks: bool


def rebind(kept: list[Kept], members: dict[int, Any]) -> dict[str, Tensor]:
    """Put a copy of each value in its place, in which every member of the tree is replaced.

    Copied are the containers and plain objects that a forward reaches through attributes and may write to,
    and whatever leads to a member or to one of those. The rest stays shared, as does what hooks hold.

    Args:
        kept: what modules hold; `path` is the code that reaches the value, for messages.
        members: from the `id` of a module, parameter or buffer of the tree to what stands for it.

    Returns:
        The tensors that stay shared, by path.

    Raises:
        TypeError: a value that points into the tree cannot be rebuilt.
    """
    search = _Search(members)
    for one in kept:
        search.explore(one.value, one.path)
    search.spread(object)
    search.claim(kept)
    search.spread(_TRANSPARENT)
    for one in kept:
        one.namespace[one.key] = search.rebuilt(one.value)
    return search.tensors


class _Search:
    """Find the objects from which the tree can be reached, and make copies of them that reach the shells."""

    def __init__(self, members: dict[int, Any]) -> None:
        self.members = members
        self.seen: dict[int, tuple[Any, str]] = {}
        self.parents: dict[int, list[int]] = {}
        self.stale: set[int] = set()
        self.tensors: dict[str, Tensor] = {}
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
            for step, child in children(value, path):
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

    def claim(self, kept: list[Kept]) -> None:
        """Mark what a forward may write to, and no other thread should see."""
        self.stale.update(id(one.value) for one in kept if one.is_hooks)
        level = {id(one.value): one.value for one in kept if not one.is_hooks}
        done = set(self.members)
        for _ in range(_DEEPEST):
            below: dict[int, Any] = {}
            for key in level.keys() - done:
                value = level[key]
                kind: Any = type(value)
                # No isinstance: a dead proxy raises.
                if issubclass(kind, Tensor):
                    self.tensors[self.seen[key][1]] = value
                if not (is_copyable(kind) or issubclass(kind, tuple)):
                    continue
                inner = {id(child): child for _, child in children(value, "")}
                if not issubclass(kind, tuple):
                    if kind not in CONTAINERS and any(map(is_guard, inner.values())):
                        continue
                    self.stale.add(key)
                below |= inner
            done |= level.keys()
            level = below

    def spread(self, kinds: type | tuple[Any, ...]) -> None:
        """Mark everything of some kinds from which something stale can be reached."""
        queue = list(self.stale)
        while queue:
            for parent in self.parents.get(queue.pop(), ()):
                if parent not in self.stale and isinstance(self.seen[parent][0], kinds):
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
        if is_plain(value):
            return new
        items = [(self.rebuilt(key), self.rebuilt(item)) for key, item in value.items()]
        new.clear()
        new.update(items)
        return new

    def _rebuild_list(self, value: Any) -> Any:
        new = self._blank(value)
        if is_plain(value):
            return new
        items = [self.rebuilt(item) for item in value]
        new.clear()
        new.update(items) if isinstance(new, set) else new.extend(items)
        return new

    def _blank(self, value: Any) -> Any:
        # A copy first, so that subclasses keep their factory, length or attributes.
        new = self.memo[id(value)] = value.copy() if type(value) in CONTAINERS else copy.copy(value)
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
        return weakref.proxy(self.rebuilt(referent(value)))

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
        if is_empty(cell) or (id(cell.cell_contents) not in self.stale):
            return cell
        made: types.CellType = self.memo.setdefault(id(cell), types.CellType())
        return made

    def _rebuild_object(self, value: Any) -> Any:
        cls = type(value)
        root = cls.__module__.partition(".")[0]
        try:
            if root in sys.stdlib_module_names and not isinstance(value, NAMESPACES):
                raise TypeError(root)
            make: Any = cls.__new__ if isinstance(value, NAMESPACES) else object.__new__
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
# Copied also where they lead only to what a forward may write to; lists in a hook's closure are not.
_TRANSPARENT = (
    *weakref.ProxyTypes, weakref.ref, tuple, frozenset, functools.partial,
    types.MethodType, types.BuiltinMethodType, types.FunctionType,
)  # fmt: skip


def refuse_globals(kinds: Iterable[type[nn.Module]], members: dict[int, Any]) -> None:
    """Refuse a forward that reads its own module tree through a global variable: it would miss the shell."""
    for kind in kinds:
        forward = kind.forward
        if not isinstance(forward, types.FunctionType) or kind.__module__.startswith("torch.nn."):
            continue
        for name in forward.__code__.co_names:
            known = forward.__globals__.get(name)
            if isinstance(known, nn.Module) and id(known) in members:
                raise TypeError(
                    f"functionalize: {kind.__qualname__}.forward reads the module through the global "
                    f"variable {name!r}, which cannot be rebound.\nUse self instead."
                )
