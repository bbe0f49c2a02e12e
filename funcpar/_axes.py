"""in_axes: which leaves of the arguments are split, along which dimension, for how many shards."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpar import tree
from funcpar._binding import Argument
from funcpar._devices import Device
from funcpar._split import Split, cut, with_sent
from funcpar._staging import Shards, as_tree

_SCALARS = (
    numbers.Number, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.SymInt, torch.SymFloat,
)  # fmt: skip
_LEAF_SPEC = tree.flatten(object())[1]
_NOT_SPLIT: list[int | None] = [None]


@dataclass(frozen=True, slots=True)
class InAxes:
    """How the arguments of one pmapped function are split.

    Attributes:
        call: The call for messages, such as ``pmap(train_step)``.
        spec: ``in_axes`` as given.
        static: Positions that are passed whole and are no trees.
        min_rows: The fewest rows that are worth a shard.
    """

    call: str
    spec: Any
    static: frozenset[int]
    min_rows: int

    def split(self, arguments: list[Argument], devices: tuple[Device, ...], devices_given: bool) -> Split:
        """Cut the arguments for these devices, or for fewer if there are few rows."""
        leaves: list[Any] = []
        axes: list[int | None] = []
        parts: list[tuple[str | None, tree.Spec]] = []
        for argument in arguments:
            if argument.position in self.static:
                found, spec, own = [argument.value], _LEAF_SPEC, _NOT_SPLIT
            else:
                found, spec = tree.flatten(argument.value)
                if Shards in map(type, found):
                    found, spec = tree.flatten(tree.unflatten(spec, [as_tree(leaf) for leaf in found]))
                own = self._axes_of(argument, found, spec)
            leaves += found
            axes += own
            parts.append((argument.keyword, spec))
        kept: list[Shards] = []
        if Shards in map(type, leaves):
            kept = [
                leaf
                for leaf, axis in zip(leaves, axes, strict=True)
                if isinstance(leaf, Shards) and axis is not None
            ]
        rows = self._rows(arguments, leaves, axes, parts)
        if kept:
            devices, sizes = self._of_shards(kept, devices, rows)
        elif rows is None:
            if not devices_given:
                raise ValueError(self._nothing_mapped(arguments))
            return Split(devices, None, [leaves] * len(devices), axes, parts, leaves)
        else:
            count = max(1, min(len(devices), rows // self.min_rows))
            sizes = [rows // count + (k < rows % count) for k in range(count)]
            devices = devices[:count]
        shards = cut(leaves, axes, sizes)
        if not devices[0].is_cpu:
            shards = with_sent(shards, leaves, axes, sizes, devices)
        return Split(devices, sizes, shards, axes, parts, leaves)

    def _axes_of(self, argument: Argument, leaves: list[Any], spec: tree.Spec) -> list[int | None]:
        """Return the axis of each leaf: None where it is not split."""
        prefix = self._prefix(argument)
        if prefix is None and Shards not in map(type, leaves):
            return [None] * len(leaves)
        if prefix is None:
            wanted: list[Any] = [None] * len(leaves)
        elif isinstance(prefix, int):
            wanted = [prefix] * len(leaves)
        else:
            wanted = tree.broadcast_prefix(prefix, spec, f"{self.call}: in_axes of {argument.root}")
            wanted = [_automatic(argument) if axis == "auto" else axis for axis in wanted]
        found: list[int | None] = []
        for k, (leaf, axis) in enumerate(zip(leaves, wanted, strict=True)):
            if isinstance(leaf, Shards):
                self._check_shards(argument, spec, k, axis)
                found.append(axis)
            elif axis is None or _is_whole(leaf):
                found.append(None)
            elif isinstance(leaf, Tensor) and leaf.layout in _DIVISIBLE and not leaf.is_nested:
                found.append(self._dim(argument, spec, k, leaf, axis))
            else:
                raise self._not_divisible(argument, spec, leaves, wanted)
        return found

    def _prefix(self, argument: Argument) -> Any:
        spec = self.spec
        if isinstance(spec, dict):
            spec = spec.get(argument.parameter, "auto")
        elif isinstance(spec, list | tuple):
            if argument.position is None or argument.position >= len(spec):
                raise ValueError(
                    f"{self.call}: in_axes has {len(spec)} entries, and the call gives {argument.root}, "
                    f"which has none.\n"
                    f"Give in_axes one entry per argument, or a dict by parameter name."
                )
            spec = spec[argument.position]
        return _automatic(argument) if isinstance(spec, str) else spec

    def _dim(self, argument: Argument, spec: tree.Spec, k: int, leaf: Tensor, axis: int) -> int:
        if not -leaf.dim() <= axis < leaf.dim():
            raise ValueError(
                f"{self.call}: {_path(argument, spec, k)} has {leaf.dim()} dimensions, and in_axes splits it "
                f"along dimension {axis}.\nGive it an axis from {-leaf.dim()} to {leaf.dim() - 1}, or None."
            )
        return axis % leaf.dim()

    def _check_shards(self, argument: Argument, spec: tree.Spec, k: int, axis: int | None) -> None:
        if axis != 0:
            raise ValueError(
                f"{self.call}: {_path(argument, spec, k)} is kept in shards, and in_axes={axis} "
                f"{'replicates it' if axis is None else 'splits it elsewhere'}.\n"
                f"Give it in_axes=0, or pass its .gather()."
            )

    def _not_divisible(
        self, argument: Argument, spec: tree.Spec, leaves: list[Any], wanted: list[Any]
    ) -> TypeError:
        lines = []
        for k, (leaf, axis) in enumerate(zip(leaves, wanted, strict=True)):
            if axis is None or _is_whole(leaf) or isinstance(leaf, Shards):
                continue
            if isinstance(leaf, Tensor):
                if leaf.layout in _DIVISIBLE and not leaf.is_nested:
                    continue
                kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            else:
                kind = f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
            lines.append(f"\n  {_path(argument, spec, k)}  {kind}{_hint(leaf)}")
        return TypeError(
            f"{self.call}: these arguments cannot be split into rows:{''.join(lines)}\n"
            f"Pass tensors, or give them in_axes=None to hand every shard the whole."
        )

    def _rows(
        self,
        arguments: list[Argument],
        leaves: list[Any],
        axes: list[int | None],
        parts: list[tuple[str | None, tree.Spec]],
    ) -> int | None:
        """Return the number of rows that all mapped tensors have, None if there is no such tensor."""
        sizes = {
            leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True)
            if axis is not None and isinstance(leaf, Tensor)
        }  # fmt: skip
        if len(sizes) <= 1:
            return sizes.pop() if sizes else None
        paths = [
            path
            for argument, (_, spec) in zip(arguments, parts, strict=True)
            for path in spec.paths(argument.root)
        ]
        table = [
            (path, f"in_axes={axis}", f"{leaf.shape[axis]} row{'s' * (leaf.shape[axis] != 1)}")
            for path, leaf, axis in zip(paths, leaves, axes, strict=True)
            if axis is not None and isinstance(leaf, Tensor)
        ]
        raise ValueError(
            f"{self.call}: mapped arguments disagree on the number of rows:{_aligned(table)}\n"
            f"Give every mapped leaf the same size there, or replicate it with in_axes=None."
        )

    def _of_shards(
        self, kept: list[Shards], devices: tuple[Device, ...], rows: int | None
    ) -> tuple[tuple[Device, ...], list[int]]:
        """Return the devices and rows of the shards that arguments are kept in."""
        first = kept[0]
        sizes = first.rows
        if any(other.devices != first.devices or other.rows != sizes for other in kept):
            shown = "".join(f"\n  {each}" for each in kept)
            raise ValueError(
                f"{self.call}: arguments that are kept in shards disagree:{shown}\n"
                f"Make them with the same rows on the same devices, or pass their .gather()."
            )
        if first.devices != devices[: len(first.devices)]:
            raise ValueError(
                f"{self.call}: an argument is kept in shards on {', '.join(map(str, first.devices))}, and "
                f"the call runs on {', '.join(map(str, devices))}.\n"
                f"Name the same devices, or pass its .gather()."
            )
        known = [n for n in sizes if n is not None]
        if rows is not None and (len(known) < len(sizes) or sum(known) != rows):
            raise ValueError(
                f"{self.call}: an argument is kept in shards, {first}, and others have {rows} rows.\n"
                f"Give both the same rows, or pass its .gather()."
            )
        if len(known) < len(sizes):
            raise ValueError(
                f"{self.call}: an argument is kept in shards, {first}, and it does not say how many rows "
                f"each stands for.\nMake it with Shards(parts, devices, rows), or with pmap."
            )
        return first.devices, known

    def _nothing_mapped(self, arguments: list[Argument]) -> str:
        shown = ", ".join(argument.root for argument in arguments) or "no arguments"
        rule = (
            "the first parameter is replicated and the others hold no tensor to split"
            if isinstance(self.spec, str)
            else f"in_axes={self.spec!r} splits none of its tensors"
        )
        return (
            f"{self.call}: nothing is mapped in this call ({shown}): {rule}.\n"
            f"Say what to split, such as in_axes=0 or in_axes=(None, 0), or give devices= to run the call "
            f"once on each."
        )


def paths_of(roots: Sequence[str], parts: Sequence[tuple[str | None, tree.Spec]]) -> list[str]:
    """Return the paths of the leaves of all arguments, as the user would write them."""
    return [path for root, (_, spec) in zip(roots, parts, strict=True) for path in spec.paths(root)]


def _automatic(argument: Argument) -> int | None:
    """The first parameter is replicated, every other one split along dimension 0."""
    return None if argument.is_first else 0


_DIVISIBLE = (torch.strided, torch.sparse_coo)


def _is_whole(leaf: Any) -> bool:
    """Tell whether a leaf has no rows, so that every shard gets it whole."""
    return leaf.dim() == 0 if isinstance(leaf, Tensor) else isinstance(leaf, _SCALARS)


def _hint(leaf: Any) -> str:
    if isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
        return ": its fields do not split row by row; pass the padded tensor and the lengths"
    if hasattr(leaf, "__array__") and not isinstance(leaf, Tensor):
        return ": torch.from_numpy makes it a tensor"
    return ""


def _path(argument: Argument, spec: tree.Spec, k: int) -> str:
    return spec.paths(argument.root)[k]


def _aligned(table: Sequence[tuple[str, ...]]) -> str:
    if len(table) > 20:  # One of each size first: the odd one must not be among those left out.
        firsts = list({row[-1]: row for row in reversed(table)}.values())
        table = firsts + [row for row in table if row not in firsts]
    shown, rest = table[:20], len(table) - 20
    widths = [max(len(row[c]) for row in shown) for c in range(len(shown[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "".join(f"\n  {line}" for line in lines) + (f"\n  and {rest} more" if rest > 0 else "")
