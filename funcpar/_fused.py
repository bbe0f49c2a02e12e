"""pmap of a gradient function: every shard runs forward and backward of its own rows.

The seed of a shard's backward is its share of the mean, so the gradients of all shards add up to
that of the whole, whatever the function exchanges between shards. Gradients of replicated
arguments are summed by the workers, each a share; those of split arguments are joined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from funcpar import _streams, tree
from funcpar._ahead import Ahead
from funcpar._allreduce import sum_over_shards
from funcpar._asked import handled
from funcpar._bundle import Bundle, State
from funcpar._compile import Step
from funcpar._frame import Frame
from funcpar._grad import Evaluation, GradientFunction
from funcpar._graph import Gradient
from funcpar._group import find
from funcpar._joint import call_shards
from funcpar._merge import Merge
from funcpar._overlap import Overlap
from funcpar._reduce import are_small, reduce_rows
from funcpar._route import Route
from funcpar._span import Span
from funcpar._split import Split

_NO_AUX = tree.flatten(None)


@dataclass(frozen=True, slots=True)
class Found:
    """What one shard evaluated: the structure of its aux, and the place of each leaf among all arguments."""

    evaluation: Evaluation
    aux: tree.Spec
    places: list[int | None]


@dataclass(slots=True)
class Fused:
    """One call of a pmapped gradient function.

    Attributes:
        gradient: The gradient function.
        fun: What pmap was given: it, or a partial or wrapper of it.
        split: What each shard gets.
        frame: Where the shards run.
        merge: How outputs are merged.
        value_spec: ``"mean"`` or ``"sum"``.
        aux_spec: A prefix of aux.
        compiled: The gradient function compiled, None if it is not.
        found: What each shard evaluated.
        totals: Sums over shards of the gradients of replicated leaves.
        overlap: Sums over processes that are made while backward runs, None if there are no others.
        value: The value of all processes, None where it is merged.
        order: The differentiated leaves in an order that all processes know.
        ahead: Sums over accelerators that are made while backward runs, None where there are none.
        is_small: Whether the caller sums the gradients, so that shards need not meet.
    """

    gradient: GradientFunction
    fun: Callable[..., Any]
    split: Split
    frame: Frame
    merge: Merge
    value_spec: str
    aux_spec: Any
    compiled: Step | None = None
    found: dict[int, Found] = field(default_factory=dict)
    totals: dict[int, Gradient] = field(default_factory=dict)
    overlap: Overlap | None = None
    value: Tensor | None = None
    order: Sequence[int] = ()
    ahead: Ahead | None = field(init=False, default=None)
    is_small: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if not self.frame.is_cpu and self.compiled is None:
            self.ahead = Ahead.of(self.frame.devices)

    @property
    def is_local(self) -> bool:
        """Whether the gradient function itself, called in the one shard there is, gives the answer."""
        return self.merge.is_alone() and self.compiled is None

    def run(self) -> Any:
        """Return what the gradient function would return for the whole."""
        size, span = len(self.split.devices), self.merge.span
        plain = self.frame.is_cpu and self.merge.donation is None
        if self.is_local and not self.gradient.has_aux and plain:
            args, kwargs = self.split.rebuild(self.split.leaves[0])
            return self.frame.run([lambda: self.fun(*args, **kwargs)])[0]
        bodies = [functools.partial(self._body, place) for place in range(size)]
        if span is not None:
            route = self._route(span)
            self.order = route.order
            if not span.is_recorded:
                return self._overlapped(bodies, span, route)
            span.open()
            self.split.share(span.copied)
        shared = [leaf for leaf, axis in zip(self.split.whole, self.split.axes, strict=True) if axis is None]
        self.is_small = self.frame.is_cpu and are_small(shared)
        if span is None and self.compiled is not None:
            return self._compiled(self.compiled, bodies)
        return self._answer(call_shards(self.frame, bodies, self.split.leaves))

    def _compiled(self, step: Step, bodies: Sequence[Any]) -> Any:
        """Return what compiled shards give, by one graph for all once that is known to give the same."""
        bundle = self._bundle(step)
        if bundle is not None and bundle.state is State.RIGHT:
            answer = self._bundled(step, bundle)
            if bundle.state is State.RIGHT:
                return answer
        # What is compiled is part of no graph, and need not be searched for one.
        answer = self._answer(call_shards(self.frame, bodies, self.split.leaves, is_joined=False))
        bundle = self._bundle(step)  # Now it is known how long a shard takes.
        if bundle is not None and bundle.state is State.NEW:
            bundle.settle(answer, self._bundled(step, bundle))
        return answer

    def _bundle(self, step: Step) -> Bundle | None:
        """Return the one graph for all shards, if there may be one."""
        is_plain = self.merge.donation is None and self.fun is self.gradient and self.frame.pace is not None
        if not is_plain or not self.is_small or not all(self.merge.weights):
            return None
        return step.bundle(self.split, self.value_spec == "mean")

    def _bundled(self, step: Step, bundle: Bundle) -> Any:
        """Return what all shards give, from one graph, or None."""
        shares = self.merge.shares() if self.value_spec == "mean" else [1.0] * len(self.split.devices)
        found = step.evaluate_all(bundle, self.split, shares)
        if found is None:
            return None
        found.aux = self.merge.trees(self.aux_spec, found.aux, root="aux") if self.gradient.has_aux else None
        return self.gradient.answer(found, self.gradient.finish(found.leaves, found.grads))

    def _overlapped(self, bodies: Sequence[Any], span: Span, route: Route) -> Any:
        """Return the same, gradients having been summed over processes while backward ran."""
        while True:
            self.overlap = Overlap(span, self.frame.devices, route, self.value_spec == "mean")
            try:
                answers = call_shards(self.frame, bodies, self.split.leaves, is_joined=False)
                totals = self.overlap.totals()
            except BaseException:
                self.overlap.abandon()
                raise
            if totals is not None:
                self.value, self.totals = totals
                return self._answer(answers)
            span.open()  # The weights of all are asked for; if all are 0, all count the same.

    def _route(self, span: Span) -> Route:
        """Return how the gradients leave, found out once for all calls alike."""
        # What a partial holds may be another tree in the next call, and is no part of the signature.
        if span.signature.route is not None and self.fun is self.gradient:
            return span.signature.route
        found: list[Any] = []

        def handler(gradient: GradientFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found[:] = gradient.differentiated(args, kwargs)

        args, kwargs = self.split.rebuild(self.split.leaves[0])
        with handled(self.gradient, handler):
            self.fun(*args, **kwargs)
        leaves, spec = found
        axes = self.axes(self.places(leaves, self.split.leaves[0]))
        route = Route.of(leaves, axes, spec.order(), self.frame.devices[0].torch_device)
        span.signature.route = route
        return route

    def _answer(self, answers: list[list[Any]]) -> Any:
        if self.gradient.has_aux:
            answers = [self.split.unmarked(answer) for answer in answers]
        if self.merge.donation is not None:
            self.split.leaves = []  # What is held here could not be given away.
            self.merge.donation.open([*answers, list(self.totals.values())])
        found = self.found[0].evaluation
        if self.value is None:
            found.value = self.merge.column(self.value_spec, [answer[0] for answer in answers], "the value")
        else:
            found.value = self.value
        if self.gradient.has_aux:
            structures = [self.found[place].aux for place in range(len(answers))]
            auxes = [
                tree.unflatten(spec, answer[1 : 1 + spec.num_leaves])
                for spec, answer in zip(structures, answers, strict=True)
            ]
            found.aux = self.merge.trees(self.aux_spec, auxes, root="aux")
        rows = [answer[1 + self.found[0].aux.num_leaves :] for answer in answers]
        return self.gradient.answer(found, self._gradients(rows))

    def _body(self, place: int, leaves: list[Any]) -> list[Any]:
        args, kwargs = self.split.rebuild(leaves)
        with handled(self.gradient, functools.partial(self.evaluate, leaves)):
            found: Evaluation = self.fun(*args, **kwargs)
        aux_leaves, aux_spec = tree.flatten(found.aux) if self.gradient.has_aux else _NO_AUX
        is_asked = place == 0 or not (self.is_small or self.overlap)
        places = self.places(found.leaves, leaves) if is_asked else []
        self.found[place] = Found(found, aux_spec, places)
        if self.overlap is not None:
            self.overlap.end(place, found.value, found.grads)
            return [found.value, *self.split.marked(leaves, aux_leaves), *found.grads]
        if self.is_small:
            row, found.grads = found.grads, []
        else:
            shared, own, _ = self.sum(found, self.axes(places))
            row = [theirs if mine is None else mine for theirs, mine in zip(shared, own, strict=True)]
        return [found.value, *self.split.marked(leaves, aux_leaves), *row]

    def sum(self, found: Evaluation, axes: list[int | None]) -> tuple[list[Gradient], list[Gradient], bool]:
        """Sum over shards, unless a gradient is to stay part of a graph.

        Returns what was not summed, of replicated leaves and of split ones, and whether it was summed.
        """
        ready = not any(t.requires_grad for t in (found.value, *found.grads) if t is not None)
        own = [None if axis is None else grad for grad, axis in zip(found.grads, axes, strict=True)]
        shared = [grad if axis is None else None for grad, axis in zip(found.grads, axes, strict=True)]
        found.grads = []  # Memory that one list alone can see may be summed into.
        if sum_over_shards(shared, self.totals, ready, self.ahead):
            return [None] * len(own), own, True
        return shared, own, False

    def evaluate(
        self, leaves: list[Any], gradient: GradientFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Evaluation:
        """Evaluate the gradient function in a shard that was given these leaves."""
        place = find(None, gradient.call).place
        whole = self.value_spec == "sum" or self.merge.is_alone()
        seed = None if whole else functools.partial(self._seed, place)
        if self.compiled is not None:
            return self.compiled.evaluate(place, args, kwargs, seed)
        hook: Any = None if self.overlap is None else self.overlap.hook(place)
        if self.ahead is not None and self.overlap is None:
            mine, _ = gradient.differentiated(args, kwargs)
            hook = self.ahead.hook(place, mine, self.axes(self.places(mine, leaves)))
        return gradient.evaluate(args, kwargs, seed, hook)

    def _seed(self, place: int) -> float:
        return self.merge.shares()[place] if self.overlap is None else self.overlap.seed(place)

    def places(self, found: Sequence[Any], leaves: list[Any]) -> list[int | None]:
        """Return the place among all arguments of each differentiated leaf, None if it is no argument."""
        known = {id(leaf): k for k, leaf in enumerate(leaves)}
        return [known.get(id(leaf)) for leaf in found]

    def axes(self, places: list[int | None]) -> list[int | None]:
        """Return along which dimension each differentiated leaf was split."""
        return [None if k is None else self.split.axes[k] for k in places]

    def across(
        self, totals: list[Gradient], axes: Sequence[int | None], order: Sequence[int]
    ) -> list[Gradient]:
        """Sum what was not split over the processes, if there are others."""
        span = self.merge.span
        if span is None or self.overlap is not None:
            return totals
        places = [k for k in order if axes[k] is None and totals[k] is not None]
        for k, total in zip(places, span.summed([totals[k] for k in places]), strict=True):
            totals[k] = total
        return totals

    def _gradients(self, rows: Sequence[list[Gradient]]) -> list[Gradient]:
        """Return the gradient of each leaf: a sum over shards, or the rows of all."""
        axes = self.axes(self.found[0].places)
        columns = {k: [row[k] for row in rows] for k, axis in enumerate(axes) if axis is not None}
        for k in columns:
            for row in rows:
                row[k] = None
        whole = [self.totals.get(k) for k in range(len(axes))] if self.totals else reduce_rows(rows)
        if not self.frame.is_cpu:
            _streams.received(whole)
        for k, column in columns.items():
            leaves = [self.found[place].evaluation.leaves[k] for place in range(len(rows))]
            parts: list[Any] = self.gradient.finish(leaves, column)
            if isinstance(parts[0], Tensor):
                whole[k] = torch.cat([part.to(parts[0].device) for part in parts], axes[k] or 0)
        whole = self.across(self.gradient.finish(self.found[0].evaluation.leaves, whole), axes, self.order)
        if self.merge.donation is not None:
            whole = [self.merge.donation.settle(grad) for grad in whole]
        return whole if self.frame.is_cpu else self._at_home(whole)

    def _at_home(self, grads: list[Gradient]) -> list[Gradient]:
        """Return the gradients where the caller's arguments live."""
        homes = [None if k is None else self.split.whole[k] for k in self.found[0].places]
        return [
            _streams.home(grad, home.device) if grad is not None and isinstance(home, Tensor) else grad
            for grad, home in zip(grads, homes, strict=True)
        ]
