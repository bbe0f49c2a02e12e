"""Pytrees: nested containers taken apart into a list of leaves and put back together.

Nodes are None (without leaves), dict, OrderedDict, defaultdict, list, tuple, namedtuples, the results of
`torch.max` and the like, dataclasses (no registration needed) and every type registered with
torch.utils._pytree. All else is a leaf: `torch.Size`, strings, modules, unregistered subclasses of dict, list
and tuple. Mappings are matched by key, not by order.

>>> leaves, spec = flatten({"w": 1, "b": [2, None]})
>>> leaves, spec
([1, 2], {'w': *, 'b': [*, None]})
>>> unflatten(spec, [10, 20])
{'w': 10, 'b': [20, None]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from ._nodes import KINDS, LEAF, LEAF_TYPES, dataclass_kind, describe, listing, walk
from ._nodes import Spec as Spec
from ._prefix import Broadcast
from ._prefix import broadcast_prefix as broadcast_prefix

__all__ = ["flatten", "leaves", "leaves_with_path", "map", "prefix_errors", "register_dataclass", "unflatten"]

Tree = Any
C = TypeVar("C", bound=type)


def flatten(tree: Tree) -> tuple[list[Any], Spec]:
    """Take a tree apart into its leaves, in the tree's own order, and its structure.

    Args:
        tree: Any nesting of nodes; a lone leaf is a tree too.

    Returns:
        The leaves, not copied, and the `Spec` that `unflatten` takes.

    Raises:
        ValueError: The tree contains itself.

    Example:
        >>> flatten((1, {"x": 2}, None))
        ([1, 2], (*, {'x': *}, None))

    References:
        As `jax.tree.flatten`, but mappings keep their order of insertion and dataclasses are nodes.
    """
    if type(tree) in LEAF_TYPES:
        return [tree], LEAF
    found: list[Any] = []
    try:
        spec = walk(tree, found)
    except RecursionError:
        rule = "contains itself, or is nested too deeply. Pass a tree without cycles."
        raise ValueError(f"flatten: the {type(tree).__name__} {rule}") from None
    return found, spec


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """Put leaves into a structure: the inverse of `flatten`.

    Dataclasses are rebuilt without a call of `__init__` or `__post_init__`.

    Args:
        spec: The structure, from `flatten`.
        leaves: As many values as it has leaves, in its order.

    Returns:
        A new tree that holds the given values themselves.

    Raises:
        ValueError: The number of leaves differs.

    Example:
        >>> unflatten(flatten({"a": 1, "b": (2, 3)})[1], "xyz")
        {'a': 'x', 'b': ('y', 'z')}
    """
    values = list(leaves)
    if len(values) != spec.num_leaves:
        counts = f"{len(values)} leaves for a structure of {spec.num_leaves}"
        raise ValueError(f"unflatten: {counts}:\n  {spec}\nGive one value for each *.")
    return _build(spec, iter(values))


def _build(spec: Spec, values: Iterator[Any]) -> Tree:
    if spec is LEAF:
        return next(values)
    if spec.is_flat:
        return spec.kind.build(spec, list(islice(values, spec.num_leaves)))
    return spec.kind.build(spec, [next(values) if c is LEAF else _build(c, values) for c in spec.children])


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves of a tree.

    Example:
        >>> leaves({"b": 1, "a": [2, None]})
        [1, 2]
    """
    return flatten(tree)[0]


def leaves_with_path(tree: Tree, root: str = "") -> list[tuple[str, Any]]:
    """Return pairs of path and leaf; a path is the code that reaches the leaf from a variable `root`.

    Example:
        >>> leaves_with_path({"b": 1, "a": [2, None]}, "batch")
        [("batch['b']", 1), ("batch['a'][0]", 2)]
    """
    values, spec = flatten(tree)
    return list(zip(spec.paths(root), values, strict=True))


def map(fun: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply a function to every leaf, or to the leaves of several trees side by side.

    Args:
        fun: Called as `fun(leaf, *rest_leaves)`.
        tree: Gives the structure and the order.
        *rest: Trees of the same structure; mappings are matched by key.

    Returns:
        A new tree of the results.

    Raises:
        ValueError: A tree of `rest` has another structure; names the places.

    Example:
        >>> map(lambda p, g: p - g, {"w": 5, "b": 3}, {"b": 1, "w": 2})
        {'w': 3, 'b': 2}
    """
    values, spec = flatten(tree)
    others = [flatten_like(spec, other, f"rest[{i}]") for i, other in enumerate(rest)]
    return _build(spec, iter([fun(*args) for args in zip(values, *others, strict=True)]))


def flatten_like(spec: Spec, tree: Tree, root: str = "tree") -> list[Any]:
    """Flatten a tree in the leaf order of an equal `spec` (internal).

    Raises:
        ValueError: The structures differ; lists where, as code from a variable called `root`.

    Example:
        >>> flatten_like(flatten({"a": 0, "b": 0})[1], {"b": 1, "a": 2})
        [2, 1]
    """
    found, got = flatten(tree)
    if got.keys == spec.keys and got.is_flat and spec.is_flat and got == spec:
        return found
    if got != spec:
        lines = listing(differences(spec, got, root))
        raise ValueError(f"{root} has not the expected structure:\n{lines}\nGive it the structure {spec}.")
    ordered: list[Any] = []
    _gather(spec, got, found, 0, ordered)
    return ordered


def _gather(spec: Spec, got: Spec, found: list[Any], start: int, out: list[Any]) -> None:
    """Append the leaves of `got`, which begin at found[start], in the order of `spec`."""
    if spec.is_flat and spec.keys == got.keys:
        out.extend(found[start : start + spec.num_leaves])
    elif spec is LEAF:
        out.append(found[start])
    else:
        places = {}
        for key, child in got.named_children().items():
            places[key] = child, start
            start += child.num_leaves
        for key, child in spec.named_children().items():
            _gather(child, places[key][0], found, places[key][1], out)


def differences(spec: Spec, got: Spec, path: str) -> Iterator[str]:
    """Say, place by place, how the structure `got` differs from the expected `spec` (internal)."""
    if spec == got:
        return
    same_type = spec.kind.cls is got.kind.cls
    keyed = spec.keys or got.keys
    if not same_type or (not keyed and len(spec.children) != len(got.children)):
        yield f"{path}: expected {describe(spec, same_type)}, got {describe(got, same_type)}"
        return
    if spec.meta != got.meta:
        yield f"{path}: expected {spec.kind.cls.__name__} with the meta data {spec.meta!r}, got {got.meta!r}"
    theirs, ours = got.named_children(), spec.named_children()
    for key, child in ours.items():
        place = path + spec.kind.entry(key)
        if key in theirs:
            yield from differences(child, theirs[key], place)
        else:
            yield f"{place} is missing"
    for key in theirs:
        if key not in ours:
            yield f"{path}: unexpected key {key!r}"


def prefix_errors(prefix: Tree, tree: Tree, root: str = "prefix") -> list[str]:
    """List the places where `prefix` is not a prefix of `tree`.

    Args:
        prefix: The tree with subtrees replaced by one value each, such as `in_axes`. None is a value in it.
        tree: Any tree.
        root: What the messages call the prefix.

    Returns:
        One line per place; empty if the prefix fits.

    Example:
        >>> prefix_errors((0, {"x": None}), (1, {"x": [2, 3]}))
        []
        >>> prefix_errors((0, [None]), (1, 2), "in_axes")
        ['in_axes[1]: the prefix has a list of 1, the tree has a leaf']
    """
    broadcast = Broadcast()
    broadcast.visit(prefix, flatten(tree)[1], root)
    return broadcast.errors


def register_dataclass(
    cls: C, data_fields: Iterable[str] | None = None, meta_fields: Iterable[str] = ()
) -> C:
    """Say which fields of a dataclass hold leaves; the others become part of the structure.

    A dataclass needs this only for its meta fields: without registration, every field is data.

    Args:
        cls: The dataclass.
        data_fields: Names of the fields that hold trees; None for all but the meta fields.
        meta_fields: Names of the fields that the structure keeps and compares by ==.

    Returns:
        The class itself.

    Raises:
        TypeError: `cls` is no dataclass.
        ValueError: A field is in neither list or in both, or a name is no field.

    Example:
        >>> @dataclasses.dataclass
        ... class Masked:
        ...     value: float
        ...     name: str
        >>> leaves(register_dataclass(Masked, ["value"], ["name"])(1.5, "loss"))
        [1.5]
    """
    call = f"register_dataclass({getattr(cls, '__name__', repr(cls))})"
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"{call}: not a dataclass. Decorate the class with @dataclasses.dataclass first.")
    names, meta = [field.name for field in dataclasses.fields(cls)], tuple(meta_fields)
    data = tuple(name for name in names if name not in meta) if data_fields is None else tuple(data_fields)
    listed = [*data, *meta]
    wrong = [f"{name} is not a field" for name in listed if name not in names]
    wrong += [f"{name} is listed {listed.count(name)} times" for name in names if listed.count(name) != 1]
    if wrong:
        fix = "Name every field once, in data_fields or in meta_fields."
        raise ValueError(f"{call}:\n{listing(wrong)}\n{fix}")
    KINDS[cls] = dataclass_kind(cls, data, meta)
    return cls
