"""Whether the processes hand the same replicated arguments to a call: structures, shapes, dtypes, numbers."""

from __future__ import annotations

import hashlib
import numbers
from typing import Any

import torch
from torch import Tensor

from funcpar._errors import ReplicaMismatchError
from funcpar._graph import innermost
from funcpar._link import Link

_MOST_LINES = 20


def described(leaf: Any) -> str:
    """Return what the processes must agree on about one leaf."""
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    if isinstance(leaf, numbers.Number | str | bytes | torch.dtype | None):
        return repr(leaf)
    return type(leaf).__qualname__


def digest(kinds: dict[str, str]) -> bytes:
    """Return a short stand-in for what the processes must agree on, the same in every process."""
    text = "\n".join(f"{name} {kind}" for name, kind in sorted(kinds.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def digest_of_values(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return a short stand-in for a tensor, the same wherever its entries are."""
    values = innermost(tensor).detach().cpu()
    if values.layout is not torch.strided:
        values = values.to_dense()
    words = values.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = words[: words.numel() // 8 * 8].view(torch.int64)
    # Twice, since either alone would miss entries that changed places.
    sums = int(whole.sum()), int((whole * _places(whole)).sum()), *words[whole.numel() * 8 :].tolist()
    return described(values), sums


def _places(whole: Tensor) -> Tensor:
    return torch.arange(1, whole.numel() + 1) * 0x1E3779B97F4A7C15


def check_alike(link: Link, call: str, kinds: dict[str, str]) -> None:
    """Meet, and refuse leaves, by path, that are not the same in all processes.

    Raises:
        ReplicaMismatchError: Some are not; they are listed, process by process.
    """
    everyone = link.meet(f"{call}, comparing arguments", kinds)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    lines = []
    for name in names:
        found = [theirs.get(name, "missing") for theirs in everyone]
        if any(kind != found[0] for kind in found):
            shown = ", ".join(f"{kind} in process {k}" for k, kind in enumerate(found))
            lines.append(f"\n  {name}  {shown}")
    if lines:
        more = len(lines) - _MOST_LINES
        listed = "".join(lines[:_MOST_LINES]) + (f"\n  and {more} more" if more > 0 else "")
        raise link.agreed(
            ReplicaMismatchError(
                f"{call}: the processes give different structures, shapes or numbers:{listed}\n"
                f"Build the same model in every process; split what differs, instead of replicating it."
            )
        )
