"""Whether the processes hand the same replicated arguments to a call: structures, shapes, dtypes, numbers."""

from __future__ import annotations

import functools
import hashlib
import numbers
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcpar._errors import ReplicaMismatchError
from funcpar._graph import innermost, is_smooth
from funcpar._link import Link

_MOST_LINES = 20


def described(leaf: Any) -> str:
    """Return what the processes must agree on about one leaf."""
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    text = "" if isinstance(leaf, set | frozenset) else repr(leaf)
    # An address, or the order of a set, is this process's own.
    return type(leaf).__qualname__ if not text or " at 0x" in text else text


def identified(fun: Callable[..., Any]) -> str:
    """Return what tells a function from others, the same in every process."""
    while isinstance(fun, functools.partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
    code = getattr(fun, "__code__", None)
    if code is None:
        return type(fun).__qualname__
    constants = [each for each in code.co_consts if isinstance(each, numbers.Number | str)]
    text = zlib.crc32(code.co_code + repr((code.co_names, constants)).encode())
    return f"{code.co_qualname}, line {code.co_firstlineno} of {Path(code.co_filename).name}, code {text:08x}"


def digest(kinds: dict[str, str]) -> bytes:
    """Return a short stand-in for what the processes must agree on, the same in every process."""
    text = "\n".join(f"{name} {kind}" for name, kind in sorted(kinds.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def digest_of_values(tensor: Tensor) -> tuple[str, bytes]:
    """Return a short stand-in for a tensor, the same wherever its entries are equal."""
    values = innermost(tensor).detach().cpu()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if is_smooth(values):
        values = values + 0.0  # Turns -0.0, which is equal to it, into 0.0.
    flat = values.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return described(values), hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


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
