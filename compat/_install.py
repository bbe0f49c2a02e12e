"""install: compat's names in the place of torch's, for programs that are not to be changed."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import scatter_gather

from compat._data_parallel import DataParallel, data_parallel
from compat._distributed import DistributedDataParallel
from compat._gather import gather
from compat._parallel_apply import parallel_apply
from compat._replicate import replicate
from compat._scatter import scatter, scatter_kwargs

_TORCH: dict[str, Any] = {
    "DataParallel": torch.nn.DataParallel,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "data_parallel": torch.nn.parallel.data_parallel,
    "parallel_apply": torch.nn.parallel.parallel_apply,
    "replicate": torch.nn.parallel.replicate,
    "scatter": scatter_gather.scatter,
    "scatter_kwargs": scatter_gather.scatter_kwargs,
    "gather": scatter_gather.gather,
}
_OURS: dict[str, Any] = {
    "DataParallel": DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "data_parallel": data_parallel,
    "parallel_apply": parallel_apply,
    "replicate": replicate,
    "scatter": scatter,
    "scatter_kwargs": scatter_kwargs,
    "gather": gather,
}
_CLASSES = ("DataParallel", "DistributedDataParallel")
# Objects of torch's own class call torch's functions, where that is defined.
_OWN = "torch.nn.parallel.distributed"


@dataclass(slots=True)
class _Changes:
    """What install has changed: names in modules, and bases of classes."""

    names: list[tuple[types.ModuleType, str, Any, Any]] = field(default_factory=list)
    bases: list[tuple[type, tuple[type, ...]]] = field(default_factory=list)


_changes: _Changes | None = None


def install() -> None:
    """Put compat's names in the place of torch's: torch.nn.DataParallel and those of torch.nn.parallel.

    Replaced are the names in torch's modules and in every module that has imported one before, under
    whatever name; classes that derive from one of torch's two derive from compat's then. Objects that
    exist already stay what they are, and so do references from elsewhere than a module (a list, a default
    value). Doing it twice does nothing.

    Raises:
        RuntimeError: A class that derives from one of torch's cannot be given another base.

    Example:
        >>> import compat, torch
        >>> compat.install()
        >>> torch.nn.DataParallel is compat.DataParallel
        True
        >>> compat.uninstall()
        >>> torch.nn.DataParallel is compat.DataParallel
        False
    """
    global _changes
    if _changes is not None:
        return
    changes = _Changes()
    for name in _CLASSES:
        _rebase(changes, name)
    replacements = {id(_TORCH[name]): _OURS[name] for name in _TORCH}
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or _is_compat(module.__name__):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements and (module.__name__ != _OWN or name in _CLASSES):
                new = replacements[id(value)]
                changes.names.append((module, name, value, new))
                setattr(module, name, new)
    _changes = changes


def uninstall() -> None:
    """Put torch's names back, where install has replaced them. Without install it does nothing.

    A module imported in between keeps what it has.

    Example:
        >>> import compat
        >>> compat.uninstall()
    """
    global _changes
    if _changes is None:
        return
    for module, name, old, new in _changes.names:
        if vars(module).get(name) is new:
            setattr(module, name, old)
    for cls, bases in _changes.bases:
        cls.__bases__ = bases
    _changes = None


def _is_compat(name: str) -> bool:
    return name == "compat" or name.startswith("compat.")


def _rebase(changes: _Changes, name: str) -> None:
    original, ours = _TORCH[name], _OURS[name]
    for cls in original.__subclasses__():
        if cls is ours:
            continue
        bases = cls.__bases__
        try:
            cls.__bases__ = tuple(ours if base is original else base for base in bases)
        except TypeError as error:
            for changed, before in changes.bases:
                changed.__bases__ = before
            raise RuntimeError(
                f"compat.install: {cls.__module__}.{cls.__qualname__} derives from torch's {name} "
                f"already, and cannot be given another base ({error}).\n"
                f"Call compat.install() before that module is imported."
            ) from error
        changes.bases.append((cls, bases))
