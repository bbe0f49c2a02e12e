"""parallel_call: R callables on R argument trees, at the same time, jointly differentiable.

With plain autograd outside, every shard computes on stand-ins: detached leaves of its own. Its
graph stays where it was made, and one autograd Function joins the R graphs to the caller's. The
backward of that Function runs each shard's backward in that shard's worker; asked for a graph of
its own (``create_graph``), it joins the R graphs of the gradients in the same way, to any order.

Under a torch.func transform or a dual level nothing is detached or joined: the workers have the
caller's levels, and build the caller's own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpar import _functional, _random, tree
from funcpar._devices import Device, resolve
from funcpar._errors import ShardAborted
from funcpar._graph import Gradient, closed_over, owned
from funcpar._group import Call, Group, Shard, current, entered
from funcpar._reduce import add_up, reduce_share
from funcpar._workers import Outcome, run
from funcpar._world import is_transformed

Body: TypeAlias = Callable[[], Any]
Leafwise: TypeAlias = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the shards of one call run, and under which names.

    Attributes:
        devices: One per shard.
        axis: Name of the axis, None if it has none.
        weights: Weight of each shard in a mean; None means equal.
        where: The call as the user knows it, for notes: ``pmap(train_step)``.
        streams: Where each shard draws its random numbers from.
    """

    devices: tuple[Device, ...]
    axis: Any = None
    weights: tuple[float, ...] | None = None
    where: str = "parallel_call"
    streams: _random.Streams = field(default_factory=_random.Streams)

    def run(self, bodies: Sequence[Body]) -> list[Any]:
        """Run one body per shard and return their values in rank order.

        One body runs right here, as plain code would. So do several, one after another, when this
        is a shard already: its device is the only one they may use.
        """
        size = len(bodies)
        inside = current() is not None
        group = Group(self.axis, size, self.weights, serial=inside and size > 1)
        shards = [Shard(group, rank, device) for rank, device in enumerate(self.devices)]
        if size == 1 or inside:
            outcomes = [self._here(body, shard) for body, shard in zip(bodies, shards, strict=True)]
        else:
            _random.install()
            wrapped = [self._wrap(body, shard) for body, shard in zip(bodies, shards, strict=True)]
            outcomes = run(self.devices, wrapped, lambda error: group.abort())
        if any(outcome.error is not None for outcome in outcomes):
            self._raise(outcomes)
        return [outcome.value for outcome in outcomes]

    def _wrap(self, body: Body, shard: Shard) -> Body:
        stream = self.streams[shard.rank]

        def wrapped() -> Any:
            outer_stream = _random.enter(stream)
            outer_isolation = _functional.isolate(True)
            try:
                with entered(shard):
                    value = body()
                    shard.group.leave(shard.rank)
                    return value
            finally:
                _functional.isolate(outer_isolation)
                _random.leave(outer_stream)

        return wrapped

    def _here(self, body: Body, shard: Shard) -> Outcome:
        outcome = Outcome()
        try:
            with entered(shard):
                outcome.value = body()
        except BaseException as error:
            outcome.error = error
        return outcome

    def _raise(self, outcomes: list[Outcome]) -> None:
        """Raise the lowest-ranked root cause, with a note for itself and one per further failure."""
        size = len(outcomes)
        error: BaseException | None = None
        failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
        causes = [pair for pair in failed if not isinstance(pair[1], ShardAborted)] or failed
        try:
            rank, first = causes[0]
            first.add_note(f"raised in shard {rank} of {size} on {self.devices[rank]}, in {self.where}")
            told = {str(first)}
            for rank, error in causes[1:]:
                if error is not first and str(error) not in told:
                    first.add_note(f"shard {rank} of {size} failed too: {type(error).__name__}: {error}")
                    told.add(str(error))
            raise first
        finally:
            # The traceback holds this frame: without this, frame and error would hold each other.
            del first, error, causes, failed, outcomes


@dataclass(slots=True)
class Piece:
    """One shard's part of a joint graph: ``outs`` depend on ``ins`` in a graph of that shard.

    ``ins[k]`` is a stand-in for ``sources[which[k]]`` of the joint graph, or that tensor itself.
    """

    outs: list[Tensor]
    ins: list[Tensor]
    which: list[int]
    closed_over: list[Tensor]


class _Sources:
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


def call_shards(frame: Frame, bodies: Sequence[Leafwise], inputs: Sequence[list[Any]]) -> list[list[Any]]:
    """Run ``bodies[i](inputs[i])`` as shard i: lists of leaves to lists of leaves, differentiable."""
    if len(bodies) == 1 or not torch.is_grad_enabled() or is_transformed():
        return frame.run([partial(body, leaves) for body, leaves in zip(bodies, inputs, strict=True)])
    return _call_joined(frame, bodies, inputs, _Sources(), [None] * len(bodies))


def _call_joined(
    frame: Frame,
    bodies: Sequence[Leafwise],
    inputs: Sequence[list[Any]],
    sources: _Sources,
    before: Sequence[Piece | None],
) -> list[list[Any]]:
    """Run the bodies on stand-ins, and make what they return part of the caller's graph.

    ``before`` are the pieces that the bodies reach into: a gradient depends on what the forward
    depended on.
    """
    places = [
        {k: sources.index(leaf) for k, leaf in enumerate(leaves) if _needs_gradient(leaf)}
        for leaves in inputs
    ]
    answers = frame.run(
        [partial(_on_stand_ins, *each) for each in zip(bodies, inputs, places, before, strict=True)]
    )
    pieces = [piece for _, piece in answers]
    for piece in pieces:
        piece.which += [sources.index(leaf) for leaf in piece.closed_over]
        piece.ins += piece.closed_over
    if not any(piece.outs for piece in pieces):
        return [answer for answer, _ in answers]
    joined = iter(_Joint.apply(_Graphs(frame, pieces, sources), *sources.tensors))
    return [[next(joined) if _needs_gradient(leaf) else leaf for leaf in answer] for answer, _ in answers]


def _on_stand_ins(
    body: Leafwise, leaves: list[Any], places: dict[int, int], before: Piece | None
) -> tuple[list[Any], Piece]:
    """Run one body on stand-ins for the leaves at ``places``, in a shard, and keep its graph."""
    stands: dict[int, Tensor] = {}
    given = list(leaves)
    for k, source in places.items():
        if source not in stands:
            stands[source] = leaves[k].detach().requires_grad_()
        given[k] = stands[source]
    answer = body(given)
    outs = [leaf for leaf in answer if _needs_gradient(leaf)]
    ins, which = list(stands.values()), list(stands)
    if before is not None:
        ins, which = ins + before.ins, which + before.which
    return answer, Piece(outs, ins, which, closed_over(outs, ins))


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Joint(torch.autograd.Function):
    """What the shards returned, as a function of the sources."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        return tuple(out.detach() for piece in graphs.pieces for out in piece.outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Gradient) -> tuple[Gradient, ...]:
        graphs: _Graphs = ctx.graphs
        flat = iter(cotangents)
        per_shard = [[next(flat) for _ in piece.outs] for piece in graphs.pieces]
        return (None, *graphs.pull(per_shard, ctx.needs_input_grad[1:]))


class _Graphs:
    """The graphs of all shards of one call, and how to run their backward."""

    def __init__(self, frame: Frame, pieces: list[Piece], sources: _Sources) -> None:
        self.frame = frame
        self.pieces = pieces
        self.sources = sources.tensors

    def pull(self, cotangents: list[list[Gradient]], wanted: Sequence[bool]) -> list[Gradient]:
        """Return the gradient of each wanted source: the sum over shards, in rank order."""
        if torch.is_grad_enabled():
            return self._pull_joined(cotangents, wanted)
        totals: dict[int, Gradient] = {}
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

        def backward(piece: Piece, given: list[Gradient]) -> None:
            row: list[Gradient] = [None] * len(wanted)
            # Upstream of a closed-over tensor the graph may be shared with other shards and with
            # the caller, so it must outlive this backward.
            _pull_piece(piece, wanted, row, given, keep or bool(piece.closed_over), create=False)
            sum_over_shards(row, totals)

        self.frame.run([partial(backward, *each) for each in zip(self.pieces, cotangents, strict=True)])
        return [totals.get(k) for k in range(len(wanted))]

    def _pull_joined(self, cotangents: list[list[Gradient]], wanted: Sequence[bool]) -> list[Gradient]:
        """The same, as part of a graph that leads to the sources and the cotangents."""
        if is_transformed():
            raise RuntimeError(
                f"{self.frame.where}: a second derivative through a vmapped backward (is_grads_batched, "
                f"vectorize=True) is not supported.\nUse torch.func or fp.grad around the pmapped function."
            )

        def backward(piece: Piece, given: list[Gradient]) -> list[Gradient]:
            row: list[Gradient] = [None] * len(wanted)
            _pull_piece(piece, wanted, row, given, keep=True, create=True)
            return row

        bodies = [partial(backward, piece) for piece in self.pieces]
        rows = _call_joined(self.frame, bodies, cotangents, _Sources(self.sources), self.pieces)
        return [add_up([row[k] for row in rows]) for k in range(len(wanted))]


def _pull_piece(
    piece: Piece, wanted: Sequence[bool], row: list[Gradient], given: list[Gradient], keep: bool, create: bool
) -> None:
    """Run one shard's backward; write the gradients of the wanted sources into ``row``."""
    pairs = [
        (out, cotangent) for out, cotangent in zip(piece.outs, given, strict=True) if cotangent is not None
    ]
    asked = [k for k, which in enumerate(piece.which) if wanted[which]]
    if not pairs or not asked:
        return
    grads = torch.autograd.grad(
        [out for out, _ in pairs],
        [piece.ins[k] for k in asked],
        [cotangent for _, cotangent in pairs],
        retain_graph=keep,
        create_graph=create,
        allow_unused=True,
    )
    for k, grad in zip(asked, grads, strict=True):
        which = piece.which[k]  # Twice the same where a function takes a tensor and closes over it.
        row[which] = grad if row[which] is None else add_up([row[which], grad])


def sum_over_shards(row: list[Gradient], totals: dict[int, Gradient], ready: bool = True) -> bool:
    """Bring this shard's gradients, and do this worker's share of the sums into ``totals``.

    Nothing is summed, and False returned, unless all shards are ready.
    """
    shard = current()
    assert shard is not None
    if shard.group.serial:
        totals.update({k: add_up([totals.get(k), grad]) for k, grad in enumerate(row)})
        return True
    reusable = owned(row) if shard.rank == 0 else []
    brought = shard.group.exchange(shard.rank, Call("the sum of gradients", None, ""), (row, reusable, ready))
    if not all(theirs for _, _, theirs in brought):
        return False
    reduce_share([theirs for theirs, _, _ in brought], brought[0][1], shard.rank, totals)
    return True


def parallel_call(
    funs: Sequence[Callable[..., Any]], inputs: Sequence[Any], devices: Any = None
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

    Returns:
        A list of the R results.

    Raises:
        ValueError: Lengths disagree.
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
    callables = [funs] * len(inputs) if callable(funs) else list(funs)
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
    return call_trees(Frame(chosen), callables, [a if isinstance(a, tuple) else (a,) for a in inputs])


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
