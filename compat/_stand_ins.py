"""Other tensors in the place of a live module's parameters, for the time of one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Slots = list[tuple[dict[str, Any], str, str]]


def slots_of(module: nn.Module) -> Slots:
    """Return every place below a module that holds a parameter: its table, its key there, its full name."""
    slots: Slots = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        table = one._parameters
        slots += [(table, key, prefix + key) for key, param in table.items() if param is not None]
        children = [(f"{prefix}{name}.", m) for name, m in one._modules.items() if m is not None]
        waiting += reversed(children)
    return slots


@contextlib.contextmanager
def standing_in(slots: Slots, stand_ins: Mapping[int, Tensor], module: nn.Module) -> Iterator[None]:
    """Put stand-ins, found by the id of the parameter, in place; afterwards parameters are back.

    What forward assigned stays, a tied weight say, with parameters in place of stand-ins. The module is
    the live one, so whatever else forward writes to it is as without a wrapper.
    """
    originals = {
        id(stand_ins[id(table[key])]): table[key] for table, key, _ in slots if id(table[key]) in stand_ins
    }
    for table, key, _ in slots:
        table[key] = stand_ins.get(id(table[key]), table[key])
    lists = _weight_lists(module)
    for layer, name in lists:
        layer.__dict__[name] = [stand_ins.get(id(w), w) for w in layer.__dict__[name]]
    try:
        yield
    finally:
        for table in {id(table): table for table, _, _ in slots}.values():
            for key, value in table.items():
                table[key] = originals.get(id(value), value)
        for layer, name in lists:
            layer.__dict__[name] = [originals.get(id(w), w) for w in layer.__dict__[name]]


def _weight_lists(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the lists in which recurrent layers keep the parameters that they compute with."""
    return [(m, "_flat_weights") for m in module.modules() if "_flat_weights" in m.__dict__]
