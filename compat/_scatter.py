"""scatter: rows to devices, in balanced pieces, none dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from compat._devices import DeviceId, ranks_of
from compat._nodes import has_tensors, leaves_of, opened

_MOST_LISTED = 20


def scatter(
    inputs: Any,
    target_gpus: Sequence[DeviceId] | None = None,
    dim: int = 0,
    *,
    devices: Sequence[DeviceId] | None = None,
) -> Any:
    """Cut every tensor of a tree into balanced pieces, one per device, in order.

    N rows on D devices give min(D, N) pieces, at least one, whose sizes differ by one at most. 0-d tensors
    and objects that are not tensors go to every piece as they are; without any tensor there are D pieces.
    Dataclasses, registered pytrees and dict subclasses come apart too, a PackedSequence by sequence.
    On CPU devices pieces share the memory of the input. Differentiable.

    Args:
        inputs: The tree.
        target_gpus: The devices, by default all; the name is torch's.
        dim: The dimension that is cut.
        devices: Another name for ``target_gpus``.

    Returns:
        A tuple of pieces for a single tensor, a list of trees for all else, as in torch.

    Raises:
        ValueError: Tensors disagree on the size, or a device is not there.
        TypeError: ``target_gpus`` and ``devices`` are both given, or neither is a list of devices.

    Example:
        >>> import compat, torch
        >>> compat.scatter(torch.arange(5), devices=[0, 1])
        (tensor([0, 1, 2]), tensor([3, 4]))

    References:
        ``torch.nn.parallel.scatter``, which needs an accelerator, cuts pieces of one size and a rest, and
        drops rows where tensors disagree.
    """
    if target_gpus is not None and devices is not None:
        raise TypeError("scatter: target_gpus and devices are the same thing.\nGive one of them.")
    ranks = ranks_of(devices if target_gpus is None else target_gpus, "scatter")
    sizes = sizes_for({"inputs": inputs}, len(ranks), dim, "scatter")
    count = len(ranks) if sizes is None else len(sizes)
    pieces = cut(inputs, sizes or [0] * count, dim)
    return tuple(pieces) if isinstance(inputs, Tensor) else pieces


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceId],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter positional and keyword arguments into the same number of pieces.

    Args:
        inputs: The positional arguments.
        kwargs: The keyword arguments, or None.
        target_gpus: The devices; the name is torch's.
        dim: The dimension that is cut.

    Returns:
        A tuple of argument tuples and a tuple of dicts, of equal length; both empty if nothing is given.

    Raises:
        ValueError: Tensors disagree on the size, or a device is not there.

    Example:
        >>> import compat, torch, funcpar as fp
        >>> fp.set_cpu_devices(3)
        >>> compat.scatter_kwargs((torch.arange(2),), {"scale": 3}, [0, 1, 2])
        (((tensor([0]),), (tensor([1]),)), ({'scale': 3}, {'scale': 3}))
    """
    ranks = ranks_of(target_gpus, "scatter_kwargs")
    if not inputs and not kwargs:
        return (), ()
    sizes = sizes_for({"inputs": inputs, "kwargs": kwargs or {}}, len(ranks), dim, "scatter_kwargs")
    count = len(ranks) if sizes is None else len(sizes)
    sizes = sizes or [0] * count
    args = cut(tuple(inputs), sizes, dim) if inputs else [()] * count
    return tuple(args), tuple(cut(kwargs, sizes, dim) if kwargs else [{} for _ in range(count)])


def sizes_for(named: dict[str, Any], num_devices: int, dim: int, call: str) -> list[int] | None:
    """Return the rows of each piece, as all tensors agree on them; None if there is no tensor."""
    if num_devices == 1:  # The whole goes to the one device, whatever its tensors are.
        return [1]
    found: list[tuple[str, int]] = []
    for name, value in named.items():
        for path, leaf in leaves_of(value, name):
            if isinstance(leaf, PackedSequence):
                found.append((path, int(leaf.batch_sizes[0])))
            elif isinstance(leaf, Tensor) and leaf.dim() > 0:
                if not -leaf.dim() <= dim < leaf.dim():
                    raise ValueError(
                        f"{call}: {path} has {leaf.dim()} dimensions and dim={dim} is to be cut.\n"
                        f"Give every tensor that dimension; 0-d tensors go to every device."
                    )
                found.append((path, leaf.shape[dim]))
    if not found:
        return None
    if len({rows for _, rows in found}) > 1:
        width = max(len(path) for path, _ in found)
        lines = [f"  {path:<{width}}  {rows} row{'s' * (rows != 1)}" for path, rows in found[:_MOST_LISTED]]
        more = [f"  ... and {len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
        raise ValueError(
            f"{call}: tensors disagree on the number of rows (dim={dim}):\n" + "\n".join(lines + more) + "\n"
            "Give them all the same; what every replica needs whole belongs in a buffer of the module, "
            "or use fp.pmap with in_axes=None."
        )
    rows = found[0][1]
    count = max(1, min(num_devices, rows))
    return [rows // count + (k < rows % count) for k in range(count)]


def cut(value: Any, sizes: list[int], dim: int) -> list[Any]:
    """Return the pieces of a tree, for sizes that fit it."""
    if isinstance(value, Tensor):
        return [value] * len(sizes) if value.dim() == 0 else _rows(value, sizes, dim)
    if isinstance(value, PackedSequence):
        return [value] if len(sizes) == 1 else _sequences(value, sizes)
    node = opened(value)
    if node is None or not node.children or (node.is_shared and not has_tensors(value)):
        return [value] * len(sizes)
    columns = [cut(child, sizes, dim) for child in node.children]
    return [node.build(list(row)) for row in zip(*columns, strict=True)]


def _rows(value: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    if len(sizes) == 1:
        return [value]
    if value.layout is torch.strided:
        return list(torch.split(value, sizes, dim))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [
        value.index_select(dim, torch.arange(start, start + size, device=value.device))
        for start, size in zip(starts, sizes, strict=True)
    ]


def _sequences(value: PackedSequence, sizes: list[int]) -> list[PackedSequence]:
    rows = iter(unpack_sequence(value))
    is_sorted = value.sorted_indices is None
    return [pack_sequence([next(rows) for _ in range(size)], enforce_sorted=is_sorted) for size in sizes]
