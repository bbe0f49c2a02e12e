"""The gradient of a function of flat leaves: one backward pass, or torch.func's vjp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from funcpar import tree
from funcpar._exchange import complete, here, keep, refuse_foreign, stand_in
from funcpar._graph import ROOT, Gradient, GradientHook, backward, closed_over, refuse_hidden
from funcpar._world import in_dual_level

# How much the value counts, known when it is: None means 1.
Seed: TypeAlias = Callable[[], float] | None


def by_autograd(
    call: Callable[..., tuple[Tensor, Any]],
    leaves: list[Tensor],
    seed: Seed,
    hooks: Sequence[GradientHook | None] = (),
) -> tuple[Tensor, Any, list[Gradient]]:
    """Return the value, aux and gradients; ``hooks`` are told those of the leaves as they come."""
    outer = torch.is_grad_enabled()
    dual = in_dual_level()
    joined = dual or (outer and any(leaf.requires_grad for leaf in leaves))
    tokens: list[Gradient] = []
    around, here.tokens = here.tokens, tokens
    try:  # Not a block of its own: Ctrl-C may come as one is left.
        with _recorded_graph(outer):
            stands = [_stand_in(leaf, joined, dual) for leaf in leaves]
            stand_in(stands)
            value, aux = call(*stands)
            results = [value]
            if aux is not None:
                # What the function passes through is the argument, not its stand-in.
                passed = {id(stand): leaf for stand, leaf in zip(stands, leaves, strict=True)}
                aux = tree.map(lambda leaf: passed.get(id(leaf), leaf), aux)
                results += filter(_has_graph, tree.leaves(aux))
            if not joined:
                others = closed_over(results, stands)
                refuse_foreign(others)
                joined = outer and bool(others)
            if not joined and any(hooks):
                _register(value, zip(stands, hooks, strict=True))
            grads = _backward(value, stands, seed, tokens, joined)
    finally:
        here.tokens = around
    if joined:
        keep(tokens)
        return value, aux, grads
    if aux is not None:
        known = set(map(id, leaves))
        aux = tree.map(lambda leaf: leaf if id(leaf) in known else _detached(leaf), aux)
    return value.detach().clone(), aux, grads


def _register(value: Tensor, pairs: Iterable[tuple[Tensor, GradientHook | None]]) -> None:
    """Let hooks be told gradients of stand-ins, of the backward from ``value`` alone.

    A Function of the user's may run a backward of its own in it, which ends at the same leaves.
    """
    begun: list[int] = []
    if value.requires_grad:
        value.register_hook(lambda _: begun.append(torch._C._current_graph_task_id()))  # type: ignore[no-untyped-call]
    for stand, hook in pairs:
        if hook is not None:
            hook.backward = begun
            stand.register_hook(hook)  # type: ignore[no-untyped-call]


def _backward(
    value: Tensor, stands: list[Tensor], seed: Seed, tokens: list[Gradient], joined: bool
) -> list[Gradient]:
    # What does not count has no gradient: 0 times 0/0 would be NaN.
    factor = 1.0 if seed is None else seed()
    starts = [value] if value.requires_grad and factor != 0.0 else []
    seeds = [torch.full_like(value, factor) for value in starts]
    for token in complete(starts, tokens):
        starts.append(token)
        seeds.append(torch.zeros_like(token))
    if not starts or not stands:
        return [None] * len(stands)
    ins = [*stands, ROOT] if tokens else stands
    grads = backward(starts, ins, seeds, create=joined)
    if any(grad is None for grad in grads):
        refuse_hidden(starts)
    return grads[: len(stands)]


def by_torch_func(
    call: Callable[..., tuple[Tensor, Any]],
    leaves: list[Tensor],
    seed: Seed,
    hooks: Sequence[GradientHook | None] = (),
) -> tuple[Tensor, Any, list[Gradient]]:
    """The same by torch.func, where there is nothing for hooks to be told."""
    rest: list[Any] = []

    factor = 1.0 if seed is None else seed()
    if factor == 0.0:
        value, aux = call(*leaves)
        return value, aux, [None] * len(leaves)

    def flat(*stands: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, aux = call(*stands)
        aux_leaves, spec = tree.flatten(aux)
        tensors = tuple(leaf for leaf in aux_leaves if isinstance(leaf, Tensor))
        rest[:] = [spec, aux_leaves]
        return value, tensors

    value, pull, tensors = cast(Any, torch.func.vjp(flat, *leaves, has_aux=True))
    spec, aux_leaves = rest
    plain = iter(tensors)
    aux = tree.unflatten(spec, [next(plain) if isinstance(leaf, Tensor) else leaf for leaf in aux_leaves])
    return value, aux, list(pull(torch.full_like(value, factor)))


def in_graph(
    call: Callable[..., tuple[Tensor, Any]], leaves: list[Tensor], seed: Tensor
) -> tuple[Tensor, Any, list[Gradient]]:
    """The same in a graph that dynamo traces, forward and backward; only the leaves are differentiated."""
    with torch.enable_grad():
        stands = [leaf.detach().requires_grad_() for leaf in leaves]
        value, aux = call(*stands)
        grads: list[Gradient] = [None] * len(stands)
        if value.requires_grad and stands:
            start = seed.to(value.device, value.dtype)
            grads = list(torch.autograd.grad([value], stands, [start], allow_unused=True))
    return value.detach(), tree.map(_detached, aux), grads


def _stand_in(leaf: Tensor, joined: bool, dual: bool) -> Tensor:
    """Make a tensor that the function alone sees, so that its gradient is this argument's alone."""
    if dual or (joined and leaf.requires_grad):
        stand = leaf.view_as(leaf)
        return stand if stand.requires_grad else stand.requires_grad_()
    if leaf.is_inference():
        leaf = leaf.clone()
    return leaf.detach().requires_grad_()


def _recorded_graph(is_recording: bool) -> AbstractContextManager[None]:
    """Record a graph, whatever the caller's mode."""
    if is_recording and not torch.is_inference_mode_enabled():
        return nullcontext()
    return _recorded_graph_anew()


@contextmanager
def _recorded_graph_anew() -> Iterator[None]:
    threads = torch._C._is_multithreading_enabled()
    # Entering inference mode, off too, lets backward use the engine's own threads again; in a worker
    # it must stay in the worker.
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(threads), torch.enable_grad():
        yield


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def recordable(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_inference():
        with torch.inference_mode(False):
            return leaf.clone()
    return leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
