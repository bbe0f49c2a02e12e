"""Modules that are the same on all ranks: compared by name and shape, then given one rank's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import funcpar as fp
from compat._buckets import layout_of
from compat._peers import Kind, Peers

Places: TypeAlias = Sequence[tuple[dict[str, Any], str, str]]
_PIECE = 64 << 20  # Bytes sent at once.
_MARK = 16  # Bytes.


def tensors_of(module: nn.Module, ignored: set[str], with_buffers: bool) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, without those to ignore."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    if with_buffers:
        named.update(module.named_buffers())
    return {name: tensor for name, tensor in named.items() if name not in ignored}


def check_sameness(peers: Peers, tensors: Mapping[str, Tensor]) -> None:
    """Compare names, shapes, dtypes, layouts and requires_grad over ranks.

    Raises:
        ReplicaMismatchError: On every rank, with every tensor that differs.
    """
    mine = {name: _description(tensor) for name, tensor in tensors.items()}
    peers.meet(Kind.START).wait()
    everyones: list[Any] = [None] * peers.size
    dist.all_gather_object(everyones, mine, group=peers.group)
    names = list(dict.fromkeys(name for one in everyones for name in one))
    lines = []
    for name in names:
        told = [one.get(name, "missing") for one in everyones]
        if len(set(told)) > 1:
            shown = "   ".join(f"rank {rank}: {what}" for rank, what in enumerate(told))
            lines.append(f"  {name}   {shown}")
    if not lines and len({tuple(one) for one in everyones}) > 1:
        lines = [f"  rank {rank}: {', '.join(one)}" for rank, one in enumerate(everyones)]
    if lines:
        rest = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise fp.ReplicaMismatchError(
            f"{peers.call}: the ranks hold different modules:\n" + "\n".join([*lines[:20], *rest]) + "\n"
            "Build the same module on every rank before you wrap it."
        )


def copy_from(peers: Peers, source: int, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors in place by those of one rank."""
    piece: list[Tensor] = []
    for tensor in (*tensors, None):
        if tensor is not None:
            piece.append(tensor.detach())
        if piece and (tensor is None or sum(map(_bytes, piece)) >= _PIECE):
            values = _received(peers, source, piece, Kind.START)
            if peers.rank != source:
                with torch.no_grad():
                    for own, value in zip(piece, values, strict=True):
                        own.copy_(value)
            piece = []


def take_buffers(peers: Peers, places: Places, agreed: set[int]) -> None:
    """Put the first active rank's buffers into their places, as new tensors where values differ.

    A graph may hold the old ones: two forwards before one backward stay right. Sizes that all ranks have
    agreed on before need no meeting; then a mark beside the values tells whether they are the right ones.
    """
    buffers = {id(table[key]): table[key] for table, key, _ in places}
    old = [buffer for buffer in buffers.values() if buffer.layout is torch.strided]
    if not old:
        return
    size = sum(map(_bytes, old)) + _MARK
    source = 0
    if peers.always_meet or size not in agreed:
        source = peers.meet(Kind.BUFFERS, size).wait()[0]
        agreed.add(size)
    mark = torch.tensor([peers.number, size])
    *values, received = _received(peers, source, [*old, mark], Kind.BUFFERS)
    if peers.rank == source:
        return
    if not torch.equal(mark, received):
        raise fp.ReplicaMismatchError(
            f"{peers.call}: the ranks ran forward of different wrappers at the same time, and sent buffers "
            f"of others.\n"
            f"Run them in the same order on every rank; TORCH_DISTRIBUTED_DEBUG=DETAIL shows the calls."
        )
    changed = {id(o): v for o, v in zip(old, values, strict=True) if not torch.equal(o, v)}
    for table, key, _ in places:
        table[key] = changed.get(id(table[key]), table[key])


def send_nothing(peers: Peers, source: int, size: int) -> None:
    """Take part in the broadcast of buffers without use for them."""
    peers.broadcast(torch.empty(size, dtype=torch.uint8, device=peers.device), source, Kind.BUFFERS)


def _received(peers: Peers, source: int, tensors: Sequence[Tensor], kind: Kind) -> list[Tensor]:
    """Return a rank's values of all tensors, sent as bytes in one piece."""
    flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8).to(peers.device) for t in tensors])
    peers.broadcast(flat, source, kind)
    found = []
    for tensor, part in zip(tensors, torch.split(flat, [_bytes(t) for t in tensors]), strict=True):
        own = part.clone().view(tensor.dtype).view(tensor.shape)
        found.append(own if tensor.is_contiguous() else torch.empty_like(tensor).copy_(own))
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _description(tensor: Tensor) -> str:
    kind = "" if tensor.requires_grad else ", no gradient"
    strides = "" if tensor.is_contiguous() else f", strides {layout_of(tensor)}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{kind}{strides}"
