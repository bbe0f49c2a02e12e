"""Steps: what is compiled. All that is in this file becomes part of graphs, so dynamo has to like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import tree
from funcpar._differentiate import in_graph
from funcpar._grad import GradientFunction, differentiable
from funcpar._graph import Gradient
from funcpar._reduce import add_up


def plain(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function with args and kwargs."""

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fun(*args, **kwargs)

    return forward


def step(gradient: GradientFunction) -> Callable[..., Any]:
    """Return what computes value, aux and places, and gradients times a seed, of args and kwargs."""

    def forward_and_backward(
        args: tuple[Any, ...], kwargs: dict[str, Any], seed: Tensor
    ) -> tuple[Tensor, Any, list[Gradient]]:
        found = gradient.evaluate_by(
            lambda call, inputs, _: in_graph(_placing(call), inputs, seed), args, kwargs
        )
        return found.value, found.aux, [found.grads[k] for k in differentiable(found.leaves)]

    return forward_and_backward


def whole(
    gradient: GradientFunction,
    axes: Sequence[int | None],
    places: Sequence[int],
    sizes: list[int],
    is_mean: bool,
) -> Callable[..., Any]:
    """Return what computes value and gradients of a whole call, and aux of each shard.

    Args:
        gradient: The gradient function that the shards call.
        axes: Along which dimension each leaf of args and kwargs is split.
        places: Which of them are differentiated.
        sizes: Rows of each shard.
        is_mean: Whether the value is the mean of the shards' values, not their sum.
    """
    one = step(gradient)

    def split_and_merge(
        args: tuple[Any, ...], kwargs: dict[str, Any], seeds: Tensor
    ) -> tuple[Gradient, list[Any], list[Gradient]]:
        leaves, spec = tree.flatten((args, kwargs))
        parts = [
            [leaf for _ in sizes] if axis is None else leaf.split_with_sizes(sizes, axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        values, auxes, rows = [], [], []
        for k, seed in enumerate(seeds.unbind()):
            value, aux, grads = one(*tree.unflatten(spec, [part[k] for part in parts]), seed)
            values.append(value * seed.to(value.dtype) if is_mean else value)
            auxes.append(aux)
            rows.append(grads)
        columns = zip(*rows, strict=True)
        merged = [_merged(list(column), axes[k]) for column, k in zip(columns, places, strict=True)]
        return add_up(values), auxes, merged

    return split_and_merge


def _merged(column: list[Any], axis: int | None) -> Gradient:
    return add_up(column) if axis is None or column[0] is None else torch.cat(column, axis)


def _placing(call: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """Let a function of stand-ins tell which leaves of aux are one of them: its place, or -1."""

    def placing(*stands: Tensor) -> tuple[Tensor, Any]:
        value, aux = call(*stands)
        return value, (aux, tree.map(lambda leaf: _place(leaf, stands), aux))

    return placing


def _place(leaf: Any, stands: Sequence[Tensor]) -> int:
    for k, stand in enumerate(stands):
        if leaf is stand:
            return k
    return -1


def passed(aux: Any, inputs: Sequence[Tensor]) -> Any:
    """Return aux of what a graph calls so, with the differentiated leaves themselves in their places."""
    if aux[0] is None:
        return None
    return tree.map(lambda leaf, place: leaf if place < 0 else inputs[place], *aux)
