"""What a joint graph is made of: one shard's graph each, and the tensors that they start from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from funcpar._graph import Gradient


@dataclass(slots=True)
class Piece:
    """One shard's part of a joint graph: ``outs`` depend on ``ins`` in a graph of that shard.

    ``ins[k]`` is a stand-in for ``sources[which[k]]`` of the joint graph, or that tensor itself.
    ``closed_over`` are those that are no arguments; if there are any, ``nodes`` are those of the graph
    and ``outside`` those that the shard did not make. ``tokens`` are those of the exchanges between
    shards that the graph contains.
    """

    outs: list[Tensor]
    ins: list[Tensor]
    which: list[int]
    closed_over: list[Tensor]
    nodes: set[Any]
    outside: set[Any]
    tokens: list[Gradient]
    is_gradient: bool

    @property
    def is_shared(self) -> bool:
        """Whether others run backward through parts of this graph, so that one must not free it.

        The graph of a gradient contains that of the forward, which has a backward of its own.
        """
        return self.is_gradient or bool(self.closed_over)


class Sources:
    """The tensors that a joint graph starts from, each once."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self._index = {id(tensor): k for k, tensor in enumerate(self.tensors)}

    def index(self, tensor: Tensor) -> int:
        """Return the position of a tensor, at the end if it is new."""
        k = self._index.setdefault(id(tensor), len(self.tensors))
        if k == len(self.tensors):
            self.tensors.append(tensor)
        return k
