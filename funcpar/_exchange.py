"""How a map over the shards of an axis is carried out, in each shard, differentiably.

Three ways, by what surrounds the shard:

- Plain autograd. The shards meet with their values; if any of them brought one that requires a
  gradient, all put a node into their graphs whose backward is the transposed map. A backward that
  runs such a node in one shard must run it in all: see :func:`complete`.
- A torch.func transform inside the function. An autograd Function with rules for jvp and vmap,
  which meets the others below the transform.
- A torch.func transform around pmap. All shards share one graph, so the map is made of plain
  differentiable operations on the values of all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from funcpar import _streams
from funcpar._graph import ROOT, Gradient, apply, is_smooth, is_wrapped, reach
from funcpar._group import Call, Shard, call_site, find, live
from funcpar._maps import Extremum, Map, Sum
from funcpar._pages import Room, give_back, take
from funcpar._request import Request
from funcpar._world import differentiates_above, in_dual_level, in_torch_func

# Below this many entries in all, a shard hands out copies; above, the others read its own values,
# and it waits until they have.
_SMALL = 1 << 15


class _Here(threading.local):
    """The exchanges that this thread has recorded in the graph that it is making."""

    tokens: list[Gradient] | None = None


_here = _Here()


@contextmanager
def recording() -> Iterator[list[Gradient]]:
    """Collect a token for every exchange that becomes part of a graph: an output to start backward at."""
    before, _here.tokens = _here.tokens, []
    try:
        yield _here.tokens
    finally:
        _here.tokens = before


def keep(tokens: list[Gradient]) -> None:
    """Hand the tokens of an inner graph that lives on to the graph around it."""
    if _here.tokens is not None:
        _here.tokens += tokens


def complete(outs: Sequence[Tensor], tokens: Sequence[Gradient]) -> list[Tensor]:
    """Return what a backward from ``outs`` must also start at, with a cotangent of zero.

    A shard may not need a node that another shard's gradient goes through: its own loss does not
    use that value. Its part of the exchange is needed all the same, so the shards agree on the
    nodes that any of them runs.
    """
    if not tokens:
        return []
    shard = next(shard for shard in live() if shard.group.size > 1)
    started: frozenset[int] = frozenset()
    while True:
        # What is added reaches exchanges of its own, which others may lack, until all agree.
        added = [token for k in sorted(started) if (token := tokens[k]) is not None]
        nodes, _ = reach([*outs, *added])
        mine = frozenset(k for k, token in enumerate(tokens) if token is not None and token.grad_fn in nodes)
        brought = shard.group.exchange(shard.rank, Call("backward", None, call_site()), mine, limited=False)
        if all(theirs == mine for theirs in brought):
            return added
        started |= frozenset().union(*brought) - mine


def carry_out(request: Request, wanted: Map, leaves: list[Tensor]) -> list[Tensor]:
    """Return what this shard gets of every leaf.

    Raises:
        UnboundAxisError: Nothing binds the axis.
        ReplicaMismatchError: Another shard makes another call.
    """
    if isinstance(wanted, Extremum) and any(map(_may_be_differentiated, leaves)):
        outs = _carry_out(request, wanted, [leaf.detach() for leaf in leaves])
        return list(apply(_Refused, request.name, len(outs), *outs, *leaves))
    return _carry_out(request, wanted, leaves)


def _carry_out(request: Request, wanted: Map, leaves: list[Tensor]) -> list[Tensor]:
    shard = find(request.axis, request.name)
    if shard.group.size == 1:
        return [wanted.output(0, [leaf]) for leaf in leaves]
    if shard.group.levels is not None:
        return _directly(shard, request, wanted, leaves)
    if in_torch_func():
        wrapped = tuple(_functorch.is_functorch_wrapped_tensor(leaf) for leaf in leaves)
        traced = Request(request.axis, request.name, (request.structure, wrapped))
        return list(apply(_Traced, traced, wanted, *leaves))
    records = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    with torch.no_grad():
        outs, recorded = _meet(shard, request, wanted, leaves, records)
    if not recorded:
        return outs
    token: Gradient = None
    if torch.is_grad_enabled():
        token, *outs = apply(_Recorded, request, wanted, outs, ROOT, *leaves)
    if _here.tokens is not None:
        _here.tokens.append(token)
    return outs


def _meet(
    shard: Shard, request: Request, wanted: Map, leaves: Sequence[Tensor], records: bool
) -> tuple[list[Tensor], bool]:
    """Exchange values; return what this shard gets, and whether any shard wants to differentiate."""
    call = request.call(wanted, leaves)
    given = [leaf.detach() for leaf in leaves]
    if sum(leaf.numel() for leaf in leaves) > _SMALL:
        return _meet_in_place(shard, call, wanted, given, records)
    brought = shard.group.exchange(shard.rank, call, ([leaf.clone() for leaf in given], records))
    columns = _here_too(zip(*(theirs for theirs, _ in brought), strict=True), shard)
    outs = [wanted.output(shard.rank, column) for column in columns]
    return outs, any(theirs for _, theirs in brought)


def _meet_in_place(
    shard: Shard, call: Call, wanted: Map, given: list[Tensor], records: bool
) -> tuple[list[Tensor], bool]:
    """The same, the others reading this shard's own memory, and making large sums together."""
    leads = isinstance(wanted, Sum) and wanted.group(shard.rank)[0] == shard.rank
    rooms = [_room_for(leaf) if leads else None for leaf in given]
    brought = shard.group.exchange(shard.rank, call, (given, records, rooms, threading.Lock()))
    if isinstance(wanted, Sum):
        rooms = brought[wanted.group(shard.rank)[0]][2]
    outs = []
    columns = _here_too(zip(*(theirs[0] for theirs in brought), strict=True), shard)
    for column, room in zip(columns, rooms, strict=True):
        if room is None:
            outs.append(wanted.output(shard.rank, column))
        else:
            assert isinstance(wanted, Sum)
            wanted.fill(shard.rank, column, room.tensor)
            outs.append(room.tensor)
    # Nobody goes on, and perhaps writes into what it brought, before all have read it.
    shard.group.exchange(shard.rank, call, None, limited=False)
    # To each shard a copy on write of the one sum: whoever writes gets its own. Making one changes
    # how the sum is kept, so one shard at a time.
    with brought[0][3]:
        outs = [out if room is None else room.copy() for out, room in zip(outs, rooms, strict=True)]
        for room in rooms:
            # The last to copy: before, someone else must not write there.
            if (
                room is not None
                and isinstance(wanted, Sum)
                and len(room.users) == len(wanted.group(shard.rank))
            ):
                give_back(room)
    return outs, any(theirs[1] for theirs in brought)


def _here_too(columns: Iterable[Sequence[Tensor]], shard: Shard) -> Iterable[Sequence[Tensor]]:
    """Bring what all shards brought to this shard's device."""
    device = shard.device
    if device.is_cpu:
        return columns
    return [[_streams.bring(value, device.torch_device) for value in column] for column in columns]


def _room_for(leaf: Tensor) -> Room | None:
    """Return memory for a sum that the shards make together, or None where each makes its own."""
    alone = leaf.numel() < _SMALL or leaf.element_size() < 4 or leaf.layout is not torch.strided
    return None if alone or not leaf.is_cpu else take(leaf)


def _directly(shard: Shard, request: Request, wanted: Map, leaves: list[Tensor]) -> list[Tensor]:
    if _here.tokens is not None or differentiates_above(shard.group.levels or 0):
        raise RuntimeError(
            f"{request.name}: the function takes a derivative of what depends on it, and a torch.func "
            f"transform or dual level around pmap makes all shards share one graph.\n"
            f"Take the outer derivative with fp.grad or .backward()."
        )
    call = request.call(wanted, leaves)
    brought = shard.group.exchange(shard.rank, call, leaves)
    columns = _here_too(zip(*brought, strict=True), shard)
    outs = [wanted.output(shard.rank, column) for column in columns]
    shard.group.exchange(shard.rank, call, None)
    return outs


def _transpose(request: Request, wanted: Map, cotangents: Sequence[Gradient]) -> list[Gradient]:
    """Carry out the transposed map on the cotangents that there are."""
    places = [k for k, given in enumerate(cotangents) if given is not None and is_smooth(given)]
    given = [cotangents[k] for k in places]
    back = Request(request.axis, f"the transpose of {request.name}", request.structure)
    grads: list[Gradient] = [None] * len(cotangents)
    for k, grad in zip(places, carry_out(back, wanted.transposed(), given), strict=True):  # type: ignore[arg-type]
        grads[k] = grad
    return grads


def _may_be_differentiated(leaf: Tensor) -> bool:
    if leaf.requires_grad or is_wrapped(leaf):
        return True
    return in_dual_level() and forward_ad.unpack_dual(leaf).tangent is not None  # type: ignore[no-untyped-call]


class _Recorded(torch.autograd.Function):
    """An exchange that has taken place, as a node of one shard's graph."""

    @staticmethod
    def forward(
        ctx: Any, request: Request, wanted: Map, outs: list[Tensor], root: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.request, ctx.wanted = request, wanted
        return (torch.zeros(()), *outs)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *cotangents: Gradient) -> tuple[Gradient, ...]:
        return (None, None, None, None, *_transpose(ctx.request, ctx.wanted, cotangents))


class _Refused(torch.autograd.Function):
    """What a map without a gradient gave, as an output of what it was given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Gradient) -> tuple[Gradient, ...]:
        raise NotImplementedError(
            f"{ctx.name} has no gradient.\nDetach its operand, {ctx.name}(x.detach()), to use it as a "
            f"constant."
        )

    jvp = backward


class _Traced(torch.autograd.Function):
    """An exchange below transforms of torch.func that are active inside the function."""

    @staticmethod
    def forward(request: Request, wanted: Map, *leaves: Tensor) -> tuple[Tensor, ...]:
        shard = find(request.axis, request.name)
        return tuple(_meet(shard, request, wanted, leaves, records=False)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.request, ctx.wanted, *leaves = inputs
        ctx.kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]

    @staticmethod
    def backward(ctx: Any, *cotangents: Gradient) -> tuple[Gradient, ...]:
        return (None, None, *_transpose(ctx.request, ctx.wanted, cotangents))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Gradient) -> tuple[Gradient, ...]:
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent
            for tangent, (shape, dtype, device) in zip(tangents, ctx.kinds, strict=True)
        ]
        places = [k for k, tangent in enumerate(given) if is_smooth(tangent)]
        name = f"the tangent of {ctx.request.name}"
        request = Request(ctx.request.axis, name, ctx.request.structure)
        found: list[Gradient] = [None] * len(given)
        for k, out in zip(places, carry_out(request, ctx.wanted, [given[k] for k in places]), strict=True):
            found[k] = out
        return tuple(found)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], request: Request, wanted: Map, *leaves: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moved = [
            leaf.expand(info.batch_size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)
            for leaf, dim in zip(leaves, in_dims[2:], strict=True)
        ]
        outs = carry_out(request, wanted.batched(), moved)
        return tuple(outs), (0,) * len(outs)
