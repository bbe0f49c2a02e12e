"""parallel_call: R functions on R argument trees, the machine without split and merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from funcpar import tree
from funcpar._devices import resolve
from funcpar._frame import Frame
from funcpar._joint import call_shards


def parallel_call(
    funs: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    devices: Any = None,
    *,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Call R functions on R argument trees at the same time, one per shard, jointly differentiable.

    This is the machine itself: :func:`pmap` is split, this, and merge. Structures, shapes and
    dtypes may differ from shard to shard. Results are where the functions left them. A tensor that
    several argument trees share is one input, whose gradient is the sum over the shards.

    Args:
        funs: R callables, or one for all shards.
        inputs: R argument trees: a tuple is unpacked as positional arguments, anything else is the
            one argument.
        devices: Where they run, in order; see :func:`pmap`. By default the first R devices, taken
            again from the first where there are fewer.

        weights: R weights, of the shards in :func:`pmean`; equal by default.

    Returns:
        A list of the R results.

    Raises:
        ValueError: Lengths disagree, or a function writes in place to a tensor that shards share.
        TypeError: ``funs`` or ``inputs`` is of another kind.

    Example:
        >>> import torch, funcpar as fp
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> a, b = fp.parallel_call([torch.mul, torch.add], [(w, 3.0), (w, 3.0)])
        >>> (a + b).backward()
        >>> a.item(), b.item(), w.grad.item()
        (6.0, 5.0, 4.0)

    References:
        ``torch.nn.parallel.parallel_apply``, which loses torch.func levels, the autocast dtype and
        exception types, and has no rule for several functions of one graph.
    """
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise TypeError(
            f"parallel_call: inputs is a {type(inputs).__name__}, not a sequence.\n"
            f"Give a list with one argument tree per shard."
        )
    callables = [funs] * len(inputs) if callable(funs) else _as_callables(funs)
    if len(callables) != len(inputs):
        raise ValueError(
            f"parallel_call: {len(callables)} functions and {len(inputs)} argument trees.\n"
            f"Give one argument tree per function."
        )
    if not inputs:
        return []
    chosen = resolve(devices, "parallel_call")
    if devices is None:
        chosen = tuple(chosen[k % len(chosen)] for k in range(len(inputs)))
    if len(chosen) != len(inputs):
        raise ValueError(
            f"parallel_call: {len(inputs)} argument trees and {len(chosen)} devices.\n"
            f"Name one device per argument tree."
        )
    if weights is not None and len(weights) != len(inputs):
        raise ValueError(
            f"parallel_call: {len(inputs)} argument trees and {len(weights)} weights.\n"
            f"Give one weight per argument tree."
        )
    frame = Frame(chosen, weights=None if weights is None else tuple(weights), funs=callables)
    return call_trees(frame, callables, [a if isinstance(a, tuple) else (a,) for a in inputs])


def _as_callables(funs: Any) -> list[Callable[..., Any]]:
    if not isinstance(funs, Sequence) or not all(map(callable, funs)):
        raise TypeError(
            f"parallel_call: funs={funs!r} is not a function or a sequence of functions.\n"
            f"Give one function per argument tree, or one for all."
        )
    return list(funs)


def call_trees(
    frame: Frame, funs: Sequence[Callable[..., Any]], arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Run ``funs[i](*arguments[i])`` as shard i, on trees."""
    specs: list[Any] = [None] * len(funs)

    def body(rank: int, spec: tree.Spec, leaves: list[Any]) -> list[Any]:
        answer, specs[rank] = tree.flatten(funs[rank](*tree.unflatten(spec, leaves)))
        return answer

    flat = [tree.flatten(args) for args in arguments]
    bodies = [partial(body, rank, spec) for rank, (_, spec) in enumerate(flat)]
    answers = call_shards(frame, bodies, [leaves for leaves, _ in flat])
    return [tree.unflatten(spec, answer) for spec, answer in zip(specs, answers, strict=True)]
