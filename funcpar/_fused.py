"""pmap of a gradient function: every shard runs forward and backward of its own rows.

The seed of a shard's backward is its share of the mean, so the gradients of all shards add up to
that of the whole, whatever the function exchanges between shards. Gradients of replicated
arguments are summed by the workers, each a share; those of split arguments are joined.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from funcpar import _streams, tree
from funcpar._allreduce import sum_over_shards
from funcpar._frame import Frame
from funcpar._grad import Evaluation, GradientFunction, handled
from funcpar._graph import Gradient
from funcpar._group import Call, call_site, find
from funcpar._joint import call_shards
from funcpar._merge import Merge
from funcpar._reduce import add_up
from funcpar._split import Split


def is_pmapped(fun: Any) -> bool:
    """Tell whether a function is what pmap returned, and no wrapper of it."""
    return getattr(fun, "__funcpar__", (None, None))[1] == id(fun)


def gradient_within(fun: Callable[..., Any]) -> tuple[GradientFunction | None, bool]:
    """Return the gradient function under partial and wraps, and whether code of the user wraps it."""
    wrapped = False
    while not isinstance(fun, GradientFunction):
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif hasattr(fun, "__wrapped__") and not is_pmapped(fun):
            fun, wrapped = fun.__wrapped__, True
        else:
            return None, False
    return fun, wrapped


def specs_of(call: str, gradient: GradientFunction, out_axes: Any) -> tuple[str, Any]:
    """Return what ``out_axes`` says of the value and of aux.

    Raises:
        ValueError: The value has a spec under which there is no one gradient.
    """
    value, aux = out_axes, out_axes
    if gradient.has_aux and isinstance(out_axes, tuple | list) and len(out_axes) == 2:
        value, aux = out_axes
    if value not in ("auto", "mean", "sum"):
        raise ValueError(
            f"{call}: out_axes={out_axes!r} asks for a value that is neither a mean nor a sum over shards, "
            f'and {gradient.call} differentiates one number.\nGive "mean" or "sum" for the value.'
        )
    return ("mean" if value == "auto" else value), aux


@dataclass(slots=True)
class Fused:
    """One call of a pmapped gradient function on several shards.

    Attributes:
        gradient: The gradient function.
        fun: What pmap was given: it, or a partial or wrapper of it.
        split: What each shard gets.
        frame: Where the shards run.
        merge: How outputs are merged.
        value_spec: ``"mean"`` or ``"sum"``.
        aux_spec: A prefix of aux.
        found: What each shard evaluated.
        totals: Sums over shards of the gradients of replicated leaves.
    """

    gradient: GradientFunction
    fun: Callable[..., Any]
    split: Split
    frame: Frame
    merge: Merge
    value_spec: str
    aux_spec: Any
    found: list[Any] = field(default_factory=list)
    totals: dict[int, Gradient] = field(default_factory=dict)

    def run(self) -> Any:
        """Return what the gradient function would return for the whole."""
        size = len(self.split.devices)
        if size == 1 and not self.gradient.has_aux and self.frame.is_cpu and self.merge.donation is None:
            args, kwargs = self.split.rebuild(self.split.leaves[0])
            return self.frame.run([lambda: self.fun(*args, **kwargs)])[0]
        self.found = [None] * size
        answers = call_shards(
            self.frame, [functools.partial(self._body, rank) for rank in range(size)], self.split.leaves
        )
        if self.merge.donation is not None:
            self.split.leaves = []
        structures = [aux for _, aux, *_ in self.found]
        count = structures[0].num_leaves
        values = [answer[0] for answer in answers]
        auxes = [
            tree.unflatten(spec, self.split.unmarked(answer[1 : 1 + spec.num_leaves]))
            for spec, answer in zip(structures, answers, strict=True)
        ]
        found: Evaluation = self.found[0][0]
        found.value = self.merge.column(self.value_spec, values, "the value")
        found.aux = self.merge.trees(self.aux_spec, auxes) if self.gradient.has_aux else None
        rows = [answer[1 + count :] for answer in answers]
        return self.gradient.answer(found, self._gradients(rows))

    def _body(self, rank: int, leaves: list[Any]) -> list[Any]:
        args, kwargs = self.split.rebuild(leaves)
        with handled(self.gradient, self._evaluate):
            found: Evaluation = self.fun(*args, **kwargs)
        aux_leaves, aux_spec = tree.flatten(found.aux)
        axes = self._axes(found, leaves)
        self.found[rank] = (found, aux_spec, axes, self._places(found, leaves))
        shared, own, _ = self._sum(found, axes)
        row = [theirs if mine is None else mine for theirs, mine in zip(shared, own, strict=True)]
        return [found.value, *self.split.marked(leaves, aux_leaves), *row]

    def _sum(self, found: Evaluation, axes: list[int | None]) -> tuple[list[Gradient], list[Gradient], bool]:
        """Sum over shards, unless a gradient is to stay part of a graph.

        Returns what was not summed, of replicated leaves and of split ones, and whether it was summed.
        """
        ready = not any(t.requires_grad for t in (found.value, *found.grads) if t is not None)
        own = [None if axis is None else grad for grad, axis in zip(found.grads, axes, strict=True)]
        shared = [grad if axis is None else None for grad, axis in zip(found.grads, axes, strict=True)]
        found.grads = []  # Memory that one list alone can see may be summed into.
        if sum_over_shards(shared, self.totals, ready):
            return [None] * len(own), own, True
        return shared, own, False

    @contextlib.contextmanager
    def reducing(self, leaves: list[Any]) -> Iterator[None]:
        """Within a shard: let the gradient function, called by code of the user, return the whole's.

        Every shard gets the same objects, but for gradients of split arguments: those of its rows.
        """

        def handler(gradient: GradientFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found = self._evaluate(gradient, args, kwargs)
            known = set(map(id, leaves))
            if not all(id(leaf) in known for leaf in found.leaves):
                raise ValueError(
                    f"{self.merge.call}: code around {gradient.call} passes it a tensor that is no argument "
                    f"of the mapped function, so that it cannot be told whether it has rows.\n"
                    f"Pass the arguments on as they are, or do what is done to them inside the function."
                )
            axes = self._axes(found, leaves)
            _, own, summed = self._sum(found, axes)
            shard = find(None, gradient.call)
            if not summed:
                raise RuntimeError(
                    f"{self.merge.call}: what {gradient.call} returns depends on tensors that require a "
                    f"gradient, and code around it cannot be given a gradient that is part of a graph.\n"
                    f"Detach the arguments, call it under torch.no_grad(), or map {gradient.call} itself."
                )
            values = shard.group.exchange(
                shard.rank, Call(gradient.call, "value", call_site()), found.value, limited=False
            )
            whole = None
            if shard.rank == 0:
                value = self.merge.column(self.value_spec, values, "the value")
                whole = value, gradient.finish(found.leaves, [self.totals.get(k) for k in range(len(axes))])
            call = Call(gradient.call, "result", call_site())
            found.value, grads = shard.group.exchange(shard.rank, call, whole, limited=False)[0]
            if not shard.device.is_cpu:
                place = shard.device.torch_device
                found.value = _streams.bring(found.value, place)
                grads = [g if g is None else _streams.bring(g, place) for g in grads]
            mine = gradient.finish(found.leaves, own)
            return gradient.answer(
                found, [g if axis is None else m for g, m, axis in zip(grads, mine, axes, strict=True)]
            )

        with handled(self.gradient, handler):
            yield

    def _evaluate(
        self, gradient: GradientFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Evaluation:
        if self.value_spec == "sum" or len(self.merge.weights) == 1:
            return gradient.evaluate(args, kwargs)
        return gradient.evaluate(args, kwargs, self.merge.shares()[find(None, gradient.call).rank])

    def _axes(self, found: Evaluation, leaves: list[Any]) -> list[int | None]:
        """Return along which dimension each differentiated leaf was split."""
        known = {id(leaf): axis for leaf, axis in zip(leaves, self.split.axes, strict=True)}
        return [known.get(id(leaf)) for leaf in found.leaves]

    def _places(self, found: Evaluation, leaves: list[Any]) -> list[int | None]:
        """Return the place among all arguments of each differentiated leaf, on accelerators."""
        known = {} if self.frame.is_cpu else {id(leaf): k for k, leaf in enumerate(leaves)}
        return [known.get(id(leaf)) for leaf in found.leaves]

    def _gradients(self, rows: Sequence[list[Gradient]]) -> list[Gradient]:
        """Return the gradient of each leaf: a sum over shards, or the rows of all."""
        first, _, axes, _ = self.found[0]
        whole = [self.totals.get(k) for k in range(len(axes))]
        if not self.frame.is_cpu:
            _streams.received(whole)
        for k, axis in enumerate(axes):
            column = [row[k] for row in rows]
            if axis is None and whole[k] is None:
                whole[k] = add_up(column)
            elif axis is not None:
                leaves = [found.leaves[k] for found, *_ in self.found]
                parts: list[Any] = self.gradient.finish(leaves, column)
                if isinstance(parts[0], Tensor):
                    whole[k] = torch.cat([part.to(parts[0].device) for part in parts], axis)
        whole = self.gradient.finish(first.leaves, whole)
        if self.merge.donation is not None:
            whole = [self.merge.donation.settle(grad) for grad in whole]
        return whole if self.frame.is_cpu else self._at_home(whole)

    def _at_home(self, grads: list[Gradient]) -> list[Gradient]:
        """Return the gradients where the caller's arguments live."""
        homes = [None if leaf is None else self.split.whole[leaf] for leaf in self.found[0][3]]
        return [
            _streams.home(grad, home.device) if grad is not None and isinstance(home, Tensor) else grad
            for grad, home in zip(grads, homes, strict=True)
        ]
