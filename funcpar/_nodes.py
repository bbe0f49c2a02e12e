"""The nodes of a tree: how each type comes apart and goes back together, and `Spec`, which remembers it."""

from __future__ import annotations

import dataclasses
from builtins import map as each
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as registry

MAX_LISTED = 8

# The parts of a node: keys of the children (none for a sequence), children, compared meta data, other data.
Parts: TypeAlias = tuple[tuple[Any, ...], Collection[Any], Any, Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How nodes of one type come apart and are put together."""

    cls: type
    style: Literal["leaf", "none", "sequence", "mapping", "fields", "foreign"]
    take: Callable[[Any], Parts]
    build: Callable[[Spec, list[Any]], Any]

    def entry(self, key: Any) -> str:
        """Return the code that reaches the child `key`."""
        if self.style == "fields":
            return f".{key}"
        return str(key) if self.style == "foreign" else f"[{key!r}]"


class Spec:
    """The structure of a tree without its leaves: what `unflatten` needs to put leaves back.

    Specs are immutable and hashable. Two are equal if node types, keys and the meta fields of registered
    dataclasses are. The order of a mapping's keys, a defaultdict's factory and undeclared attributes of
    dataclasses are kept, not compared.

    >>> from funcpar.tree import flatten
    >>> spec = flatten({"a": 1, "b": (2, 3)})[1]
    >>> spec == flatten({"b": (5, 6), "a": 4})[1]
    True
    >>> spec.num_leaves, spec.paths("batch")
    (3, ("batch['a']", "batch['b'][0]", "batch['b'][1]"))
    """

    __slots__ = ("_hash", "_paths", "children", "extra", "is_flat", "keys", "kind", "meta", "num_leaves")

    def __init__(
        self,
        kind: Kind,
        keys: tuple[Any, ...],
        children: tuple[Spec, ...],
        num_leaves: int,
        is_flat: bool = False,
        meta: Any = None,
        extra: Any = None,
    ) -> None:
        self.kind, self.keys, self.children, self.num_leaves = kind, keys, children, num_leaves
        self.is_flat, self.meta, self.extra = is_flat, meta, extra
        self._hash: int | None = None
        self._paths: tuple[str, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Spec):
            return NotImplemented
        if self.kind.cls is not other.kind.cls or self.num_leaves != other.num_leaves:
            return False
        if self.meta != other.meta:
            return False
        if self.keys == other.keys:
            return self.children == other.children
        return self.kind.style == "mapping" and self.named_children() == other.named_children()

    def __hash__(self) -> int:
        if self._hash is None:
            is_mapping = self.kind.style == "mapping"
            children = frozenset(self.named_children().items()) if is_mapping else self.children
            self._hash = hash((self.kind.cls, children, _hash_of(self.meta)))
        return self._hash

    def __repr__(self) -> str:
        style, cls = self.kind.style, self.kind.cls
        if style in ("leaf", "none"):
            return "*" if style == "leaf" else "None"
        parts = [repr(child) for child in islice(self.children, MAX_LISTED)]
        if style == "mapping":
            parts = [f"{key!r}: {part}" for key, part in zip(self.keys, parts, strict=False)]
        elif style == "fields":
            parts = [f"{key}={part}" for key, part in zip(self.keys, parts, strict=False)]
        if len(self.children) > MAX_LISTED:
            parts.append(f"... {len(self.children) - MAX_LISTED} more")
        text = ", ".join(parts)
        if cls is tuple:
            return f"({text},)" if len(parts) == 1 else f"({text})"
        if style == "mapping":
            text = f"{{{text}}}"
        elif style == "sequence":
            text = f"[{text}]"
        return text if cls in (dict, list) else f"{cls.__name__}({text})"

    def __deepcopy__(self, memo: object) -> Spec:
        return self

    def named_children(self) -> dict[Any, Spec]:
        """Return the children by key or index."""
        return dict(zip(self.keys or range(len(self.children)), self.children, strict=True))

    def order(self) -> Sequence[int]:
        """Return the leaves in an order that does not depend on the order of keys."""
        if self.is_flat and self.kind.style != "mapping":
            return range(self.num_leaves)
        return sorted(range(self.num_leaves), key=self.paths().__getitem__)

    def paths(self, root: str = "") -> tuple[str, ...]:
        """Return, for every leaf, the code that reaches it from a variable called `root`."""
        if self._paths is None:
            if self.kind.style == "leaf":
                self._paths = ("",)
            else:
                named = self.named_children().items()
                entries = [(self.kind.entry(key), child) for key, child in named]
                self._paths = tuple([entry + path for entry, child in entries for path in child.paths()])
        return tuple([root + path for path in self._paths]) if root else self._paths


def _hash_of(meta: Any) -> int:
    try:
        return hash(meta)
    except TypeError:  # Unhashable meta is still compared by ==, only not told apart by the hash.
        return 0


def _take_attributes(
    data: tuple[str, ...], meta: tuple[str, ...], known: frozenset[str], node: Any
) -> tuple[tuple[str, ...], list[Any], Any, Any]:
    try:
        keys, values = data, [getattr(node, name) for name in data]
    except AttributeError:  # A field without a value, which init=False fields may be.
        keys = tuple(name for name in data if hasattr(node, name))
        values = [getattr(node, name) for name in keys]
    fixed = tuple(getattr(node, name) for name in meta) if meta else None
    attributes: dict[str, Any] = getattr(node, "__dict__", {})
    # A tensor in an undeclared attribute would be neither split nor moved. Left out it is missed by name,
    # while kept it would be stale in silence.
    others = [name for name in attributes if name not in known and not _holds_tensor(attributes[name])]
    return keys, values, fixed, {name: attributes[name] for name in others} if others else None


def _holds_tensor(value: Any) -> bool:
    found: list[Any] = []
    try:
        walk(value, found)
    except RecursionError:  # It refers back to its owner, which is in the tree already.
        return True
    return any(isinstance(leaf, torch.Tensor) for leaf in found)


def _build_attributes(meta: tuple[str, ...], spec: Spec, values: list[Any]) -> Any:
    # Without __init__: it may take other arguments than the fields, and __post_init__ may refuse what stands
    # in for a leaf.
    node: Any = object.__new__(spec.kind.cls)
    for name, value in zip(spec.keys, values, strict=True):
        object.__setattr__(node, name, value)
    for name, value in zip(meta, spec.meta or (), strict=True):
        object.__setattr__(node, name, value)
    if spec.extra:
        node.__dict__.update(spec.extra)
    return node


def dataclass_kind(cls: type, data: tuple[str, ...], meta: tuple[str, ...] = ()) -> Kind:
    """Return the kind of a dataclass with leaves in the fields `data` and structure in the fields `meta`."""
    # A cached_property is computed again: the kept value would belong to the old leaves.
    cached = [k for base in cls.__mro__ for k, v in vars(base).items() if isinstance(v, cached_property)]
    take = partial(_take_attributes, data, meta, frozenset([*data, *meta, *cached]))
    return Kind(cls, "fields", take, partial(_build_attributes, meta))


def _take_sequence(node: Any) -> Parts:
    return (), node, None, None


def _leaf_kind(cls: type) -> Kind:
    return Kind(cls, "leaf", _take_sequence, lambda spec, values: values[0])


LEAF = Spec(_leaf_kind(object), (), (), 1)
# Types that are leaves for good. Others are looked up each time, as someone may register their type later.
LEAF_TYPES: frozenset[type] = frozenset(
    (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, torch.Generator, PackedSequence,
     bool, int, float, complex, str, bytes, type, np.ndarray, np.bool_, np.int64, np.float32, np.float64)
)  # fmt: skip
# The one table of types known by name: builtin containers, leaves, and what register_dataclass adds.
KINDS: dict[type, Kind] = dict.fromkeys(LEAF_TYPES, LEAF.kind)
for _kind in [
    Kind(type(None), "none", lambda node: ((), (), None, None), lambda spec, values: None),
    Kind(list, "sequence", _take_sequence, lambda spec, values: values),
    Kind(tuple, "sequence", _take_sequence, lambda spec, values: tuple(values)),
    Kind(dict, "mapping", lambda node: (tuple(node), node.values(), None, None),
         lambda spec, values: dict(zip(spec.keys, values, strict=True))),
    Kind(OrderedDict, "mapping", lambda node: (tuple(node), node.values(), None, None),
         lambda spec, values: OrderedDict(zip(spec.keys, values, strict=True))),
    Kind(defaultdict, "mapping", lambda node: (tuple(node), node.values(), None, node.default_factory),
         lambda spec, values: defaultdict(spec.extra, zip(spec.keys, values, strict=True))),
]:  # fmt: skip
    KINDS[_kind.cls] = _kind
# A dataclass that derives from one of these has contents beside its fields, so it is no node.
_OPAQUE_BASES = (
    torch.nn.Module, torch.Tensor, Enum, BaseException,
    dict, list, tuple, set, frozenset, str, bytes, int, float,
)  # fmt: skip


def kind_of(cls: type) -> Kind:
    """Return how values of exactly the type `cls` are treated."""
    kind = KINDS.get(cls)
    if kind is not None:
        return kind
    node_def = registry.SUPPORTED_NODES.get(cls)
    if node_def is not None and cls.__module__ != "torch.return_types":
        return _foreign_kind(cls, node_def)
    return _automatic_kind(cls)


@lru_cache(1024)
def _foreign_kind(cls: type, node_def: registry.NodeDef) -> Kind:
    def take(node: Any) -> Parts:
        if node_def.flatten_with_keys_fn is None:
            values, context = node_def.flatten_fn(node)
            return tuple(each(registry.SequenceKey, range(len(values)))), values, context, None
        pairs, context = node_def.flatten_with_keys_fn(node)
        return tuple(key for key, _ in pairs), [value for _, value in pairs], context, None

    return Kind(cls, "foreign", take, lambda spec, values: node_def.unflatten_fn(values, spec.meta))


@lru_cache(1024)
def _automatic_kind(cls: type) -> Kind:
    if issubclass(cls, tuple):
        if cls.__module__ == "torch.return_types":
            return Kind(cls, "sequence", _take_sequence, lambda spec, values: cls(values))
        names = getattr(cls, "_fields", None)
        if isinstance(names, tuple) and hasattr(cls, "_make") and not issubclass(cls, PackedSequence):
            make: Callable[[list[Any]], Any] = cls._make
            take: Callable[[Any], Parts] = lambda node: (names, node, None, None)
            return Kind(cls, "fields", take, lambda spec, values: make(values))
    if dataclasses.is_dataclass(cls) and not issubclass(cls, _OPAQUE_BASES):
        return dataclass_kind(cls, tuple(field.name for field in dataclasses.fields(cls)))
    return LEAF.kind


def walk(node: Any, out: list[Any]) -> Spec:
    """Append the leaves of `node` to `out` and return its structure."""
    kind = kind_of(type(node))
    if kind.style == "leaf":
        out.append(node)
        return LEAF
    keys, values, meta, extra = kind.take(node)
    count = len(values)
    if LEAF_TYPES.issuperset(each(type, values)):  # Most nodes: no Python code runs per leaf.
        out.extend(values)
        return Spec(kind, keys, (LEAF,) * count, count, True, meta, extra)
    start = len(out)
    children = []
    for value in values:
        if type(value) in LEAF_TYPES:
            out.append(value)
            children.append(LEAF)
        else:
            children.append(walk(value, out))
    return Spec(kind, keys, tuple(children), len(out) - start, False, meta, extra)


def describe(spec: Spec, with_size: bool = True) -> str:
    """Name the node at the top of a structure, as messages do."""
    if spec.kind.style in ("leaf", "none"):
        return "a leaf" if spec is LEAF else "None"
    name = spec.kind.cls.__name__
    size = f" of {len(spec.children)}" if with_size and spec.kind.style != "fields" else ""
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}{size}"


def listing(lines: Iterable[str]) -> str:
    """Return the lines indented, the first few of them."""
    found = list(lines)
    more = [f"... and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
    return "\n".join("  " + line for line in found[:MAX_LISTED] + more)
