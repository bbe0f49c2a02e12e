"""The mean over ranks as a differentiable function, and parameters whose gradients pass through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from compat._peers import Kind, Peers

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)


class _Mean(torch.autograd.Function):
    """Entry by entry the mean over ranks; its adjoint is itself, as every rank's loss counts 1/size."""

    @staticmethod
    def forward(peers: Peers, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_averaged(peers, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.peers = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_mean(ctx.peers, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return _mean(ctx.peers, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], peers: Peers, *tensors: Tensor) -> Any:
        return _mean(peers, *tensors), in_dims[1:]


def _mean(peers: Peers, *tensors: Tensor) -> tuple[Tensor, ...]:
    return _Mean.apply(peers, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class Through(torch.autograd.Function):
    """Parameters as they are; their gradients are the mean over ranks."""

    @staticmethod
    def forward(peers: Peers, is_synced: Callable[[], bool], *params: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.peers, ctx.is_synced = inputs[:2]
        ctx.likes = [(p.shape, p.dtype, p.device) for p in inputs[2:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *(mean_of(ctx.peers, grads, ctx.likes) if ctx.is_synced() else grads)

    @staticmethod
    def jvp(ctx: Any, _peers: None, _is_synced: None, *tangents: Tensor | None) -> tuple[Any, ...]:
        return tuple(t if t is None else t.view_as(t) for t in tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return Through.apply(*args), in_dims[2:]  # type: ignore[no-untyped-call]


def mean_of(
    peers: Peers,
    grads: Sequence[Tensor | None],
    likes: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
) -> list[Tensor | None]:
    """Return the mean of each gradient over ranks, differentiable; None where no rank has one.

    A rank without a gradient that another has counts as one of zeros.
    """
    with temporarily_clear_interpreter_stack():
        peers.meet(Kind.GRADIENT, len(grads)).wait()
        is_used = peers.agree([grad is not None for grad in grads], Kind.GRADIENT)
    used = [k for k, flag in enumerate(is_used) if flag]
    if not used:
        return [None] * len(grads)
    given = [_filled(grads[k], likes[k]) for k in used]
    means = _mean(peers, *given)
    found: list[Tensor | None] = [None] * len(grads)
    for k, mean in zip(used, means, strict=True):
        found[k] = mean
    return found


def _filled(grad: Tensor | None, like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    if grad is None:
        shape, dtype, device = like
        return torch.zeros(shape, dtype=dtype, device=device)
    return grad if grad.layout is torch.strided else grad.to_dense()


def _averaged(peers: Peers, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the means as new tensors; one operation per dtype, in a fixed order."""
    found: dict[int, Tensor] = {}
    for code, dtype in enumerate(DTYPES):
        places = [k for k, t in enumerate(tensors) if t.dtype is dtype]
        if not places:
            continue
        flat = torch.cat([tensors[k].detach().reshape(-1) for k in places])
        active = peers.meet(Kind.MEAN, flat.numel(), code).wait()
        flat /= len(active) if peers.divides_by_active else peers.size
        peers.wait(peers.all_reduce(flat, Kind.MEAN), Kind.MEAN)
        parts = torch.ops.aten.split_with_sizes_copy(flat, [tensors[k].numel() for k in places])
        for k, part in zip(places, parts, strict=True):
            found[k] = torch.ops.aten._unsafe_view(part, tensors[k].shape)  # A view could not be written to.
    return [found[k] for k in range(len(tensors))]
