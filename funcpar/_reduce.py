"""Sums of gradients over shards, in rank order, the work shared by the workers.

A sum is written into the first shard's own gradient where nothing else can see that memory, so
that a reduction reads every gradient once and allocates nothing. What autograd returns may be
expanded, may be one tensor under two names, or may belong to the user (a custom Function can
return what it keeps): then the sum is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funcpar._graph import Gradient

# A leaf below this many entries is summed by one worker.
_CHUNK = 1 << 15
# Accumulating these in their own dtype would round once per shard.
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def reduce_share(
    rows: Sequence[Sequence[Gradient]], reusable: Sequence[bool], rank: int, totals: dict[int, Gradient]
) -> None:
    """Do the part of worker ``rank`` in ``totals[k] = sum over shards of rows[shard][k]``.

    Every worker calls this with the same rows; together they fill ``totals`` (a gradient that no
    shard has stays None). The order of summation is that of the ranks, whoever sums.

    Args:
        rows: For each shard its gradients, or None where a leaf was not used.
        reusable: For each leaf whether ``rows[0]``'s gradient may be written into.
        rank: This worker, in ``range(len(rows))``.
        totals: One dict, by leaf, that all workers fill.
    """
    size = len(rows)
    into: list[Tensor] = []
    others: list[list[Tensor]] = [[] for _ in rows[1:]]
    turn = 0
    for k, first in enumerate(rows[0]):
        column = [row[k] for row in rows]
        if not (reusable[k] and all(_adds_to(first, grad) for grad in column[1:])):
            if turn % size == rank:
                totals[k] = add_up(column)
            turn += 1
            continue
        assert first is not None
        if first.numel() >= _CHUNK and all(g is not None and g.is_contiguous() for g in column):
            start, stop = (first.numel() * r // size for r in (rank, rank + 1))
            into.append(first.view(-1)[start:stop])
            for grads, grad in zip(others, column[1:], strict=True):
                grads.append(grad.view(-1)[start:stop])  # type: ignore[union-attr]
            totals[k] = first
        elif rank == 0:
            into.append(first)
            for grads, grad in zip(others, column[1:], strict=True):
                grads.append(grad)  # type: ignore[arg-type]
            totals[k] = first
    for grads in others:
        if into:
            torch._foreach_add_(into, grads)


def _adds_to(first: Gradient, grad: Gradient) -> bool:
    return (
        first is not None
        and grad is not None
        and grad.dtype == first.dtype
        and grad.layout is torch.strided
        and first.dtype not in _LOW_PRECISION
    )


def add_up(column: Sequence[Gradient]) -> Gradient:
    """Sum what there is in one column, in rank order, into new memory; differentiable."""
    grads = [grad for grad in column if grad is not None]
    if not grads:
        return None
    if len(grads) == 1:
        return grads[0].clone()
    if grads[0].dtype in _LOW_PRECISION and len(grads) > 2:
        wide = grads[0].float()
        for grad in grads[1:]:
            wide = wide + grad.float()
        return wide.to(grads[0].dtype)
    total = grads[0]
    for grad in grads[1:]:
        # Sparse and dense add up only in this order.
        total = grad + total if total.is_sparse and not grad.is_sparse else total + grad
    return total
