"""Sums of gradients over shards, in rank order, the work shared by the workers.

A sum is written into the first shard's own gradient where nothing else can see that memory, so
that a reduction reads every gradient once and allocates nothing. What autograd returns may be
expanded, may be one tensor under two names, or may belong to the user (a custom Function can
return what it keeps): then the sum is a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar._graph import Gradient, is_wrapped

# A leaf below this many entries is summed by one worker.
_CHUNK = 1 << 15
# Accumulating these in their own dtype would round once per shard.
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def are_small(leaves: Iterable[Any]) -> bool:
    """Tell whether one thread sums the gradients of such leaves, whoever else is there."""
    return not any(isinstance(leaf, Tensor) and leaf.numel() >= _CHUNK for leaf in leaves)


def reduce_rows(rows: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Return the sum over shards of each gradient, in new memory: what is small is not worth more thought."""
    first, *others = rows
    # Of several tensors at once torch knows no sum that vmap, or a vectorized backward, can see into.
    plain = first and others and torch._C._functorch.peek_interpreter_stack() is None
    if plain and all(
        grad is not None and not is_wrapped(grad) and _adds_to(first[k], grad)
        for row in rows for k, grad in enumerate(row)
    ):  # fmt: skip
        total: Any = first
        for row in others:
            total = torch._foreach_add(total, row)  # type: ignore[arg-type]
        return list(total)
    return [add_up(column) for column in zip(*rows, strict=True)]


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
    first, *others = rows
    large = [
        k for k, grad in enumerate(first)
        if reusable[k] and grad is not None and grad.numel() >= _CHUNK
        and grad.is_contiguous() and all(_adds_to(grad, row[k], contiguous=True) for row in others)
    ]  # fmt: skip
    for k in large:
        totals[k] = first[k]
    _add_into([_part(first[k], rank, len(rows)) for k in large],
              [[_part(row[k], rank, len(rows)) for k in large] for row in others])  # fmt: skip
    if rank == 0:
        _reduce_rest(first, others, reusable, set(large), totals)


def _reduce_rest(
    first: Sequence[Gradient],
    others: Sequence[Sequence[Gradient]],
    reusable: Sequence[bool],
    done: set[int],
    totals: dict[int, Gradient],
) -> None:
    """Sum the small leaves, whose sharing out would cost more than they do, and the odd ones."""
    quick = [
        k for k, grad in enumerate(first)
        if reusable[k] and k not in done and all(_adds_to(grad, row[k]) for row in others)
    ]  # fmt: skip
    into = [first[k] for k in quick]
    _add_into(into, [[row[k] for k in quick] for row in others])
    totals.update(zip(quick, into, strict=True))
    done.update(quick)
    for k, grad in enumerate(first):
        if k not in done:
            totals[k] = add_up([grad, *(row[k] for row in others)])


def _add_into(into: list[Any], others: list[list[Any]]) -> None:
    for grads in others:
        if into:
            torch._foreach_add_(into, grads)


def add_in_place(column: Sequence[Gradient]) -> bool:
    """Add the others to the first, in its memory, if that is right; tell whether it was."""
    first, *others = column
    if not all(_adds_to(first, grad) for grad in others):
        return False
    _add_into([first], [[grad] for grad in others])
    return True


def _part(grad: Gradient, rank: int, size: int) -> Tensor:
    assert grad is not None
    start, stop = (grad.numel() * r // size for r in (rank, rank + 1))
    return grad.view(-1)[start:stop]


def _adds_to(first: Gradient, grad: Gradient, contiguous: bool = False) -> bool:
    """Tell whether a gradient can be added in place, entry by entry, without rounding too often."""
    if first is None or grad is None or grad.dtype is not first.dtype or first.dtype in _LOW_PRECISION:
        return False
    if grad.device != first.device or first.layout is not torch.strided:
        return False
    return grad.layout is torch.strided and (not contiguous or grad.is_contiguous())


def add_up(column: Sequence[Gradient]) -> Gradient:
    """Sum what there is in one column, in rank order, into new memory; differentiable."""
    grads = [grad for grad in column if grad is not None]
    if not grads:
        return None
    if not grads[0].is_cpu:
        grads = [grad.to(grads[0].device) for grad in grads]
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
