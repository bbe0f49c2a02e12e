"""State dicts of wrappers: those of a plain module, or of one wrapped more often, fit too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn


def add_prefix(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Name the entries below a prefix as the wrapper does."""
    module: Any = wrapper._modules["module"]
    expected = {f"module.{key}" for key in module.state_dict(keep_vars=True)}
    below = [key for key in state_dict if key.startswith(prefix)]
    for full, name in _renamed({key: key[len(prefix) :] for key in below}, expected).items():
        if full != prefix + name:
            state_dict[prefix + name] = state_dict.pop(full)


def with_versions(wrapper: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict whose versions of layers, by which torch tells old formats, are named so too."""
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return state_dict
    module: Any = wrapper._modules["module"]
    expected = [f"module.{name}." if name else "module." for name, _ in module.named_modules()]
    by_core = {_core(name): name for name in sorted(expected, key=len)}
    new: Any = OrderedDict(state_dict)
    new._metadata = OrderedDict()
    # The longest name is that of the module itself, not of a wrapper around it: it comes last, and counts.
    for key in sorted(versions, key=len):
        core = _core(f"{key}." if key else "")
        new._metadata[by_core.get(core, f"module.{core}").removesuffix(".")] = dict(versions[key])
    return new  # type: ignore[no-any-return]


def _renamed(keys: dict[str, str], expected: set[str]) -> dict[str, str]:
    by_core = {_core(name): name for name in sorted(expected, key=len)}
    # What belongs to a wrapper further down is named there.
    return {
        full: key
        if key in expected
        else by_core.get(_core(key), key if key.startswith("module.") else f"module.{key}")
        for full, key in keys.items()
    }


def _core(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
