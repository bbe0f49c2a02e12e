"""Donated arguments: memory that a call may use for its results, and tensors that end with it.

A result of the same shape, dtype and device gets the memory of a donated tensor where nothing else
can see that memory: no other result, no view, no array, no graph. Which is known when all results of
the call are, so that nothing is written before. The donated tensor itself is no use afterwards, and
says so: it becomes a :class:`Donated`, whose every operation raises.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpar import _copies, _graph
from funcpar._closure import tensors_within
from funcpar._graph import shares_memory, storages


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a donated tensor.

    Attributes:
        call: The call it was donated to.
        shape: The shape that it had.
        path: What the call knew it as.
        has_failed: Whether the call failed, after it had written a result to its memory.
        is_kept: Whether a graph may need it, which has its memory then.
    """

    call: str
    shape: torch.Size
    path: str
    has_failed: bool
    is_kept: bool

    def __str__(self) -> str:
        ended = "failed when a result had its memory already" if self.has_failed else "has ended"
        return f"{self.path} was donated to this call, which {ended}, and is used again"

    @property
    def remedy(self) -> str:
        """What to use instead."""
        if self.has_failed:
            return "Make it again, or leave the argument out of donate_argnums."
        return (
            "Use what the call returned, which a function that closes over this must take as an argument, "
            "or leave the argument out of donate_argnums."
        )


class Donated(Tensor):
    """What a donated tensor becomes."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape that it had."""
        return fate(self).shape

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<tensor of shape {list(self.shape)}, donated to {fate(self).call}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone = [fate(tensor) for tensor in _donated_within((args, kwargs or {}))]
        if all(each.is_kept for each in gone) and torch._C._current_graph_task_id() != -1:
            # A backward in Python, of a custom function say, is handed what its forward saved.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if not gone:
            raise RuntimeError("a donated tensor is used again.\nUse what the call returned.")
        raise RuntimeError(f"{gone[0].call}: {gone[0]}.\n{gone[0].remedy}")


def fate(tensor: Donated) -> Fate:
    """Return what became of a tensor."""
    return tensor.__dict__["_fate"]  # type: ignore[no-any-return]


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
        RuntimeError: Arguments were donated before: all of them, with the call.
    """

    def __init__(
        self, call: str, arguments: Sequence[Sequence[tuple[str, Any]]], donated: Sequence[bool]
    ) -> None:
        self._call = call
        _refuse_gone(call, arguments)
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
        # What `open` finds: the places whose memory is free, by shape, dtype and device; what stands
        # for donated tensors that are results themselves; whether a graph was made.
        self._rooms: dict[Any, list[int]] = {}
        self._returned: dict[int, Tensor] = {}
        self._given: set[int] = set()
        self._is_recorded = False
        self._taken: set[int] = set()
        self._memory: set[int] | None = None

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

    def open(self, outputs: Iterable[Iterable[Any]]) -> None:
        """Learn all that the shards returned; before, no memory is free."""
        mine = {id(tensor) for tensor in self._tensors}
        for out in outputs:
            for leaf in out:
                if not isinstance(leaf, Tensor):
                    continue
                if id(leaf) in mine and id(leaf) not in self._returned:
                    self._returned[id(leaf)] = leaf.view_as(leaf) if leaf.requires_grad else leaf.detach()
                # A graph may need what it was made of in ways that no count tells: a checkpoint does.
                self._is_recorded = self._is_recorded or leaf.grad_fn is not None
        if self._is_recorded:
            return
        rooms = defaultdict(list)
        for k in reversed(range(len(self._tensors))):
            tensor = self._tensors[k]
            if id(tensor) not in self._returned and tensor.is_contiguous():
                rooms[tensor.shape, tensor.dtype, tensor.device].append(k)
        self._rooms = dict(rooms)

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the memory of a donated tensor as a new tensor, each once; None if none fits."""
        places = self._rooms.get((torch.Size(shape), dtype, device), [])
        while places:
            k = places.pop()
            if _is_alone(self._tensors[k]):
                self._taken.add(k)
                return self._tensors[k].detach()
        return None

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join tensors, in the memory of a donated one if one fits."""
        room = None
        if not any(part.requires_grad for part in parts):
            shape = list(parts[0].shape)
            shape[dim] = sum(part.shape[dim] for part in parts)
            room = self.room(shape, parts[0].dtype, parts[0].device)
        return torch.cat(list(parts), dim) if room is None else torch.cat(list(parts), dim, out=room)

    def returns(self, result: Any) -> bool:
        """Tell whether a result is a donated tensor itself, written to perhaps."""
        return id(result) in self._returned

    def returned(self, result: Any, *, once: bool = True) -> Tensor:
        """Return what lives on of such a result: with ``once`` copies of it, after the first."""
        kept = self._returned[id(result)]
        if once and id(result) in self._given:
            return kept.clone()
        self._given.add(id(result))
        return kept

    def settle(self, result: Any) -> Any:
        """Return a result in the memory of a donated tensor, if one fits."""
        if self.returns(result):
            return self.returned(result)
        if not isinstance(result, Tensor) or type(result) not in _graph.PLAIN_TYPES or result.requires_grad:
            return result
        if result.layout is not torch.strided or shares_memory(result, self._storages):
            return result
        room = self.room(result.shape, result.dtype, result.device)
        return result if room is None else room.copy_(result)

    def _storages(self) -> set[int]:
        if self._memory is None:
            self._memory = storages(self._tensors)
        return self._memory

    def __enter__(self) -> Donation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the donated tensors go: their memory belongs to results, or to nobody.

        After a failure only those go whose memory a result was written to before.
        """
        has_failed = kind is not None
        for k, tensor in enumerate(self._tensors):
            if has_failed and k not in self._taken:
                continue
            is_kept = self._is_recorded or _is_held(tensor)
            known = Fate(self._call, tensor.shape, self._names[k], has_failed, is_kept)
            _copies.forget(tensor)
            if not is_kept:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.__dict__["_fate"] = known
            tensor.__class__ = Donated


def _is_alone(tensor: Tensor) -> bool:
    """Tell whether nothing but this tensor can see its memory."""
    storage = tensor.untyped_storage()
    # The tensor has it, and `storage`. An array of numpy on it makes it no longer resizable.
    is_shared = torch._C._storage_Use_Count(storage._cdata) > 2
    return not is_shared and storage.resizable() and not _is_held(tensor)


def _is_held(tensor: Tensor) -> bool:
    """Tell whether something below Python holds the tensor itself, as a graph that saved it does."""
    return tensor._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def _refuse_gone(call: str, arguments: Sequence[Sequence[tuple[str, Any]]]) -> None:
    gone = [
        (path, fate(leaf)) for leaves in arguments for path, leaf in leaves if type(leaf) is Donated
    ]  # fmt: skip
    if gone:
        lines = "".join(f"\n  {path}  as {each.path}, to {each.call}" for path, each in gone)
        raise RuntimeError(
            f"{call}: these arguments were donated to an earlier call:{lines}\n{gone[0][1].remedy}"
        )


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
    if not _is_alone(tensor):
        return "shares its memory with another tensor, an array or a graph"
    return ""
