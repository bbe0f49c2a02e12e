"""What each shard gets: the leaves of all arguments, the split ones cut into balanced rows."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from funcpar import tree
from funcpar._devices import Device
from funcpar._graph import shares_memory, storages
from funcpar._staging import Shards
from funcpar._transfer import sent_rows
from funcpar._world import is_transformed


@dataclass(frozen=True, slots=True)
class Passed:
    """An output that is a replicated argument: which leaf."""

    place: int


@dataclass(slots=True)
class Split:
    """What each shard gets.

    Attributes:
        devices: One per shard.
        rows: Rows of each shard; None when nothing is mapped.
        leaves: For each shard the leaves of all arguments.
        axes: For each leaf the dimension it is split along, or None.
        arguments: For each argument its keyword (None: positional) and spec.
        whole: The leaves of all arguments as the caller gave them.
    """

    devices: tuple[Device, ...]
    rows: list[int] | None
    leaves: list[list[Any]]
    axes: list[int | None]
    arguments: list[tuple[str | None, tree.Spec]]
    whole: list[Any]
    # Made when first asked for, and once, as every leaf of an output may ask.
    _places: dict[int, bool] | None = field(default=None, init=False, repr=False, compare=False)
    _memory: set[int] | None = field(default=None, init=False, repr=False, compare=False)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs made of such leaves."""
        args, kwargs, start = [], {}, 0
        for keyword, spec in self.arguments:
            value = tree.unflatten(spec, leaves[start : start + spec.num_leaves])
            start += spec.num_leaves
            if keyword is None:
                args.append(value)
            else:
                kwargs[keyword] = value
        return tuple(args), kwargs

    def marked(self, given: Sequence[Any], out: list[Any]) -> list[Any]:
        """Put a mark in the place of every output that is a replicated argument itself."""
        if not out:
            return out
        places = {
            id(leaf): k for k, (leaf, axis) in enumerate(zip(given, self.axes, strict=True))
            if axis is None and isinstance(leaf, Tensor)
        }  # fmt: skip
        return [Passed(places[id(leaf)]) if id(leaf) in places else leaf for leaf in out]

    def unmarked(self, out: Sequence[Any]) -> list[Any]:
        """Put the caller's own tensors back in the place of marks."""
        return [self.whole[leaf.place] if isinstance(leaf, Passed) else leaf for leaf in out]

    def has_rows(self, tensor: Tensor, given: Sequence[Any], rank: int) -> bool:
        """Tell whether a tensor in a shard is split, or made of what is, as far as its shape says."""
        for leaf, axis in zip(given, self.axes, strict=True):
            if leaf is tensor:
                return axis is not None
        return self.rows is not None and tensor.dim() > 0 and tensor.shape[0] == self.rows[rank]

    def is_replicated(self, leaf: Any) -> bool:
        """Tell whether a leaf is an argument that every shard got whole."""
        return self._replicated().get(id(leaf), False)

    def is_seen_by(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is an argument, or sees the memory of one."""
        return id(tensor) in self._replicated() or shares_memory(tensor, self._storages)

    def _replicated(self) -> dict[int, bool]:
        """Return for each argument's leaf, by its id, whether every shard got it whole."""
        if self._places is None:
            self._places = {}
            for leaf, axis in zip(self.whole, self.axes, strict=True):
                self._places[id(leaf)] = axis is None or self._places.get(id(leaf), False)
        return self._places

    def _storages(self) -> set[int]:
        if self._memory is None:
            self._memory = storages(self.whole)
        return self._memory

    def share(self, copied: Callable[[list[Any]], list[Any]]) -> None:
        """Let every shard have copies of the replicated leaves in their place.

        They are copied in the order of their names, which is the same in all processes.
        """
        names = [
            (keyword or str(position), path)
            for position, (keyword, spec) in enumerate(self.arguments)
            for path in spec.paths()
        ]
        places = [k for k in sorted(range(len(names)), key=names.__getitem__) if self.axes[k] is None]
        for leaves in self.leaves[:1]:
            for k, leaf in zip(places, copied([leaves[k] for k in places]), strict=True):
                for other in self.leaves:
                    other[k] = leaf

    def form(self) -> Hashable:
        """Return the structure of the arguments, and the order of keys, in which their leaves come."""
        return tuple([(keyword, _form_of(spec)) for keyword, spec in self.arguments])

    def undivided(self) -> Split:
        """Return the same call as one shard."""
        rows = None if self.rows is None else [sum(self.rows)]
        whole = [leaf.gather() if isinstance(leaf, Shards) else leaf for leaf in self.whole]
        return Split(self.devices[:1], rows, [whole], self.axes, self.arguments, whole)


def _form_of(spec: tree.Spec) -> Hashable:
    # A spec is new in each call, and takes longer to hash than what it is made of.
    top = spec.kind.cls if spec.meta is None else spec
    return top, spec.keys, spec.num_leaves if spec.is_flat else tuple(map(_form_of, spec.children))


def cut(leaves: list[Any], axes: list[int | None], sizes: list[int]) -> list[list[Any]]:
    """Return the leaves of each shard; a leaf that is not split is the same object in all."""
    shards: list[list[Any]] = [list(leaves) for _ in sizes]
    if len(sizes) == 1 and Shards not in map(type, leaves):
        return shards
    for k, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        if axis is None:
            continue
        if isinstance(leaf, Shards):
            pieces: Sequence[Any] = leaf.parts
        elif leaf.requires_grad and not leaf.is_sparse:
            pieces = torch.split(leaf, sizes, axis)  # One node, whose backward joins the gradients.
        else:
            pieces = _rows(leaf, axis, sizes)
        for shard, piece in zip(shards, pieces, strict=True):
            shard[k] = piece
    return shards


def with_sent(
    shards: list[list[Any]],
    leaves: Sequence[Any],
    axes: Sequence[int | None],
    sizes: Sequence[int],
    devices: Sequence[Device],
) -> list[list[Any]]:
    """Put rows that are on their accelerators already, sent by prefetch, in the place of the caller's."""
    if len(sizes) == 1 or is_transformed():
        return shards
    for k, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        if axis == 0 and isinstance(leaf, Tensor) and not leaf.requires_grad:
            for shard, part in zip(shards, sent_rows(leaf, devices, sizes), strict=True):
                shard[k] = shard[k] if part is None else part
    return shards


def _rows(leaf: Tensor, axis: int, sizes: list[int]) -> Sequence[Tensor]:
    if leaf.is_sparse:
        starts = itertools.accumulate(sizes, initial=0)
        return [
            leaf.index_select(axis, torch.arange(start, start + size, device=leaf.device))
            for start, size in zip(starts, sizes, strict=False)
        ]
    rows = leaf.split_with_sizes(sizes, axis)
    # No views: a function may write into its rows, and make them depend on what needs a gradient.
    return rows if is_transformed() else [part.detach() for part in rows]


def _number(call: str, value: Tensor) -> Any:
    try:
        return value.item()
    except RuntimeError as error:  # Under vmap.
        raise ValueError(
            f"{call}: weight depends on a tensor that has no one value here: {error}\n"
            f"Make it of others, such as lengths, or vmap inside the function."
        ) from error


def weights_of(call: str, weight: Callable[..., Any], split: Split) -> list[float]:
    """Evaluate the user's weight of each shard.

    Raises:
        TypeError: A weight is not a number.
        ValueError: A weight is negative, infinite or NaN.
    """
    found: list[float] = []
    with torch.no_grad():
        for rank, leaves in enumerate(split.leaves):
            args, kwargs = split.rebuild(leaves)
            value = weight(*args, **kwargs)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = _number(call, value)
            if not isinstance(value, numbers.Real):
                raise TypeError(
                    f"{call}: weight returned a {type(value).__name__} for shard {rank}.\n"
                    f"Return one number, such as mask.sum()."
                )
            if not 0 <= float(value) < float("inf"):
                raise ValueError(
                    f"{call}: weight returned {value} for shard {rank}.\n"
                    f"Return a finite number that is not negative."
                )
            found.append(float(value))
    if sum(found) == float("inf"):
        raise ValueError(f"{call}: the weights {found} add up to infinity.\nScale them down.")
    return found
