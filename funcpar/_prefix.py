"""Tree prefixes: one value for a whole subtree, as in `in_axes`, spread over the leaves."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ._nodes import LEAF, MAX_LISTED, Kind, Spec, describe, kind_of, listing


def broadcast_prefix(
    prefix: Any, spec: Spec, root: str = "prefix", is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Return for every leaf of `spec` the value that a tree prefix gives it (internal).

    A prefix is the tree with subtrees replaced by one value each. None is a value in it. Lists fit tuples and
    tuples lists, a dict fits any mapping.

    Args:
        prefix: The prefix.
        spec: The structure to cover.
        root: What the user calls the prefix.
        is_leaf: Containers for which it is true are values.

    Raises:
        ValueError: The prefix does not fit; lists the places and what each of them has there.

    Example:
        >>> from funcpar.tree import flatten
        >>> broadcast_prefix((0, [None, 1]), flatten(({"x": 7, "y": 8}, (7, 8)))[1])
        [0, 0, None, 1]
    """
    broadcast = Broadcast(is_leaf)
    broadcast.visit(prefix, spec, root)
    if broadcast.errors:
        fix = "Give one value for a whole subtree, or the containers and keys of the tree itself."
        raise ValueError(f"{root} does not fit the tree:\n{listing(broadcast.errors)}\n{fix}")
    return broadcast.values


@dataclass(slots=True)
class Broadcast:
    """One pass over a prefix: gathers a value for every leaf, and what does not fit."""

    is_leaf: Callable[[Any], bool] | None = None
    values: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def visit(self, prefix: Any, spec: Spec, path: str) -> None:
        """Spread the part `prefix`, found at `path`, over the subtree `spec`."""
        kind = kind_of(type(prefix))
        if prefix is None or kind.style == "leaf" or (self.is_leaf is not None and self.is_leaf(prefix)):
            self.values.extend([prefix] * spec.num_leaves)
            return
        keys, values, _, _ = kind.take(prefix)
        names = _names(spec)
        same_type = kind.cls is spec.kind.cls
        if kind.style == "mapping" and _is_mapping(spec):
            given = dict(zip(keys, values, strict=True))
            self.errors.extend(_key_errors(list(given), names, path))
        elif len(values) == len(spec.children) and (same_type or _is_sequence(kind, spec)):
            given = dict(zip(names, values, strict=True))
        else:
            have = describe(Spec(kind, (), (LEAF,) * len(values), 0))
            self.errors.append(f"{path}: the prefix has {have}, the tree has {describe(spec)}")
            return
        for name, key, child in zip(names, spec.keys or names, spec.children, strict=True):
            if name in given:
                self.visit(given[name], child, path + spec.kind.entry(key))


def _is_sequence(kind: Kind, spec: Spec) -> bool:
    return kind.cls in (list, tuple) and issubclass(spec.kind.cls, (list, tuple))


def _is_mapping(spec: Spec) -> bool:
    return issubclass(spec.kind.cls, dict)


def _names(spec: Spec) -> list[Any]:
    """Return the keys of the children as users write them, which torch's registry wraps."""
    if spec.kind.style == "foreign":
        return [getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in spec.keys]
    return list(spec.keys or range(len(spec.children)))


def _key_errors(given: list[Any], names: list[Any], path: str) -> Iterator[str]:
    known, present = set(names), set(given)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), [str(name) for name in names], 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"{path}: the prefix has the key {key!r}, the tree has {_some(names)}{hint}"
    for name in names:
        if name not in present:
            yield f"{path}[{name!r}] is missing: the prefix has {_some(given)}, the tree has {_some(names)}"


def _some(keys: list[Any]) -> str:
    listed = ", ".join(repr(key) for key in keys[:MAX_LISTED]) or "no keys"
    return listed + (", ..." if len(keys) > MAX_LISTED else "")
