"""Linear maps between what each process has and what all have, as differentiable functions.

A value that all processes have counts once: its cotangent is the same in all of them. So a sum over
processes hands its cotangent on as it is (:class:`Copied`), and what all share sums the cotangents of
all (:class:`Summed`): each is the other's transpose. Rows that each process has of its own, and the
rows of all, are such a pair too (:class:`Gathered`, :class:`Scattered`), there with cotangents of
one's own on both sides. All work under torch.func and forward mode, to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar._buckets import Sums
from funcpar._graph import Gradient, apply, is_smooth
from funcpar._link import Link


def summed(
    link: Link, call: str, leaves: Sequence[Tensor], totals: list[Tensor] | None = None
) -> list[Tensor]:
    """Return each tensor's sum over processes: ``totals``, if they are known and only derivatives are not."""
    return list(apply(Summed, link, call, totals, *leaves)) if leaves else []


def copied(link: Link, call: str, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that all processes have, so that their gradients are summed over processes."""
    return list(apply(Copied, link, call, link.turn, *leaves)) if leaves else []


def gathered(link: Link, call: str, counts: tuple[int, ...], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Join tensors of all processes along dimension 0, of which process p has ``counts[p]``."""
    return list(apply(Gathered, link, call, counts, *leaves)) if leaves else []


class _Linear(torch.autograd.Function):
    """A linear map of tensors, whose first ``num_options`` arguments say which.

    Subclasses say what it does to values in ``forward``, and what the transpose does in ``pull``.
    """

    num_options = 3
    # Where vmap puts its dimension: behind the one that processes are joined along.
    batch_dim = 0

    @staticmethod
    def pull(options: tuple[Any, ...], cotangents: list[Gradient], shapes: Any) -> list[Gradient]:
        raise NotImplementedError

    @classmethod
    def of(cls, options: tuple[Any, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(apply(cls, *options, *tensors)) if tensors else []

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.options = inputs[: cls.num_options]
        ctx.kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in inputs[cls.num_options :]]
        ctx.outs = [(out.shape, out.dtype, out.device) for out in output]

    @classmethod
    def backward(cls, ctx: Any, *cotangents: Gradient) -> tuple[Gradient, ...]:
        return (*[None] * cls.num_options, *cls.pull(ctx.options, list(cotangents), ctx.outs))

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Gradient) -> tuple[Gradient, ...]:
        given = _filled(tangents[cls.num_options :], ctx.kinds)
        places = [k for k, tangent in enumerate(given) if is_smooth(tangent)]
        found: list[Gradient] = [None] * len(given)
        outs = cls.of(cls._tangents(ctx.options), [given[k] for k in places])
        for k, out in zip(places, outs, strict=True):
            found[k] = out
        return tuple(found)

    @classmethod
    def _tangents(cls, options: tuple[Any, ...]) -> tuple[Any, ...]:
        return options

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
        dim = cls.batch_dim
        moved = []
        for leaf, at in zip(inputs[cls.num_options :], in_dims[cls.num_options :], strict=True):
            shape = (*leaf.shape[:dim], info.batch_size, *leaf.shape[dim:])
            moved.append(leaf.unsqueeze(dim).expand(shape) if at is None else leaf.movedim(at, dim))
        outs = cls.of(cls._tangents(inputs[: cls.num_options]), moved)
        return tuple(outs), (dim,) * len(outs)


class Summed(_Linear):
    """Sums over processes; options: the link, the call, the sums if they are known."""

    num_options = 3

    @staticmethod
    def forward(link: Link, call: str, totals: list[Tensor] | None, *leaves: Tensor) -> tuple[Tensor, ...]:
        if totals is not None:
            return tuple(totals)
        return tuple(Sums.of(link, call, leaves))

    @staticmethod
    def pull(options: tuple[Any, ...], cotangents: list[Gradient], shapes: Any) -> list[Gradient]:
        link, call, _ = options
        places = [k for k, given in enumerate(cotangents) if given is not None and is_smooth(given)]
        grads: list[Gradient] = [None] * len(cotangents)
        for k, grad in zip(places, copied(link, call, [cotangents[k] for k in places]), strict=True):  # type: ignore[misc]
            grads[k] = grad
        return grads

    @classmethod
    def _tangents(cls, options: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*options[:2], None)


class Copied(_Linear):
    """What all processes have; options: the link, the call, the number of the call."""

    num_options = 3

    @staticmethod
    def forward(link: Link, call: str, turn: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def pull(options: tuple[Any, ...], cotangents: list[Gradient], shapes: Any) -> list[Gradient]:
        link, call, turn = options
        there = [given is not None and is_smooth(given) for given in cotangents]
        with link.call(f"the backward of {call}"):
            # The number of the forward tells two backwards of one function apart.
            everyone = link.meet(f"the backward of {call}", there, f"of its call {turn}")
            wanted = [any(column) for column in zip(*everyone, strict=True)]
            places = [k for k, is_wanted in enumerate(wanted) if is_wanted]
            given = _filled([cotangents[k] for k in places], [shapes[k] for k in places])
            grads: list[Gradient] = [None] * len(cotangents)
            for k, grad in zip(places, Summed.of((link, call, None), given), strict=True):
                grads[k] = grad
        return grads


class Gathered(_Linear):
    """The rows of all processes; options: the link, the call, how many rows each has."""

    num_options = 3
    batch_dim = 1

    @staticmethod
    def forward(link: Link, call: str, counts: tuple[int, ...], *leaves: Tensor) -> tuple[Tensor, ...]:
        rows = link.values(call, list(leaves))
        return tuple(
            torch.cat([row.to(leaves[0].device) for row in column]) for column in zip(*rows, strict=True)
        )

    @staticmethod
    def pull(options: tuple[Any, ...], cotangents: list[Gradient], shapes: Any) -> list[Gradient]:
        # Materialized: the processes must send the same.
        return list(Scattered.of(options, _filled(cotangents, shapes)))


class Scattered(_Linear):
    """One's own rows of the sum over processes; options as of Gathered."""

    num_options = 3
    batch_dim = 1

    @staticmethod
    def forward(link: Link, call: str, counts: tuple[int, ...], *leaves: Tensor) -> tuple[Tensor, ...]:
        start = sum(counts[: link.index])
        totals = Sums.of(link, f"the transpose of {call}", leaves)
        return tuple(total[start : start + counts[link.index]].clone() for total in totals)

    @staticmethod
    def pull(options: tuple[Any, ...], cotangents: list[Gradient], shapes: Any) -> list[Gradient]:
        return list(Gathered.of(options, _filled(cotangents, shapes)))


def _filled(tensors: Sequence[Gradient], kinds: Sequence[Any]) -> list[Tensor]:
    return [
        torch.zeros(shape, dtype=dtype, device=device) if tensor is None else tensor
        for tensor, (shape, dtype, device) in zip(tensors, kinds, strict=True)
    ]
