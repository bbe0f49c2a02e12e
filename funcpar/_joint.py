"""One differentiable function out of R graphs, each made and run backward in its own worker.

With plain autograd outside, every shard computes on stand-ins: detached leaves of its own. Its
graph stays where it was made, and one autograd Function joins the R graphs to the caller's. The
backward of that Function runs each shard's backward in that shard's worker; asked for a graph of
its own (``create_graph``), it joins the R graphs of the gradients in the same way, to any order.

Under a torch.func transform or a dual level nothing is detached or joined: the workers have the
caller's levels, and build the caller's own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._allreduce import sum_over_shards
from funcpar._depends import check_closed_over, depended_on, sequence_number
from funcpar._exchange import recording, stand_in
from funcpar._frame import Frame
from funcpar._graph import Gradient, apply
from funcpar._group import current
from funcpar._pieces import Piece, Sources, pull
from funcpar._reduce import add_up, are_small, reduce_rows
from funcpar._transfer import Transfer
from funcpar._world import is_transformed

Leafwise: TypeAlias = Callable[[list[Any]], list[Any]]


def call_shards(
    frame: Frame, bodies: Sequence[Leafwise], inputs: Sequence[list[Any]], is_joined: bool = True
) -> list[list[Any]]:
    """Run ``bodies[i](inputs[i])`` as shard i: lists of leaves to lists of leaves, differentiable.

    What is not joined is what the bodies return, and no part of the caller's graph.
    """
    if frame.is_cpu and len(bodies) == 1:
        return _call_shards(frame, bodies, inputs, None, is_joined)
    shared = _shared(inputs)
    versions = [leaf._version for _, leaf in shared]
    transfer = None if frame.is_cpu else Transfer(frame.devices, inputs, _is_graph(bodies))
    answers = _call_shards(frame, bodies, inputs, transfer, is_joined)
    written = [k for (k, leaf), version in zip(shared, versions, strict=True) if leaf._version != version]
    written += [] if transfer is None else transfer.written(inputs[0])
    if written:
        name_of = frame.name_of or (lambda k: f"a tensor of shape {tuple(inputs[0][k].shape)}")
        raise ValueError(
            f"{frame.where}: {', '.join(map(name_of, written))}, which the shards share, was written to in "
            f"place by the function, by several shards at the same time.\n"
            f"Return the new value instead, or let each shard write to a copy of its own."
        )
    return answers


def _shared(inputs: Sequence[list[Any]]) -> list[tuple[int, Tensor]]:
    """Return the tensors that the first two shards both get, each with its place in the first."""
    if len(inputs) == 1:
        return []
    others = set(map(id, inputs[1]))
    return [
        (k, leaf) for k, leaf in enumerate(inputs[0])
        if isinstance(leaf, Tensor) and id(leaf) in others and not leaf.is_inference()
    ]  # fmt: skip


def _is_graph(bodies: Sequence[Any]) -> bool:
    """Tell whether shards work in the caller's own graph, or that of a shard around them."""
    return (len(bodies) == 1 and current() is not None) or is_transformed()


def _call_shards(
    frame: Frame,
    bodies: Sequence[Leafwise],
    inputs: Sequence[list[Any]],
    transfer: Transfer | None,
    is_joined: bool,
) -> list[list[Any]]:
    if is_joined and torch.is_grad_enabled() and not _is_graph(bodies):
        return _call_joined(frame, bodies, inputs, Sources(), [None] * len(bodies), transfer)
    if transfer is not None:
        bodies = [transfer.bringing(rank, body) for rank, body in enumerate(bodies)]
    tasks = [partial(body, leaves) for body, leaves in zip(bodies, inputs, strict=True)]
    return frame.run(tasks, () if transfer is None else transfer.streams, frame.pace)


def _call_joined(
    frame: Frame,
    bodies: Sequence[Leafwise],
    inputs: Sequence[list[Any]],
    sources: Sources,
    before: Sequence[Piece | None],
    transfer: Transfer | None = None,
) -> list[list[Any]]:
    """Run the bodies on stand-ins, and make what they return part of the caller's graph.

    ``before`` are the pieces that the bodies reach into: a gradient depends on what the forward
    depended on.
    """
    places = [
        {k: sources.index(leaf) for k, leaf in enumerate(leaves) if _needs_gradient(leaf)}
        for leaves in inputs
    ]
    tasks = [
        partial(_on_stand_ins, frame, transfer, rank, *each)
        for rank, each in enumerate(zip(bodies, inputs, places, before, strict=True))
    ]
    pace = frame.pace if before[0] is None else None
    answers = frame.run(tasks, () if transfer is None else transfer.streams, pace)
    if frame.span is None and all(piece is None for _, piece in answers):
        return [answer for answer, _ in answers]
    pieces = [piece or Piece.of_nothing() for _, piece in answers]
    seen: set[Any] = set()
    for piece in pieces:
        check_closed_over(frame.where, piece.closed_over, piece.outside, piece.nodes, seen)
    closed_over = _copied(frame, pieces, before)
    for piece in pieces:
        piece.which += [sources.index(closed_over[id(leaf)]) for leaf in piece.closed_over]
        piece.ins += piece.closed_over
    anchor, *outs = apply(_Joint, _Graphs(frame, pieces, sources), *sources.tensors)
    if frame.span is not None:
        frame.span.anchors.append(anchor)
    joined = iter(outs)
    merged = [[next(joined) if _needs_gradient(leaf) else leaf for leaf in answer] for answer, _ in answers]
    if len(merged) > 1 and len({len(answer) for answer in merged}) == 1:
        # What all shards return as it is, a closed-over parameter say, stays that one object.
        for k, column in enumerate(zip(*(answer for answer, _ in answers), strict=True)):
            if all(leaf is column[0] for leaf in column):
                for answer in merged:
                    answer[k] = column[0]
    return merged


def _copied(frame: Frame, pieces: Sequence[Piece], before: Sequence[Piece | None]) -> dict[int, Tensor]:
    """Return what stands for each closed-over tensor outside: its gradient is that of all processes."""
    found = {id(leaf): leaf for piece in pieces for leaf in piece.closed_over}
    if frame.span is None or (before[0] is not None and not found):
        return found
    if before[0] is not None:
        raise RuntimeError(
            f"{frame.where}: its backward depends on a tensor that its forward does not depend on, and which "
            f"is no argument.\nPass it as an argument."
        )
    return dict(zip(found, frame.span.closed_over(list(found.values())), strict=True))


def _on_stand_ins(
    frame: Frame,
    transfer: Transfer | None,
    rank: int,
    body: Leafwise,
    leaves: list[Any],
    places: dict[int, int],
    before: Piece | None,
) -> tuple[list[Any], Piece | None]:
    """Run one body on stand-ins for the leaves at ``places``, in a shard, and keep its graph, if any."""
    if transfer is not None:
        leaves = transfer.bring(rank, leaves)
    stands: dict[int, Tensor] = {}
    given = list(leaves)
    for k, source in places.items():
        if source not in stands:
            stands[source] = leaves[k].detach().requires_grad_()
        given[k] = stands[source]
    stand_in(list(stands.values()))
    start = sequence_number()
    with recording() as tokens:
        answer = body(given)
    outs = [leaf for leaf in answer if _needs_gradient(leaf)]
    ins, which = list(stands.values()), list(stands)
    if before is not None:
        ins, which, tokens = ins + before.ins, which + before.which, before.tokens + tokens
    if not outs and not tokens:
        return answer, None
    others, nodes, outside = depended_on(frame.funs, outs, ins, start)
    return answer, Piece(outs, ins, which, others, nodes, outside, tokens, before is not None)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Joint(torch.autograd.Function):
    """What the shards returned, as a function of the sources."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        # The first is 0, and part of the graph even where no shard's output is wanted.
        return (torch.zeros(()), *(out.detach() for piece in graphs.pieces for out in piece.outs))

    @staticmethod
    def backward(ctx: Any, _: Gradient, *cotangents: Gradient) -> tuple[Gradient, ...]:
        graphs: _Graphs = ctx.graphs
        flat = iter(cotangents)
        per_shard = [[next(flat) for _ in piece.outs] for piece in graphs.pieces]
        return (None, *graphs.pull(per_shard, ctx.needs_input_grad[1:]))


class _Graphs:
    """The graphs of all shards of one call, and how to run their backward."""

    def __init__(self, frame: Frame, pieces: list[Piece], sources: Sources) -> None:
        self.frame = frame
        self.pieces = pieces
        self.sources = sources.tensors
        # Backward runs in a thread of torch's engine, whose streams need not be the caller's.
        self.streams = [] if frame.is_cpu else _streams.current_streams(d.torch_device for d in frame.devices)

    def pull(self, cotangents: list[list[Gradient]], wanted: Sequence[bool]) -> list[Gradient]:
        """Return the gradient of each wanted source: the sum over shards, in rank order."""
        if torch.is_grad_enabled():
            return self._pull_joined(cotangents, wanted)
        with nullcontext() if self.frame.span is None else self.frame.span.backward():
            return self._pull(cotangents, wanted)

    def _pull(self, cotangents: list[list[Gradient]], wanted: Sequence[bool]) -> list[Gradient]:
        totals: dict[int, Gradient] = {}
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        is_small = self.frame.is_cpu and are_small(compress(self.sources, wanted))

        def backward(piece: Piece, given: list[Gradient]) -> list[Gradient]:
            row: list[Gradient] = [None] * len(wanted)
            _streams.received(given)
            pull(piece, wanted, row, given, keep=keep or piece.is_shared, create=False)
            if is_small:  # The caller sums them, so that shards need not meet.
                return row
            sum_over_shards(row, totals)
            return []

        rows = self.frame.run(
            [partial(backward, *each) for each in zip(self.pieces, cotangents, strict=True)],
            self.streams,
            None if self.frame.pace is None else self.frame.pace.backward,
        )
        if is_small:
            totals.update(enumerate(reduce_rows(rows)))
        if not self.frame.is_cpu:
            _streams.received(totals, self.streams)
        return [self._at_home(k, totals.get(k)) for k in range(len(wanted))]

    def _at_home(self, k: int, grad: Gradient) -> Gradient:
        """Return the gradient of a source where the source lives."""
        return grad if grad is None else _streams.home(grad, self.sources[k].device)

    def _pull_joined(self, cotangents: list[list[Gradient]], wanted: Sequence[bool]) -> list[Gradient]:
        """The same, as part of a graph that leads to the sources and the cotangents."""
        if is_transformed():
            raise RuntimeError(
                f"{self.frame.where}: a second derivative through a vmapped backward (is_grads_batched, "
                f"vectorize=True) is not supported.\nUse torch.func or fp.grad around the pmapped function."
            )

        def backward(piece: Piece, given: list[Gradient]) -> list[Gradient]:
            row: list[Gradient] = [None] * len(wanted)
            pull(piece, wanted, row, given, keep=True, create=True)
            return row

        bodies = [partial(backward, piece) for piece in self.pieces]
        rows = _call_joined(self.frame, bodies, cotangents, Sources(self.sources), self.pieces)
        grads = [self._at_home(k, add_up([row[k] for row in rows])) for k in range(len(wanted))]
        if self.frame.span is not None:
            anchor = self.frame.span.anchors.pop()
            if all(grad is None for grad in grads):  # The other processes' gradients have a backward too.
                return [torch.zeros_like(source) + anchor.to(source) for source in self.sources]
        return grads
