"""Donated arguments: memory that a call may use for its results, and tensors that end with it.

A result of the same shape, dtype and device gets the memory of a donated tensor where nothing else
can see that memory: no view, no array, no graph. The donated tensor itself is no use afterwards, and
says so: it becomes a :class:`Donated`, an empty tensor whose every operation raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpar import _copies, _graph
from funcpar._closure import tensors_within
from funcpar._graph import shares_memory


class Donated(Tensor):
    """What a donated tensor becomes."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape that it had."""
        return self.__dict__["_donated"][1]  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<tensor of shape {list(self.shape)}, donated to {self.__dict__['_donated'][0]}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone = next(_donated_within((args, kwargs or {})), None)
        what = "a tensor" if gone is None else gone.__dict__["_donated"][2]
        call = "a call" if gone is None else gone.__dict__["_donated"][0]
        raise RuntimeError(
            f"{call}: {what} was donated to this call, which has ended, and is used again.\n"
            f"Use what the call returned, or leave the argument out of donate_argnums."
        )


def _donated_within(given: Any) -> Any:
    if type(given) is Donated:
        yield given
    elif isinstance(given, list | tuple | dict):
        for item in given.values() if isinstance(given, dict) else given:
            yield from _donated_within(item)


class Donation:
    """The donated tensors of one call, and the memory of those that is not used yet.

    Args:
        call: The call for messages.
        arguments: For each argument its leaves, each with its path.
        donated: Which arguments are donated.

    Raises:
        ValueError: A donated tensor cannot be given away: all of them, with the reason.
    """

    def __init__(
        self, call: str, arguments: Sequence[Sequence[tuple[str, Any]]], donated: Sequence[bool]
    ) -> None:
        self._call = call
        times = Counter(id(leaf) for leaves in arguments for _, leaf in leaves)
        chosen = [
            (path, leaf)
            for leaves, is_donated in zip(arguments, donated, strict=True) if is_donated
            for path, leaf in leaves if isinstance(leaf, Tensor)
        ]  # fmt: skip
        lines = [f"\n  {path}  {why}" for path, leaf in chosen if (why := _refused(leaf, times[id(leaf)]))]
        if lines:
            raise ValueError(
                f"{call}: these arguments cannot be donated:{''.join(lines)}\n"
                f"Donate tensors that nothing else uses (a .detach().clone()), or leave them out of "
                f"donate_argnums."
            )
        self._names = [path for path, _ in chosen]
        self._tensors = [leaf for _, leaf in chosen]
        self._rooms = list(range(len(chosen)))

    def refuse_closed_over(self, funs: Sequence[Callable[..., Any]]) -> None:
        """Refuse what the function also has from elsewhere.

        Raises:
            ValueError: It closes over a donated tensor.
        """
        mine = {id(tensor): k for k, tensor in enumerate(self._tensors)}
        for tensor in tensors_within(funs):
            if id(tensor) in mine:
                raise ValueError(
                    f"{self._call}: {self._names[mine[id(tensor)]]} is donated, and the function closes over "
                    f"it, so that the next call would find it gone.\n"
                    f"Use the argument in its place, or leave it out of donate_argnums."
                )

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the memory of a donated tensor as a new tensor, each once; None if none fits."""
        for k in self._rooms:
            tensor = self._tensors[k]
            fits = tensor.shape == tuple(shape) and tensor.dtype == dtype and tensor.device == device
            if fits and tensor.is_contiguous() and _is_alone(tensor):
                self._rooms.remove(k)
                return tensor.detach()
        return None

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join tensors, in the memory of a donated one if one fits."""
        room = None
        if not any(part.requires_grad for part in parts):
            shape = list(parts[0].shape)
            shape[dim] = sum(part.shape[dim] for part in parts)
            room = self.room(shape, parts[0].dtype, parts[0].device)
        return torch.cat(list(parts), dim) if room is None else torch.cat(list(parts), dim, out=room)

    def settle(self, result: Any) -> Any:
        """Return a result in the memory of a donated tensor, if one fits."""
        if not isinstance(result, Tensor) or type(result) not in _graph.PLAIN_TYPES or result.requires_grad:
            return result
        for k, tensor in enumerate(self._tensors):
            if result is tensor:  # The function returned it, written to perhaps.
                if k in self._rooms:
                    self._rooms.remove(k)
                return tensor.detach()
        if result.layout is not torch.strided or shares_memory(result, self._tensors):
            return result
        room = self.room(result.shape, result.dtype, result.device)
        return result if room is None else room.copy_(result)

    def __enter__(self) -> Donation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the donated tensors go: their memory belongs to results, or to nobody.

        After a failure only those go whose memory a result was written to before.
        """
        for k, tensor in enumerate(self._tensors):
            if kind is not None and k in self._rooms:
                continue
            known = self._call, tensor.shape, self._names[k]
            _copies.forget(tensor)
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.__dict__["_donated"] = known
            tensor.__class__ = Donated


def _is_alone(tensor: Tensor) -> bool:
    """Tell whether nothing but this tensor can see its memory."""
    storage = tensor.untyped_storage()
    # The tensor has it, and `storage`. An array of numpy on it makes it no longer resizable.
    return torch._C._storage_Use_Count(storage._cdata) <= 2 and storage.resizable()


def _refused(tensor: Tensor, times: int) -> str:
    """Say why a tensor cannot be donated; empty if it can."""
    if type(tensor) not in _graph.PLAIN_TYPES:
        return f"is a {type(tensor).__name__}, and only plain tensors can end"
    if tensor.requires_grad:
        return "requires a gradient, so that a graph needs it"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if times > 1:
        return "is passed more than once"
    if not _is_alone(tensor) or tensor._use_count() > 1:  # type: ignore[attr-defined]
        return "shares its memory with another tensor, an array or a graph"
    return ""
