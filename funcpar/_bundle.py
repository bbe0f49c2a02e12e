"""Bundles: split, shards and merge in one graph, for shards so short that workers only cost time.

The caller runs it: no thread is woken, nothing is handed over, and what the code depends on is looked
at once. It computes what the shards' own graphs do, entry by entry in the same order; the two are
compared in the first calls, and where anything differs it is not used.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpar import _random, tree
from funcpar._equality import are_alike
from funcpar._graph import Gradient
from funcpar._graphs import Graph
from funcpar._standstill import Presence, num_compiled

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
# The merged value, aux of each shard with places, and the merged gradients.
Result: TypeAlias = tuple[Tensor, list[Any], list[Gradient]]

# Shards that take longer, in seconds, one after another, are worth all cores.
SHORT = 0.001
_NUM_TIMED = 3
# What agrees in so many calls does not agree by chance, or because parameters begin at zero.
COMPARED = 8
# But for so few numbers in half precision.
_FEW = 8


class State(enum.Enum):
    """What is known of a bundle: nothing, that it gives what the shards do, or that it does not."""

    NEW = enum.auto()
    RIGHT = enum.auto()
    REFUSED = enum.auto()


class Bundle:
    """One graph for all shards of calls of one signature.

    Args:
        make: Makes the graph, a function of args, kwargs and the seeds of the shards.
        places: Which leaves of args and kwargs are differentiated.
    """

    def __init__(self, make: Callable[[], Graph], places: Sequence[int]) -> None:
        self.places = places
        self.state = State.NEW
        self._make = make
        self._graph: Graph | None = None
        self._num_compared = 0

    def __call__(self, args: Args, kwargs: Kwargs, seeds: Tensor) -> Result | None:
        """Return what the shards give together; None if only they can say."""
        if self._graph is None:
            self._graph = self._make()
        before = num_compiled()
        try:
            result: Result = _run(self._graph, args, kwargs, seeds)
        except Exception:  # The shards run into it themselves, and the error says which of them it was.
            self.state = State.REFUSED
            return None
        if num_compiled() != before:  # Nothing is known of that code.
            self.state, self._num_compared = State.NEW, 0
        return result

    def settle(self, answer: Any, other: Any) -> None:
        """Compare what the shards gave with what it gave, None if only they could say."""
        if self.state is not State.NEW:
            return
        # Generated code may round less often there than the shards' does.
        is_chance = any(
            isinstance(leaf, Tensor) and leaf.dtype.itemsize < 4 and leaf.numel() < _FEW
            for leaf in tree.leaves(answer)
        )
        if other is None or is_chance or not are_alike(answer, other):
            self.state = State.REFUSED
            return
        self._num_compared += 1
        if self._num_compared == COMPARED:
            self.state = State.RIGHT


def seconds_of(graph: Graph, *given: Any) -> float:
    """Return how long the graph of a shard takes in this thread; infinity if a bundle cannot call it."""
    times = []
    try:
        for _ in range(_NUM_TIMED):
            start = perf_counter()
            _run(graph, *given)
            times.append(perf_counter() - start)
    except Exception:
        return float("inf")
    return min(times)


class _NoStream(_random.Stream):
    """Where nobody may draw from: shards have numbers of their own, and a bundle is no shard."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    @property
    def generator(self) -> torch.Generator:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("random numbers are drawn")


_NO_STREAM = _NoStream()


def _run(graph: Graph, *given: Any) -> Any:
    presence = Presence()
    presence.enter()
    outer = _random.enter(_NO_STREAM)
    try:
        return graph(*given)
    finally:
        _random.leave(outer)
        presence.leave()
