"""What a joint graph is made of: one shard's graph each, and the tensors that they start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpar._exchange import complete
from funcpar._graph import ROOT, Gradient, backward, explain_compiled, refuse_hidden
from funcpar._reduce import add_up


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

    @classmethod
    def of_nothing(cls) -> Piece:
        """Return the part of a shard that recorded nothing."""
        return cls([], [], [], [], set(), set(), [], is_gradient=False)

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


def pull(
    piece: Piece,
    wanted: Sequence[bool],
    row: list[Gradient],
    given: list[Gradient],
    *,
    keep: bool,
    create: bool,
) -> None:
    """Run one shard's backward; write the gradients of the wanted sources into ``row``."""
    pairs = [
        (out, cotangent) for out, cotangent in zip(piece.outs, given, strict=True) if cotangent is not None
    ]
    pairs += [(token, torch.zeros_like(token)) for token in complete([out for out, _ in pairs], piece.tokens)]
    asked = [k for k, which in enumerate(piece.which) if wanted[which]]
    ins = [piece.ins[k] for k in asked] + [ROOT] * bool(piece.tokens)
    if not pairs or not ins:
        return
    try:
        grads = backward(
            [out for out, _ in pairs], ins, [given for _, given in pairs], keep=keep, create=create
        )
    except RuntimeError as error:
        explain_compiled(error)
        raise
    if any(grad is None for grad in grads):
        refuse_hidden([out for out, _ in pairs])
    for k, grad in zip(asked, grads, strict=False):
        which = piece.which[k]  # Twice the same where a function takes a tensor and closes over it.
        row[which] = grad if row[which] is None else add_up([row[which], grad])
