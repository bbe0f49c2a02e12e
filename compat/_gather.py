"""gather: what replicas returned, joined in row order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import funcpar as fp
from compat._devices import DeviceId, place_of
from compat._nodes import Node, has_tensors, opened


def gather(outputs: Sequence[Any], target_device: DeviceId | None = None, dim: int = 0) -> Any:
    """Join the outputs of replicas into one, tensors along a dimension, in order.

    0-d tensors become a vector with one entry per replica. Dicts of any kind, namedtuples, dataclasses,
    tuples and lists with tensors are joined entry by entry, lists without tensors one after the other, numpy
    arrays as tensors are.
    Other values are kept if all replicas agree, and become a list with one entry per replica if not.
    Differentiable; a single tensor is returned as it is.

    Args:
        outputs: One output per replica.
        target_device: Where the result goes; -1 and "cpu" are the CPU; None: where the first output is.
        dim: The dimension that is joined.

    Returns:
        A tree like each output.

    Raises:
        ReplicaMismatchError: The replicas returned different structures. It is a ValueError.
        ValueError: There is no output.

    Example:
        >>> import compat, torch
        >>> compat.gather([{"y": torch.zeros(2)}, {"y": torch.ones(1)}], "cpu")
        {'y': tensor([0., 0., 1.])}

    References:
        ``torch.nn.parallel.gather``, which warns of 0-d tensors, turns strings into the text of a map
        object, and fails on numbers, dataclasses and defaultdicts.
    """
    parts = list(outputs)
    if not parts:
        raise ValueError("gather: there are no outputs.\nGive one output per replica.")
    place = None if target_device is None else place_of(target_device, "gather")
    if place is not None and isinstance(parts[0], Tensor) and place.type == "cpu" and parts[0].is_meta:
        place = None  # Meta tensors stay meta tensors.
    return _joined(parts, "output", lambda tensors: _cat(tensors, place, dim), dim)


def _joined(parts: list[Any], path: str, join: Callable[[list[Tensor]], Tensor], dim: int) -> Any:
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        if len({part.dim() for part in parts}) > 1:
            raise _mismatch(parts, path)
        return join(parts)
    if all(isinstance(part, PackedSequence) for part in parts):
        rows = [row for part in parts for row in unpack_sequence(part)]
        return parts[0] if len(parts) == 1 else pack_sequence(rows, enforce_sorted=False)
    if all(isinstance(part, np.ndarray) and part.ndim > 0 for part in parts):
        return np.concatenate(parts, dim)
    nodes = [opened(part) for part in parts]
    node = nodes[0]
    if not any(has_tensors(part) for part in parts):
        if all(type(part) is list for part in parts):
            return [item for part in parts for item in part]
        if not _agree(node, nodes):
            return _kept(parts)
    if node is None or not _agree(node, nodes):
        raise _mismatch(parts, path)
    if isinstance(first, dict):
        columns = [[part[key] for part in parts] for key in node.keys]
    else:
        columns = [list(c) for c in zip(*(n.children for n in nodes if n is not None), strict=True)]
    entries = zip(columns, node.entries, strict=True)
    return node.build([_joined(column, path + entry, join, dim) for column, entry in entries])


def _agree(node: Node | None, nodes: list[Node | None]) -> bool:
    """Tell whether all are containers of one kind with the same keys, in any order for a dict."""
    if node is None:
        return False
    for other in nodes:
        if other is None or other.kind is not node.kind or len(other.keys) != len(node.keys):
            return False
        if other.keys != node.keys and not (
            issubclass(node.kind, dict) and frozenset(other.keys) == frozenset(node.keys)
        ):
            return False
    return True


def _cat(tensors: list[Tensor], place: torch.device | None, dim: int) -> Tensor:
    if place is not None:
        tensors = [t if t.device.type == place.type == "cpu" else t.to(place) for t in tensors]
    if tensors[0].dim() == 0:
        return torch.stack(tensors)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _kept(parts: list[Any]) -> Any:
    first = parts[0]
    return first if all(_equal(first, part) for part in parts) else parts


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # Arrays have no single truth.
        return False


def _mismatch(parts: list[Any], path: str) -> fp.ReplicaMismatchError:
    lines = "\n".join(f"  replica {rank}  {_described(part)}" for rank, part in enumerate(parts))
    return fp.ReplicaMismatchError(
        f"gather: the replicas disagree on {path}:\n{lines}\n"
        f"Return the same structure from every replica, or keep the outputs apart with compat.parallel_apply."
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dimensions"
    node = opened(value)
    if node is None:
        return "None" if value is None else f"a {type(value).__name__}"
    if isinstance(value, dict):
        return f"a {node.kind.__name__} with the keys {', '.join(map(repr, node.keys)) or 'of nothing'}"
    return f"a {node.kind.__name__} of {len(node.children)}"
