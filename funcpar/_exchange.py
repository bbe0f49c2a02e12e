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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from funcpar._across import gathered
from funcpar._graph import ROOT, Gradient, apply, is_smooth, is_wrapped, reach
from funcpar._group import Shard, current, find, live
from funcpar._maps import Extremum, Map
from funcpar._meeting import everyones, here_too, meet
from funcpar._request import Call, Request, call_site
from funcpar._span import Span
from funcpar._told import zero_of
from funcpar._world import differentiates_above, in_dual_level, in_torch_func


class _Here(threading.local):
    """The exchanges that this thread has recorded in the graph that it is making."""

    tokens: list[Gradient] | None = None


here = _Here()


class recording:
    """Collect a token for every exchange that becomes part of a graph: an output to start backward at."""

    __slots__ = ("_before",)

    def __enter__(self) -> list[Gradient]:
        tokens: list[Gradient] = []
        self._before, here.tokens = here.tokens, tokens
        return tokens

    def __exit__(self, *_: object) -> None:
        here.tokens = self._before


def keep(tokens: list[Gradient]) -> None:
    """Hand the tokens of an inner graph that lives on to the graph around it."""
    if here.tokens is not None:
        here.tokens += tokens


def stand_in(stands: Sequence[Tensor]) -> None:
    """Note what this shard works on in the place of arguments."""
    shard = current()
    if shard is not None and shard.group.num_here > 1:
        shard.group.stand_ins.append((shard.place, stands))


def refuse_foreign(leaves: Sequence[Tensor]) -> None:
    """Refuse leaves of this shard's graph that stand for another shard's arguments.

    Raises:
        ValueError: There are some: their gradient would get lost.
    """
    shard = current()
    if shard is None or not leaves:
        return
    for place, stands in shard.group.stand_ins:
        if place != shard.place and any(leaf is one for leaf in leaves for one in stands):
            raise ValueError(
                f"shard {shard.rank} uses a tensor that another shard has computed, and left in an attribute "
                f"or a global, where its gradient would get lost.\nReturn it, exchange it with fp.psum or "
                f"fp.all_gather, or call a module that keeps something on itself through fp.functionalize."
            )


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
        call = Call("backward", None, call_site())
        brought = shard.group.exchange(shard, call, mine, limited=False, across=everyones)
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
        _refuse_inner_derivative(shard, request)
        if shard.group.span is not None:
            return _directly_across(shard, request, wanted, leaves)
        return _directly(shard, request, wanted, leaves)
    if in_torch_func():
        wrapped = tuple(_functorch.is_functorch_wrapped_tensor(leaf) for leaf in leaves)
        traced = Request(request.axis, request.name, (request.structure, wrapped))
        return list(apply(_Traced, traced, wanted, *leaves))
    records = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    with torch.no_grad():
        outs, recorded = meet(shard, request, wanted, leaves, records)
    if not recorded:
        return outs
    token: Gradient = None
    if torch.is_grad_enabled():
        token, *outs = apply(_Recorded, request, wanted, outs, ROOT, *leaves)
    if here.tokens is not None:
        here.tokens.append(token)
    return outs


def _directly(shard: Shard, request: Request, wanted: Map, leaves: list[Tensor]) -> list[Tensor]:
    call = request.call(wanted, leaves)
    brought = shard.group.exchange(shard, call, leaves)
    columns = here_too(zip(*brought, strict=True), shard)
    outs = [wanted.output(shard.rank, column) for column in columns]
    shard.group.exchange(shard, call, None)
    return outs


def _directly_across(shard: Shard, request: Request, wanted: Map, leaves: list[Tensor]) -> list[Tensor]:
    """The same, where the other processes' shards are in graphs of their own."""
    call = request.call(wanted, leaves)
    rows: list[Tensor] = shard.group.exchange(shard, call, leaves, across=_joined_rows)
    outs = [wanted.output(shard.rank, row.unbind()) for row in rows]
    if shard.group.num_here > 1:
        shard.group.exchange(shard, call, None)
    return outs


def _joined_rows(span: Span, call: Call, values: list[Any]) -> list[Any]:
    """Return each leaf of all shards of all processes, stacked, as part of the caller's graph."""
    stacked = [torch.stack(column) for column in zip(*values, strict=True)]
    rows = gathered(span.link, f"{call.asked} in {span.call}", span.layout.counts, stacked)
    span.anchors += [zero_of(row) for row in rows if is_smooth(row)]
    return rows


def _refuse_inner_derivative(shard: Shard, request: Request) -> None:
    if here.tokens is not None or differentiates_above(shard.group.levels or 0):
        raise RuntimeError(
            f"{request.name}: the function takes a derivative of what depends on it, and a torch.func "
            f"transform or dual level around pmap makes all shards share one graph.\n"
            f"Take the outer derivative with fp.grad or .backward()."
        )


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
        return tuple(meet(shard, request, wanted, leaves, records=False)[0])

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
