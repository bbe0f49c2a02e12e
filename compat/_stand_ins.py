"""Other tensors in the place of a live module's parameters, for the time of one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Survey:
    """Where a module's tensors are, found in one walk, as every forward needs it.

    Attributes:
        params: Every place that holds a parameter: its table, its key there, its full name.
        buffers: The same for buffers.
        layers: Recurrent layers, which keep a list of the parameters that they compute with.
    """

    params: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    buffers: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


def survey(module: nn.Module, ignored: set[str]) -> Survey:
    """Look through a module and all below it, each once; names to ignore are left out."""
    found = Survey()
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        entries = one.__dict__
        for tables, places in (("_parameters", found.params), ("_buffers", found.buffers)):
            table = entries[tables]
            for key, tensor in table.items():
                if tensor is not None and (not ignored or prefix + key not in ignored):
                    places.append((table, key, prefix + key))
        if "_flat_weights" in entries:
            found.layers.append(entries)
        if children := entries["_modules"]:
            waiting += [(f"{prefix}{name}.", m) for name, m in reversed(children.items()) if m is not None]
    return found


@contextlib.contextmanager
def standing_in(found: Survey, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
    """Put stand-ins, found by the id of the parameter, in place; afterwards parameters are back.

    The module is the live one, so whatever else forward writes to it is as without a wrapper.
    """
    replaced = []
    for table, key, _ in found.params:
        param = table[key]
        stand_in = stand_ins.get(id(param))
        if stand_in is not None:
            replaced.append((table, key, param, stand_in))
            table[key] = stand_in
    for layer in found.layers:
        layer["_flat_weights"] = [stand_ins.get(id(w), w) for w in layer["_flat_weights"]]
    try:
        yield
    finally:
        for table, key, param, stand_in in replaced:
            # What forward has put there in its place stays.
            if table.get(key) is stand_in:
                table[key] = param
        originals = {id(stand_in): param for _, _, param, stand_in in replaced} if found.layers else {}
        for layer in found.layers:
            layer["_flat_weights"] = [originals.get(id(w), w) for w in layer["_flat_weights"]]
