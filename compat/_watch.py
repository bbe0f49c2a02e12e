"""What a forward leaves behind on its module: found on the replica, put on the original."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compat._hidden import Original, find, loses_gradient, slots_of
from compat._nodes import ATOMS, opened
from compat._writes import MISSING, Change, Writes

_BASE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(key for key, value in nn.Module().__dict__.items() if type(value) is OrderedDict)
# A recurrent layer lists its weights anew for every tensor that stands for one.
_REFRESHED = frozenset(("_flat_weights", "_flat_weight_refs"))
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_PLAIN = (bool, int, float, complex, str, bytes)
_MOST_PAIRS = 10_000


@dataclass(frozen=True, slots=True)
class _Pair:
    """One object of the original, the replica's own copy of it, and what that held before."""

    original: Any
    copy: Any
    held: Any


class _LostError(Exception):
    """A value refers to the replica, and would do so on the original."""


class Watch:
    """A replica before its forward, beside its original.

    Args:
        module: The replica.
        original: The module it was made from.
        is_only: Whether no other replica of the module runs.
    """

    def __init__(self, module: nn.Module, original: nn.Module, is_only: bool) -> None:
        self._is_only = is_only
        self._known: dict[int, Any] = {}
        self._params: list[tuple[str, Tensor, Tensor, bool, int | None]] = []
        self._modules: list[tuple[str, nn.Module, nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = []
        self._pairs: dict[tuple[str, str], list[_Pair]] = {}
        originals = dict(original.named_modules())
        for name, m in module.named_modules():
            own = originals.get(name) or original.get_submodule(name)
            self._known[id(m)] = own
            entries = m.__dict__
            tables = {key: dict(entries[key]) for key in _TABLES if entries.get(key)}
            self._modules.append((name, m, own, m.__dict__.copy(), tables))
            for key, p in m._parameters.items():
                source = own._parameters[key]
                if p is not None and source is not None and id(p) not in self._known:
                    self._known[id(p)] = source
                    path = f"{name}.{key}" if name else key
                    self._params.append((path, p, source, p.requires_grad, _address(p)))
        for name, _, own, before, _ in self._modules:
            for key, value in before.items():
                if type(value) in ATOMS or type(value) is tuple or key in _BASE:
                    continue
                if pairs := list(self._paired(own.__dict__.get(key), value)):
                    self._pairs[name, key] = pairs

    def writes(self) -> Writes:
        """Return what has been written since.

        Raises:
            ValueError: A parameter or a submodule was made or replaced, which would be another one in
                every replica, or several replicas gave a parameter other data.
        """
        found = Writes()
        self._add_params(found)
        for name, m, own, before, tables in self._modules:
            prefix = f"{name}." if name else ""
            self._add_tables(found, prefix, m, own, tables)
            self._add_attributes(found, name, m, own, before)
        return found

    def _paired(self, original: Any, copied: Any) -> Iterator[_Pair]:
        waiting = [(original, copied)]
        while waiting and len(self._known) < _MOST_PAIRS:
            one, other = waiting.pop()
            if one is other or type(one) is not type(other) or id(other) in self._known:
                continue
            held = _held(other)
            if held is None:
                continue
            self._known[id(other)] = one
            yield _Pair(one, other, held)
            theirs = _held(one)
            if isinstance(held, dict):
                waiting += [(theirs[key], child) for key, child in held.items() if key in theirs]
            elif not isinstance(one, set):
                waiting += list(zip(theirs, held, strict=False))

    def _add_params(self, found: Writes) -> None:
        moved = []
        for name, p, source, requires_grad, address in self._params:
            if p.requires_grad != requires_grad:
                found.kept.append(f"{name}.requires_grad")
                found.changes.append(Change(Original(source), "requires_grad", {"flag": p.requires_grad}))
            if _address(p) != address and not _same_values(p, source):
                moved.append(name)
                found.changes.append(Change(Original(source), "data", {"data": p.detach()}))
        if moved and not self._is_only:
            raise ValueError(
                f"forward gives {', '.join(moved)} other data, and every replica does, each its own.\n"
                f"Write to parameters outside of forward, or keep what changes there in buffers."
            )
        found.kept.extend(moved)

    def _add_tables(
        self, found: Writes, prefix: str, m: nn.Module, own: nn.Module, tables: dict[str, dict[str, Any]]
    ) -> None:
        made: list[str] = []
        for table in ("_parameters", "_modules"):
            changed = _changed_entries(tables.get(table, {}), m.__dict__[table])
            made += [k for k, v in changed.items() if isinstance(v, Tensor | nn.Module)
                     and id(v) not in self._known]  # fmt: skip
            if changed:
                entries = {k: Original(self._known.get(id(v), v)) for k, v in changed.items()}
                found.changes.append(Change(Original(own.__dict__[table]), "entries", entries))
                found.kept.extend(prefix + key for key in changed)
        if made:
            raise ValueError(
                f"forward makes or replaces {', '.join(prefix + key for key in made)}, which would be "
                f"another one in every replica and lost afterwards.\n"
                f"Make parameters and submodules in __init__, or call the module once before it is wrapped."
            )
        known = tables.get("_buffers", {})
        fresh = {k: b for k, b in m._buffers.items() if b is not None and known.get(k) is None}
        if fresh:
            contents = {k: (b.detach(), k not in m._non_persistent_buffers_set) for k, b in fresh.items()}
            found.changes.append(Change(Original(own), "buffers", contents))
            found.kept.extend(prefix + key for key in fresh)
        for key in _HOOKS:
            if (key in tables or m.__dict__.get(key)) and _changed_entries(
                tables.get(key, {}), m.__dict__.get(key) or {}
            ):
                found.lost.append(prefix + key)

    def _add_attributes(
        self, found: Writes, name: str, m: nn.Module, own: nn.Module, before: dict[str, Any]
    ) -> None:
        new: dict[str, Any] = {}
        for key in (*m.__dict__, *(key for key in before if key not in m.__dict__)):
            is_same = before.get(key, MISSING) is m.__dict__.get(key, MISSING)
            if (is_same and (name, key) not in self._pairs) or key in _BASE:
                continue
            if key in _REFRESHED or _is_computed(m, key):
                continue
            path = f"{name}.{key}" if name else key
            value = m.__dict__.get(key, MISSING)
            changes: list[Change] = []
            try:
                is_written = not _equal(before.get(key, MISSING), value)
                if is_written:
                    new[key] = self._translated(value)
                changes += [change for pair in self._pairs.get((name, key), ())
                            if (change := self._change_of(pair)) is not None]  # fmt: skip
            except _LostError:
                new.pop(key, None)
                found.lost.append(path)
                continue
            if is_written or changes:
                found.kept.append(path)
                found.changes.extend(changes)
        if new:
            found.changes.append(Change(Original(own), "attributes", new))

    def _change_of(self, pair: _Pair) -> Change | None:
        now = _held(pair.copy)
        if isinstance(now, dict):
            changed = _changed_entries(pair.held, now)
            if not changed:
                return None
            is_dict = isinstance(pair.copy, dict)
            contents = {key: self._translated(v) for key, v in (now if is_dict else changed).items()}
            return Change(Original(pair.original), "items" if is_dict else "attributes", contents)
        if len(now) == len(pair.held) and all(map(_equal, pair.held, now)):
            return None
        return Change(Original(pair.original), "items", [self._translated(item) for item in now])

    def _translated(self, value: Any) -> Any:
        """Return a value with originals for all that is the replica's own."""
        if value is MISSING:
            return Original(MISSING)
        if id(value) in self._known:
            return Original(self._known[id(value)])
        node = opened(value)
        if node is not None:
            children = [self._translated(child) for child in node.children]
            is_same = all(new is old for new, old in zip(children, node.children, strict=True))
            return value if is_same else node.build(children)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._known:
            return Original(types.MethodType(value.__func__, self._known[id(value.__self__)]))
        if type(value) not in ATOMS and not isinstance(value, Tensor):
            is_own = lambda one: id(one) in self._known or loses_gradient(one)
            if isinstance(value, nn.Module) or find(value, is_own) is not None:
                raise _LostError
        return value


def _held(value: Any) -> Any:
    """Return what a container or an object of somebody's class holds; None for all else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | set | deque):
        return list(value)
    if isinstance(value, nn.Module | Tensor | type | tuple | types.FunctionType | types.MethodType):
        return None
    attributes = getattr(value, "__dict__", None)
    slots = slots_of(value)
    if not isinstance(attributes, dict) and not slots:
        return None
    return {**(attributes or {}), **{name: getattr(value, name) for name in slots}}


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _changed_entries(before: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries that are new or others, and marks of those that are gone."""
    if not before and not now:
        return {}
    changed = {key: v for key, v in now.items() if not _equal(before.get(key, MISSING), v)}
    return changed | {key: MISSING for key in before if key not in now}


def _is_computed(m: nn.Module, key: str) -> bool:
    """Tell whether an attribute is the weight that an old-style weight or spectral norm computes."""
    return f"{key}_orig" in m._parameters or f"{key}_g" in m._parameters


def _address(param: Tensor) -> int | None:
    try:
        return param.data_ptr()
    except RuntimeError:  # There is none under a transform.
        return None


def _same_values(one: Tensor, other: Tensor) -> bool:
    with torch.no_grad():
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
