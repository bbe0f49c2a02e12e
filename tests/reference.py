"""The oracle: what pmap must return, computed by one loop in one thread.

The law says that ``pmap(f)(params, batch) == f(params, batch)``, so mostly the oracle is ``f`` itself. Where
it is not ("stack", "sum", weights), it is split, loop and merge as they are written here.
"""

import torch
from torch import Tensor

from funcpar import tree


def balanced(rows: int, num_devices: int, min_rows: int = 1) -> list[int]:
    """Return the rows of each shard: 7 rows on 3 devices are 3, 2 and 2."""
    count = max(1, min(num_devices, rows // min_rows))
    return [rows // count + (rank < rows % count) for rank in range(count)]


def split(value, dim: int | None, sizes: list[int]) -> list:
    """Return one tree per shard: every tensor cut along ``dim``, or the whole for None."""
    if dim is None:
        return [value] * len(sizes)
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [
        tree.map(lambda leaf: leaf.narrow(dim, start, size), value)
        for start, size in zip(starts, sizes, strict=True)
    ]


def merge(spec, outs: list[Tensor], weights: list[float]) -> Tensor:
    """Return one tensor made of one per shard."""
    if spec == "sum":
        return torch.stack(outs).sum(0)
    if spec == "stack":
        return torch.stack(outs)
    if spec == "mean":
        if not any(weights):
            raise ValueError("the mean over weights that are all 0 is that of the undivided call")
        counted = [out * weight for out, weight in zip(outs, weights, strict=True) if weight]
        return torch.stack(counted).sum(0) / sum(weights)
    return outs[0] if spec is None else torch.cat(outs, spec)


def pmap(fun, args: tuple, dims: tuple, spec, num_devices: int, weight=None, min_rows: int = 1):
    """Return what ``pmap(fun, in_axes=dims, out_axes=spec, weight=weight)(*args)`` must be."""
    arg, dim = next((arg, dim) for arg, dim in zip(args, dims, strict=True) if dim is not None)
    sizes = balanced(tree.leaves(arg)[0].shape[dim], num_devices, min_rows)
    shards = list(zip(*(split(arg, dim, sizes) for arg, dim in zip(args, dims, strict=True)), strict=True))
    weights = [float(weight(*shard)) for shard in shards] if weight else [float(size) for size in sizes]
    outs = [fun(*shard) for shard in shards]
    return tree.map(lambda *column: merge(spec, list(column), weights), *outs)
