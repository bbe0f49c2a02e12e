"""Module trees that hold DataParallel wrappers: in a replica a wrapper passes its input on."""

from __future__ import annotations

from typing import Any

from torch import nn


class PassThrough(nn.Module):
    """What stands for a DataParallel in a replica, whose device is the only one it may use."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return attribute_through(self, name)


def attribute_through(wrapper: nn.Module, name: str) -> Any:
    """Return a wrapper's own parameter, buffer or submodule, or else the wrapped module's attribute."""
    own = wrapper.__dict__
    for table in ("_parameters", "_buffers", "_modules"):
        if name in own.get(table, ()):
            return own[table][name]
    module = own.get("_modules", {}).get("module")
    if module is None or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(f"{type(wrapper).__name__!r} object has no attribute {name!r}")
    return getattr(module, name)


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the module, or a shallow copy of its tree in which wrappers pass their input on."""
    if not any(isinstance(m, nn.DataParallel) for m in module.modules()):
        return module
    return _copied(module, {})


def _copied(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    is_wrapper = isinstance(module, nn.DataParallel)
    if not is_wrapper and not any(isinstance(m, nn.DataParallel) for m in module.modules()):
        return module
    new: nn.Module = object.__new__(PassThrough if is_wrapper else type(module))
    object.__setattr__(new, "__dict__", module.__dict__.copy())
    known[id(module)] = new
    children = module._modules.items()
    new.__dict__["_modules"] = {
        name: child if child is None else _copied(child, known) for name, child in children
    }
    return new
