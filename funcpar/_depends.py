"""What a shard's graph depends on that is no argument of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar._closure import computed_tensors
from funcpar._exchange import refuse_foreign
from funcpar._graph import closed_over, reach


def sequence_number() -> int:
    """Return the number that the next node of this thread's graphs gets."""
    return int(torch._C._autograd._get_sequence_nr())


def depended_on(
    funs: Sequence[Callable[..., Any]], outs: list[Tensor], ins: list[Tensor], start: int
) -> tuple[list[Tensor], set[Any], set[Any]]:
    """Return what a shard's graph depends on beside ``ins``, its nodes, and those that were there before.

    A tensor that was computed outside is an input like a leaf, if it is found in the function;
    otherwise the nodes that made it look like the shard's own, up to leaves further out.
    """
    leaves = closed_over(outs, ins) if outs else []
    if not leaves:
        return [], set(), set()
    refuse_foreign(leaves)
    computed = computed_tensors(funs)
    nodes, _ = reach(outs, [*ins, *computed])
    below = {node for each in nodes for node, _ in each.next_functions}
    used = [tensor for tensor in computed if tensor.grad_fn in below or any(out is tensor for out in outs)]
    made = range(start, sequence_number())
    nodes = {node for node in nodes if node.next_functions}
    outside = {node for node in nodes if node._sequence_nr() not in made}
    return [*used, *closed_over(outs, [*ins, *used])], nodes, outside


def check_closed_over(
    where: str, tensors: Sequence[Tensor], outside: set[Any], nodes: set[Any], seen: set[Any]
) -> None:
    """Refuse what a shard depends on in a way that would lose or repeat a gradient.

    ``seen`` are the nodes of the shards before, to which this shard's are added.

    Raises:
        ValueError: A tensor that was computed outside was not found, or a hook would run once per shard.
    """
    # Numbers of nodes are counted by thread, so one made elsewhere may look like the shard's own; what
    # two shards share is neither's.
    foreign = outside | (nodes & seen)
    seen |= nodes
    for tensor in tensors:
        if tensor._backward_hooks or tensor.retains_grad:
            raise ValueError(
                f"{where}: the function closes over a tensor of shape {tuple(tensor.shape)} that requires a "
                f"gradient and has a hook or retains its gradient, once per shard.\nPass it as an argument."
            )
    if foreign:
        raise ValueError(
            f"{where}: the function depends on a tensor that was computed outside of it, by "
            f"{next(iter(foreign)).name()}, and is no argument.\nPass it as an argument, or detach it."
        )
