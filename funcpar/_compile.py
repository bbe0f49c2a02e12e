"""What is compiled of a pmapped function, and for which signatures.

With ``compile=True`` each shard runs one graph: for a gradient function its forward, backward and the
shard's weight in the mean. Every signature (structure, shapes, dtypes, and what surrounds the call) has
a graph of its own, compiled in the first shard that comes to it; dynamo guards what it depends on
beside. The shards of a call that may compile take turns, see ``_standstill``, also where it was the user
who called torch.compile.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from funcpar import _bundle, _steps, tree
from funcpar._bundle import Args, Bundle, Kwargs, seconds_of
from funcpar._closure import holds_compiled
from funcpar._differentiate import Seed, recordable
from funcpar._grad import Evaluation, GradientFunction
from funcpar._graph import is_differentiable
from funcpar._graphs import Graph
from funcpar._reduce import are_small
from funcpar._split import Split
from funcpar._standstill import num_compiled
from funcpar._world import autocast_states, is_transformed, num_levels

# So many signatures are hardly meant; each took seconds.
_MANY = 16


@dataclass(slots=True)
class Kind:
    """What is compiled for calls of one signature.

    Attributes:
        graphs: The graph of a shard, by its rows.
        bundles: The graph of all shards, by the rows of each and the intra-op threads of the caller.
        known: Rows of shards that have been called.
        seconds: How long the graph of a shard takes, by its rows.
    """

    graphs: dict[int, Graph] = field(default_factory=dict)
    bundles: dict[Hashable, Bundle] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    seconds: dict[int, float] = field(default_factory=dict)

    def seconds_of(self, rows: int) -> float:
        """Return how long a shard of so many rows takes at most, infinity if it is not known."""
        return min((time for n, time in self.seconds.items() if n >= rows), default=float("inf"))


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call is compiled.

    Attributes:
        kind: What there is for the signature of the call.
        rows: Rows of each shard, which their graphs differ in.
        takes_turns: Whether something is likely to be compiled.
        before: How much had been compiled when the call began.
        recorded: Whether the caller records a graph.
    """

    kind: Kind
    rows: tuple[int, ...]
    takes_turns: bool
    before: int
    recorded: bool


_NOTHING = Plan(Kind(), (), False, 0, False)


class Compilation:
    """What is known about compiling one pmapped function.

    Args:
        call: The call for messages, without ``compile=True``.
        fun: What pmap was given.
        gradient: The gradient function within, if there is one.
        wanted: ``compile=`` as given.

    Raises:
        ValueError: The gradient function is part of what the user compiled.
    """

    def __init__(
        self, call: str, fun: Callable[..., Any], gradient: GradientFunction | None, wanted: bool
    ) -> None:
        if gradient is not None:
            _refuse_compiled_gradient(call, fun, gradient)
        self.where = f"{call[:-1]}, compile=True)"
        self.fun = fun
        self.gradient = gradient
        self.wanted = wanted
        self._kinds: dict[Hashable, Kind] = {}
        self._compiles: bool | None = True if wanted else None
        self._settled = False

    def plan(self, split: Split, name_of: Callable[[int], str]) -> Plan:
        """Return what a call has to know, once it is known how it is split.

        Raises:
            ValueError: It is differentiated in a way that compiled code is not.
        """
        if self._compiles is None and "torch._dynamo.convert_frame" in sys.modules:
            # Looked for once; what is compiled later is compiled at a standstill all the same.
            self._compiles = holds_compiled([self.fun])
        if not self._compiles:
            return _NOTHING
        if self.wanted:
            self._check(split, name_of)
        signature = _signature_of(split)
        kind = self._kinds.get(signature)
        if kind is None:  # Two threads that come at once get one.
            kind = self._kinds.setdefault(signature, Kind())
        rows = tuple(split.rows or (0,) * len(split.devices))
        new = not self._settled and not kind.known.issuperset(rows)
        return Plan(kind, rows, new, num_compiled(), torch.is_grad_enabled())

    def finish(self, plan: Plan) -> None:
        """Take note of a call that has returned."""
        if not plan.takes_turns:
            return
        plan.kind.known.update(plan.rows)
        # What the user compiled may serve all sizes: then turns would only cost time from here on.
        self._settled = not self.wanted and num_compiled() == plan.before
        if self.wanted and sum(len(kind.graphs) for kind in self._kinds.values()) == _MANY:
            warnings.warn(
                f"{self.where} has been compiled for {_MANY} signatures: shapes, or plain numbers in the "
                f"arguments, differ from call to call.\nPad the rows, pass numbers as 0-d tensors, or map "
                f"torch.compile(f, dynamic=True).",
                RuntimeWarning,
                stacklevel=4,
            )

    def function(self, plan: Plan, rank: int) -> Callable[..., Any]:
        """Return what a shard calls in the place of the user's function."""
        if not self.wanted or self.gradient is not None:
            return self.fun
        graph = self.graph(plan, rank, lambda: _steps.plain(self.fun), False)
        return lambda *args, **kwargs: graph(args, kwargs)

    def step(self, plan: Plan) -> Step | None:
        """Return the compiled gradient function, None if it is not compiled."""
        return Step(self, plan, self.gradient) if self.wanted and self.gradient is not None else None

    def graph(self, plan: Plan, rank: int, make: Callable[[], Any], detached: bool) -> Graph:
        """Return the graph of a shard."""
        graphs, rows = plan.kind.graphs, plan.rows[rank]
        graph = graphs.get(rows)
        if graph is None:  # Two threads that come at once get one.
            graph = graphs.setdefault(rows, Graph(self.where, make(), detached))
        return graph

    def _check(self, split: Split, name_of: Callable[[int], str]) -> None:
        """Refuse what would lose a derivative."""
        if is_transformed():
            raise ValueError(
                f"{self.where}: a torch.func transform or dual level around it cannot see into compiled "
                f"code.\nUse the transform inside the function, fp.grad around it, or leave compile=True out."
            )
        if self.gradient is not None and torch.is_grad_enabled():
            names = [
                name_of(k) for k, leaf in enumerate(split.whole)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]  # fmt: skip
            if names:
                shown = "".join(f"\n  {name}" for name in names[:8])
                raise ValueError(
                    f"{self.where}: arguments require a gradient, and compiled gradients have no "
                    f"derivative:{shown}\nDetach them (functionalize returns detached parameters), call it "
                    f"under torch.no_grad(), or leave compile=True out."
                )


class Step:
    """The gradient function of one call, compiled."""

    def __init__(self, compilation: Compilation, plan: Plan, gradient: GradientFunction) -> None:
        self._compilation = compilation
        self._plan = plan
        self._gradient = gradient

    def evaluate(self, rank: int, args: Args, kwargs: Kwargs, seed: Seed) -> Evaluation:
        """Return value, aux and the gradients times ``seed()``, in a shard."""
        plan = self._plan
        graph = self._compilation.graph(plan, rank, lambda: _steps.step(self._gradient), plan.recorded)
        factor = 1.0 if seed is None else seed()
        call = _recordable(args, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            value, aux, grads = graph(*call, _seed(factor))
            if plan.takes_turns and rank == 0 and are_small(grads):
                plan.kind.seconds[plan.rows[0]] = seconds_of(graph, *call, _seed(factor))
        if factor == 0.0:  # What does not count has no gradient: 0 times 0/0 would be NaN.
            grads = [None] * len(grads)
        return self._gradient.evaluate_by(
            lambda _, inputs, __: (value, _steps.passed(aux, inputs), grads), args, kwargs
        )

    def bundle(self, split: Split, is_mean: bool) -> Bundle | None:
        """Return the one graph for all shards, and what is known of it; None if they are not short."""
        plan = self._plan
        if plan.kind.seconds_of(plan.rows[0]) * len(plan.rows) > _bundle.SHORT:
            return None
        bundles, key = plan.kind.bundles, (plan.rows, torch.get_num_threads())
        bundle = bundles.get(key)
        if bundle is None:
            # One tensor may be there twice, and a type that the user registered may look at it.
            marks = [leaf.detach() if is_differentiable(leaf) else leaf for leaf in split.whole]
            place_of = {id(mark): k for k, mark in enumerate(marks)}
            leaves, _ = self._gradient.differentiated(*split.rebuild(marks))
            places = [place_of[id(leaf)] for leaf in leaves if is_differentiable(leaf)]
            # Not the split, nor this step: the batch would live on in them.
            whole = _steps.whole(self._gradient, split.axes, places, list(plan.rows), is_mean)
            threads = split.devices[0].threads
            make = functools.partial(Graph, self._compilation.where, whole, plan.recorded, threads)
            bundle = bundles.setdefault(key, Bundle(make, places))
        return bundle

    def evaluate_all(self, bundle: Bundle, split: Split, shares: Sequence[float]) -> Evaluation | None:
        """Return the same of the whole call, but aux of each shard, from a bundle; None if it cannot."""
        args, kwargs = split.rebuild(split.whole)
        call = _recordable(args, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            result = bundle(*call, _seed(shares))
        if result is None:
            return None
        value, auxes, grads = result
        auxes = [
            _steps.passed(aux, [leaves[k] for k in bundle.places])
            for aux, leaves in zip(auxes, split.leaves, strict=True)
        ]
        return self._gradient.evaluate_by(lambda *_: (value, auxes, grads), args, kwargs)


def _recordable(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    if torch.is_inference_mode_enabled():
        args, kwargs = tree.map(recordable, (args, kwargs))
    return args, kwargs


def _seed(factor: float | Sequence[float]) -> Tensor:
    # Made anew: one that is kept may belong to a mode of the user's.
    return torch.tensor(factor, dtype=torch.float64, device="cpu")


def _refuse_compiled_gradient(call: str, fun: Any, gradient: GradientFunction) -> None:
    """Refuse a gradient function in compiled code, which keeps gradients from the sum over shards."""
    while fun is not gradient:
        inner = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
        # Wrappers copy each other's attributes, so that it has the mark is not enough.
        if getattr(fun, "__dict__", {}).get("_torchdynamo_orig_callable") is inner:
            kind, _, name = gradient.call.partition("(")
            name = name[:-1]
            raise ValueError(
                f"{call}: torch.compile around {gradient.call} hides the gradients, which are summed over "
                f"shards.\nMap {kind}(torch.compile({name})), or {gradient.call} with compile=True."
            )
        fun = inner


def _signature_of(split: Split) -> Hashable:
    """Return what torch.compile would guard of a shard's arguments, but for its number of rows."""
    leaves = tuple(_kind_of(*pair) for pair in zip(split.leaves[0], split.axes, strict=True))
    around = (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocast_states()), num_levels(),
        torch.get_default_dtype(), tuple(device.threads for device in split.devices[:1]),
    )  # fmt: skip
    return tuple(split.arguments), leaves, around


def _kind_of(leaf: Any, axis: int | None) -> Hashable:
    if isinstance(leaf, float | complex):  # Equality knows no sign of 0.0, and no NaN.
        return type(leaf), (float if isinstance(leaf, float) else complex).__repr__(leaf)
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf if isinstance(leaf, int | str | bytes) else None
    shape = leaf.shape if axis is None else (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
    strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
    return type(leaf), leaf.dtype, leaf.device, axis, shape, strides, leaf.requires_grad
