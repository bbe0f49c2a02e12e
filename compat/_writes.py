"""Writes of one forward, as data: how each is done again on the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from compat._hidden import Original, slots_of
from compat._nodes import rebuilt

MISSING = object()


@dataclass(frozen=True, slots=True)
class Change:
    """What one object of the module becomes.

    Attributes:
        target: The object.
        kind: Of what it gets: new attributes, entries of one of a module's tables, all its items, data.
        contents: Those, by name, or a list; originals stand for what the replica has its own of.
    """

    target: Original
    kind: str
    contents: Any


@dataclass(frozen=True, slots=True)
class Writes:
    """What one forward wrote; names are code below the module."""

    changes: list[Change] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def put_on_originals(self) -> None:
        """Write the same to the originals."""
        for change in self.changes:
            contents = rebuilt(change.contents, lambda x: x.value if isinstance(x, Original) else x)
            _PUT[change.kind](change.target.value, contents)


def _put_entries(table: dict[str, Any], entries: dict[str, Any]) -> None:
    for key, value in entries.items():
        if value is MISSING:
            table.pop(key, None)
        else:
            table[key] = value


def _put_attributes(target: Any, attributes: dict[str, Any]) -> None:
    own = getattr(target, "__dict__", {})
    for key, value in attributes.items():
        if key not in own and key in slots_of(target):
            object.__setattr__(target, key, value) if value is not MISSING else object.__delattr__(
                target, key
            )
        else:
            _put_entries(own, {key: value})


def _put_items(target: Any, items: Any) -> None:
    target.clear()
    if isinstance(target, dict):
        for key, value in items.items():
            target[key] = value
    elif isinstance(target, set):
        target.update(items)
    else:
        target.extend(items)


def _put_buffers(target: nn.Module, buffers: dict[str, tuple[Tensor, bool]]) -> None:
    for key, (buffer, is_persistent) in buffers.items():
        target.register_buffer(key, buffer, is_persistent)


_PUT: dict[str, Callable[[Any, Any], None]] = {
    "attributes": _put_attributes,
    "entries": _put_entries,
    "items": _put_items,
    "buffers": _put_buffers,
    "data": lambda param, given: setattr(param, "data", given["data"]),
    "requires_grad": lambda param, given: param.requires_grad_(given["flag"]),
}
