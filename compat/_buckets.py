"""Gradients reduced a bucket at a time: large ones where they lie, small ones in one piece."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, _utils

from compat._peers import Kind, Peers

_flatten: Any = _utils._flatten_dense_tensors
_unflatten: Any = _utils._unflatten_dense_tensors
_ROOMY = (torch.float32, torch.float64)
_LARGE = 2 << 20  # Bytes. Above it a copy into and out of a flat tensor costs more than one more operation.


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced together: of one dtype and layout, in order of readiness.

    Attributes:
        places: Of the parameters, in the list of all.
        is_sparse: Whether the gradients are sparse; then there is one parameter.
    """

    places: tuple[int, ...]
    is_sparse: bool = False


@dataclass(slots=True)
class Reduction:
    """A bucket on its way: operations that run, and where their results will be."""

    works: list[Any] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    flat: Tensor | None = None
    extra: Tensor = field(default_factory=lambda: torch.empty(0))
    small: list[int] = field(default_factory=list)
    share: int = 1


def buckets_of(params: Sequence[Tensor], sparse: Sequence[bool], cap: int) -> list[Bucket]:
    """Cut the parameters into buckets of at most ``cap`` bytes, the last registered first.

    The first bucket is small: its lone layer is ready early, and opens the meeting of all ranks while
    backward still runs.
    """
    buckets: list[Bucket] = []
    places: list[int] = []
    size, limit = 0, min(cap, 1 << 20)
    for k in reversed(range(len(params))):
        param = params[k]
        bytes_ = param.numel() * param.element_size()
        if places and (size + bytes_ > limit or param.dtype is not params[places[0]].dtype or sparse[k]):
            buckets.append(Bucket(tuple(places)))
            places, size, limit = [], 0, cap
        if sparse[k]:
            buckets.append(Bucket((k,), is_sparse=True))
            continue
        places.append(k)
        size += bytes_
    return [*buckets, Bucket(tuple(places))] if places else buckets


def start(
    peers: Peers,
    bucket: Bucket,
    params: Sequence[Tensor],
    grads: dict[int, tuple[Tensor, bool]],
    share: int,
    extra: Sequence[float] = (),
) -> Reduction:
    """Start the mean of one bucket's gradients.

    Args:
        peers: The ranks.
        bucket: The bucket.
        params: All parameters.
        grads: Gradients by place, each with whether it may be written to; missing ones count as zeros.
        share: What to divide by.
        extra: Numbers whose sum over ranks is wanted too.
    """
    started = Reduction(share=share)
    if bucket.is_sparse:
        started = _start_sparse(peers, bucket.places[0], params, grads, share)
    pieces: list[Tensor] = []
    for k in () if bucket.is_sparse else bucket.places:
        param = params[k]
        grad, is_own = grads.get(k, (None, False))
        if param.numel() * param.element_size() < _LARGE:
            started.small.append(k)
            grad = torch.zeros_like(param) if grad is None else grad
            is_plain = grad.layout is torch.strided and param.is_contiguous()
            pieces.append(grad if is_plain else _line(param, grad))
        else:
            total = _writable(param, grad, is_own, share)
            started.grads[k] = total
            started.works.append(peers.all_reduce(_line(param, total), Kind.BACKWARD))
    dtype = pieces[0].dtype if pieces else None
    more = torch.tensor(extra, dtype=dtype if dtype in _ROOMY else torch.float32, device=peers.device)
    if dtype in _ROOMY and extra:
        pieces.append(more)
    if pieces:
        started.flat = flat = _flatten(pieces)
        if dtype not in _ROOMY:
            flat.div_(share)  # Their sum may be too large.
        started.works.append(peers.all_reduce(flat, Kind.BACKWARD))
        if dtype in _ROOMY and extra:
            started.extra = flat[-len(extra) :]
            return started
    if extra:
        started.extra = more
        started.works.append(peers.all_reduce(more, Kind.BACKWARD))
    return started


def finish(peers: Peers, started: Reduction, params: Sequence[Tensor]) -> dict[int, Tensor]:
    """Wait for a bucket; return its mean gradients by place, each in memory of its own."""
    for work in started.works:
        peers.wait(work, Kind.BACKWARD)
    if started.flat is not None:
        small = [params[k] for k in started.small]
        is_roomy = started.flat.dtype in _ROOMY
        if is_roomy and all(param.is_contiguous() for param in small):
            own = list(torch._foreach_div(_unflatten(started.flat, small), float(started.share)))
        else:
            sizes = [param.numel() for param in small]
            own = [torch.empty_like(param) for param in small]
            parts = torch.split(started.flat[: sum(sizes)], sizes)
            torch._foreach_copy_([_line(t, t) for t in own], list(parts))
            if is_roomy:
                torch._foreach_div_(own, float(started.share))
        started.grads.update(zip(started.small, own, strict=True))
    return started.grads


def is_own(grads: tuple[Tensor | None, ...], place: int) -> bool:
    """Tell whether only autograd's call of a backward holds a large gradient, which then may be written to.

    Other gradients may be expanded, be one tensor for two parameters, or one that a user's Function keeps.
    """
    grad = grads[place]
    if grad is None or grad.numel() * grad.element_size() < _LARGE:
        return False
    return _held(grads, place) in _held_by_the_call_alone()


def layout_of(param: Tensor) -> tuple[int, ...]:
    """Return the strides that gradients of a parameter have; flat pieces are cut by them on every rank."""
    return tuple(torch.empty_like(param, device="meta").stride())


def _start_sparse(
    peers: Peers, place: int, params: Sequence[Tensor], grads: dict[int, tuple[Tensor, bool]], share: int
) -> Reduction:
    param = params[place]
    grad, _ = grads.get(place, (None, False))
    if grad is None:
        dims = 1 if param.dim() else 0
        indices = torch.zeros(dims, 0, dtype=torch.int64, device=param.device)
        grad = torch.sparse_coo_tensor(
            indices, param.new_zeros(0, *param.shape[dims:]), param.shape, check_invariants=False
        )
    elif grad.layout is torch.strided:
        grad = grad.to_sparse(1)
    total = grad.coalesce() / share
    return Reduction([peers.all_reduce(total, Kind.BACKWARD)], {place: total})


def _writable(param: Tensor, grad: Tensor | None, is_own: bool, share: int) -> Tensor:
    if grad is None:
        return torch.zeros_like(param)
    if is_own and grad.layout is torch.strided and grad.stride() == layout_of(param):
        return grad.div_(share)
    return torch.empty_like(param).copy_(grad.to_dense() if grad.is_sparse else grad).div_(share)


def _line(param: Tensor, grad: Tensor) -> Tensor:
    """Return the entries of a gradient in the order in which the parameter's layout has them in memory."""
    if grad.is_sparse:
        grad = grad.to_dense()
    strides = layout_of(param) if not param.is_contiguous() else None
    if strides is None or param.numel() == 0:
        return grad.reshape(-1)
    if grad.stride() != strides:
        grad = torch.empty_like(param).copy_(grad)
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())


def _held(grads: tuple[Tensor | None, ...], place: int) -> tuple[int, ...]:
    """Count who holds a gradient, its memory, and what it is a view of, as that of a linear layer is."""
    grad: Any = grads[place]
    if grad is None or grad.layout is not torch.strided or grad.storage_offset():
        return ()
    count = sys.getrefcount(grad)
    storage = grad.untyped_storage()
    base = grad._base
    return (
        count,
        grad._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
        storage.nbytes() - grad.numel() * grad.element_size(),
        0 if base is None else sys.getrefcount(base),
        0 if base is None else base._use_count(),
    )


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: set[tuple[int, ...]], x: Tensor) -> Tensor:
        ctx.found = found
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.found.add(_held(grads, 0))
        return None, None


@functools.cache
def _held_by_the_call_alone() -> frozenset[tuple[int, ...]]:
    """Return what :func:`_held` counts where nobody else holds a gradient; it differs between versions.

    One is a plain tensor, one a view of a tensor that nobody else has.
    """
    found: set[tuple[int, ...]] = set()
    probe: Any = _Probe.apply
    x = torch.zeros(2, 3, requires_grad=True)
    with torch.enable_grad():
        out = (probe(found, x) * x.detach()).sum()
        out += torch.nn.functional.linear(x.detach(), probe(found, x)).sum()
        torch.autograd.backward(out)
    return frozenset(found)
