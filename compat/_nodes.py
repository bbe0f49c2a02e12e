"""Containers, one level at a time: what is taken apart, and how it goes back together."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import funcpar as fp
from compat._hidden import find, loses_gradient

ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Tensor,
     nn.Parameter, PackedSequence)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One container.

    Attributes:
        kind: Its type.
        keys: What tells its children apart: replicas must agree on them.
        entries: The code that reaches each child.
        children: The children.
        build: Makes such a container of other children.
        is_shared: Whether torch.nn.parallel hands it on as it is; so does this, unless it holds tensors.
    """

    kind: type
    keys: tuple[Any, ...]
    entries: tuple[str, ...]
    children: list[Any]
    build: Callable[[list[Any]], Any]
    is_shared: bool = False


def opened(value: Any) -> Node | None:
    """Return a container's node; None for everything that is not taken apart."""
    kind = type(value)
    if kind in ATOMS or isinstance(value, Tensor | torch.Size | PackedSequence | nn.Module | type):
        return None
    if isinstance(value, dict | UserDict):
        return _mapping(value, kind)
    if isinstance(value, list | tuple):
        return _sequence(value, kind)
    if dataclasses.is_dataclass(value):
        names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        fields = [getattr(value, name) for name in names]
        return Node(
            kind, names, tuple(f".{n}" for n in names), fields, lambda c: _with(value, names, c), True
        )
    leaves, spec = fp.tree.flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return None
    return Node(kind, (spec,), spec.paths(), leaves, lambda c: fp.tree.unflatten(spec, c), True)


def _mapping(value: Any, kind: type) -> Node:
    keys = tuple(value)
    build: Callable[[list[Any]], Any]
    if kind in (dict, OrderedDict):
        build = lambda children: kind(zip(keys, children, strict=True))
    else:
        build = lambda children: _filled(value, keys, children)
    return Node(kind, keys, tuple(f"[{key!r}]" for key in keys), [value[key] for key in keys], build)


def _sequence(value: Any, kind: type) -> Node:
    names = getattr(value, "_fields", None)
    build: Callable[[list[Any]], Any] = kind
    if names is not None and hasattr(value, "_make"):
        return Node(kind, tuple(names), tuple(f".{name}" for name in names), list(value), kind._make)  # type: ignore[attr-defined]
    places = tuple(range(len(value)))
    return Node(kind, places, tuple(f"[{k}]" for k in places), list(value), build)


def _filled(value: Any, keys: tuple[Any, ...], children: list[Any]) -> Any:
    # A copy, as nothing is known about the constructor of a subclass.
    new = copy.copy(value)
    for key, child in zip(keys, children, strict=True):
        new[key] = child
    return new


def _with(value: Any, names: tuple[str, ...], children: list[Any]) -> Any:
    new = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(new, name, child)
    return new


def rebuilt(value: Any, fun: Callable[[Any], Any]) -> Any:
    """Return such a tree with ``fun(leaf)`` in the place of every leaf."""
    if type(value) in ATOMS:
        return fun(value)
    node = opened(value)
    if node is None:
        return fun(value)
    children = [rebuilt(child, fun) for child in node.children]
    if node.is_shared and all(new is old for new, old in zip(children, node.children, strict=True)):
        return value
    return node.build(children)


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with the code that reaches it."""
    node = opened(value)
    if node is None:
        yield path, value
        return
    for entry, child in zip(node.entries, node.children, strict=True):
        yield from leaves_of(child, path + entry)


def has_tensors(value: Any) -> bool:
    """Tell whether a tree holds a tensor."""
    return any(isinstance(leaf, Tensor | PackedSequence) for _, leaf in leaves_of(value))


class _Place:
    """The mark of a tensor. No dataclass, which would be a container."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Sealed:
    """A packed sequence without its data. No dataclass either."""

    __slots__ = ("index", "rest")

    def __init__(self, index: int, rest: tuple[Any, ...]) -> None:
        self.index, self.rest = index, rest


def without_packed(value: Any) -> tuple[Any, list[Tensor]]:
    """Return a tree in which marks stand for packed sequences, and the data of those."""
    found: list[Tensor] = []

    def seal(leaf: Any) -> Any:
        if not isinstance(leaf, PackedSequence):
            return leaf
        found.append(leaf.data)
        return _Sealed(len(found) - 1, leaf[1:])

    return rebuilt(value, seal), found


def with_packed(value: Any, data: list[Tensor]) -> Any:
    """Put packed sequences back in the places of the marks."""
    return rebuilt(
        value,
        lambda leaf: PackedSequence(data[leaf.index], *leaf.rest) if isinstance(leaf, _Sealed) else leaf,
    )


def take_apart(value: Any, call: str) -> tuple[list[Tensor], Any]:
    """Return the tensors of a tree, and the tree with a mark in the place of each.

    Raises:
        TypeError: An object that is not taken apart holds a tensor with a gradient, which would be lost.
    """
    found: list[Tensor] = []

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
            return _Place(len(found) - 1)
        if isinstance(leaf, PackedSequence):
            return PackedSequence(mark(leaf.data), *leaf[1:])
        _refuse_hidden(leaf, call)
        return leaf

    return found, rebuilt(value, mark)


def put_together(skeleton: Any, tensors: list[Tensor]) -> Any:
    """Put tensors back in the places of the marks."""

    def unmark(leaf: Any) -> Any:
        if isinstance(leaf, _Place):
            return tensors[leaf.index]
        if isinstance(leaf, PackedSequence) and isinstance(leaf.data, _Place):
            return PackedSequence(tensors[leaf.data.index], *leaf[1:])
        return leaf

    return rebuilt(skeleton, unmark)


def hidden_gradient(leaf: Any) -> str | None:
    """Return the code that reaches a tensor with a gradient below an object that is no container."""
    return None if type(leaf) in ATOMS or isinstance(leaf, type) else find(leaf, loses_gradient)


def _refuse_hidden(leaf: Any, call: str) -> None:
    name = hidden_gradient(leaf)
    if name is not None:
        kind = type(leaf).__name__
        raise TypeError(
            f"{call}: a replica returned a {kind}, whose tensor {name or 'inside'} would lose its gradient.\n"
            f"Return its tensors in a tuple, dict or dataclass, or register {kind} with "
            f"torch.utils._pytree.register_pytree_node."
        )
