"""What an autograd graph reaches, and who else can see a gradient's memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gradient: TypeAlias = Tensor | None

# A leaf under every exchange between shards, so that a backward can be made to run it.
ROOT = torch.zeros((), requires_grad=True)


def reach(outs: Sequence[Tensor]) -> tuple[set[Any], list[Tensor]]:
    """Return the nodes and the leaves of the graph that ``outs`` are made by."""
    nodes = [out.grad_fn for out in outs if out.grad_fn is not None]
    leaves = [out for out in outs if out.requires_grad and out.grad_fn is None]
    seen: set[Any] = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                nodes.append(node)
                if not node.next_functions and hasattr(node, "variable"):
                    leaves.append(node.variable)
    return seen, leaves


def closed_over(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that the graph of ``outs`` reaches and that are not among ``ins``.

    Raises:
        ValueError: Such a leaf has a hook, which would run once in a shard and once outside.
    """
    mine = {id(tensor) for tensor in ins} | {id(ROOT)}
    found = list({id(leaf): leaf for leaf in reach(outs)[1] if id(leaf) not in mine}.values())
    for leaf in found:
        if leaf._backward_hooks:
            raise ValueError(
                f"the function closes over a tensor of shape {tuple(leaf.shape)} that requires a gradient "
                f"and has a hook, which would run once per shard.\nPass it as an argument."
            )
    return found


def owned(grads: Sequence[Gradient]) -> list[bool]:
    """Tell for each gradient of a list whether only that list can see its memory."""
    return [grad is not None and sys.getrefcount(grad) <= _LISTED and _sole_owner(grad) for grad in grads]


def own_all(grads: list[Gradient]) -> list[Gradient]:
    """Return plain, writable gradients that share memory with nothing."""
    mine = owned(grads)
    return [
        grad if is_mine or grad is None else grad.clone() for grad, is_mine in zip(grads, mine, strict=True)
    ]


def _sole_owner(grad: Tensor) -> bool:
    if grad.layout is not torch.strided or grad.requires_grad or grad.is_inference():
        return False
    if not grad.is_contiguous() and not (
        grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)
    ):
        return False
    # One count is the gradient's, the other that of the Python object made here.
    return int(torch._C._storage_Use_Count(grad.untyped_storage()._cdata)) == 2  # type: ignore[attr-defined]


# How many references a tensor has, seen from such a loop, that only a list holds.
_LISTED = [sys.getrefcount(tensor) for tensor in [torch.empty(0)]][0]
