"""Values as bytes: the tensors apart, as they are, and the rest by pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Kinds: TypeAlias = list[tuple[torch.dtype, torch.Size]]


def packed(value: Any) -> tuple[bytes, Kinds, Tensor]:
    """Return a value without its tensors, what kinds of tensors those are, and their bytes."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> int | None:
            if not isinstance(found, Tensor):
                return None
            tensors.append(found)
            return len(tensors) - 1

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    whole = torch.cat([torch.zeros(0, dtype=torch.uint8), *map(_bytes, tensors)])
    return buffer.getvalue(), [(tensor.dtype, tensor.shape) for tensor in tensors], whole


def unpacked(skeleton: bytes, kinds: Kinds, whole: Tensor) -> Any:
    """Return the value again, its tensors on the CPU and in memory of their own."""
    tensors = _tensors(whole, kinds)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return tensors[place]

    return Unpickler(io.BytesIO(skeleton)).load()


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _tensors(whole: Tensor, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
    tensors, start = [], 0
    for dtype, shape in kinds:
        stop = start + shape.numel() * dtype.itemsize
        tensors.append(whole[start:stop].clone().view(dtype).reshape(shape))
        start = stop
    return tensors
