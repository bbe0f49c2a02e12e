"""Pure functions from modules."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcpar._isolation import (
    own_buffers,
    owned_clone,
    plain_functional_call,
    refuse_changes,
    refuse_writes,
)
from funcpar._shell import Shell, make_shell

__all__ = ["functionalize", "functionalize_with_buffers"]

Apply = Callable[..., Any]
_NO_TENSORS: Mapping[str, Tensor] = {}


def functionalize(module: nn.Module) -> tuple[Apply, dict[str, Tensor]]:
    """Split a module into a pure function of its parameters, and those parameters.

    `apply(params, *args, **kwargs)` returns what `module(*args, **kwargs)` would with these parameters. It
    sees the module as it is at the call (mode, hooks, attributes, buffers) and never writes to it, so any
    number of threads may call it. What a forward stores on `self` is gone afterwards, also in lists, dicts
    and plain objects that the module holds. Not copied are objects of the standard library, torch and numpy,
    objects that hold a lock or thread, and those whose class defines `__new__`, `__copy__`, `__deepcopy__`,
    `__reduce__` or `__del__`: all calls share them, and what hooks hold.

    Args:
        module: any module but a ScriptModule, DataParallel or DistributedDataParallel.

    Returns:
        `apply`, and `params`: name to detached tensor, which shares storage with the module's parameter; one
        entry for tied parameters, under the first name, as in `named_parameters()`.

    Raises:
        TypeError: the module, or something it holds that points back into it, cannot be copied; from `apply`
            too, as the module may have changed.
        ValueError: from `apply`: names in `params` are unknown or missing, or the forward changed a buffer
            or, in place, a tensor in an attribute.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> apply, params = functionalize(model)
        >>> sorted(params), apply(params, torch.ones(4, 3)).shape
        (['bias', 'weight'], torch.Size([4, 2]))

    References:
        `torch.func.functional_call`: there unknown names are ignored and the live module is swapped.
    """
    _as_module(module, "functionalize")
    shell = make_shell(module, _NO_TENSORS, _NO_TENSORS)
    return _Apply(module), {name: param.detach() for name, param in shell.params.items()}


def functionalize_with_buffers(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """Split a module into a pure function of its parameters and buffers, and those.

    `apply(params, buffers, *args, **kwargs)` returns `(out, new_buffers)`. Nothing given is written to.
    `new_buffers` has every name, and its tensors own their storage, also where nothing changed.
    A buffer that forward registers under a new name is an attribute of the call, gone afterwards.

    Args:
        module: as for `functionalize`.

    Returns:
        `apply`, `params` as from `functionalize`, and `buffers`: name to detached tensor that shares storage
        with the module's buffer, as in `named_buffers()`, also those that are not persistent.

    Raises:
        TypeError: as `functionalize` does.
        ValueError: from `apply`: names are unknown or missing, or the forward removed a buffer.

    Example:
        >>> apply, params, buffers = functionalize_with_buffers(nn.BatchNorm1d(3))
        >>> out, new = apply(params, buffers, torch.ones(4, 3))
        >>> int(buffers["num_batches_tracked"]), int(new["num_batches_tracked"])
        (0, 1)
    """
    _as_module(module, "functionalize_with_buffers")
    shell = make_shell(module, _NO_TENSORS, _NO_TENSORS)
    params = {name: param.detach() for name, param in shell.params.items()}
    # A buffer that is a parameter too goes by that name.
    buffers = {name: source.detach() for name, (_, _, source, _, _) in shell.buffers.items()}
    return _ApplyWithBuffers(module), params, buffers


class _Apply:
    """The function of a module's parameters: a class, as a closure cannot be pickled."""

    __name__ = "apply"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        _as_mapping(params, "params")
        if torch.compiler.is_dynamo_compiling():
            _check_names("params", params, dict(self.module.named_parameters()))
            return _traced_call(self.module, params, args, kwargs)
        shell = make_shell(self.module, params, _NO_TENSORS)
        _check_names("params", params, shell.params)
        own_buffers(shell)
        out = shell.module(*args, **kwargs)
        refuse_changes("apply(params)", shell)
        return out


class _ApplyWithBuffers(_Apply):
    """The function of a module's parameters and buffers."""

    def __call__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        _as_mapping(params, "params")
        _as_mapping(buffers, "buffers")
        if torch.compiler.is_dynamo_compiling():
            _check_names("params", params, dict(self.module.named_parameters()))
            _check_names("buffers", buffers, _named_buffers(self.module))
            given = {**params, **{name: owned_clone(buffer) for name, buffer in buffers.items()}}
            out = plain_functional_call(self.module, given, args, kwargs)
            return out, {name: given[name] for name in buffers}
        shell = make_shell(self.module, params, buffers)
        _check_names("params", params, shell.params)
        _check_names("buffers", buffers, shell.buffers)
        own_buffers(shell)
        out = shell.module(*args, **kwargs)
        refuse_writes("apply(params, buffers)", shell)
        return out, _new_buffers(shell)


def _traced_call(
    module: nn.Module, params: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module in a graph that is being compiled, where dynamo cannot trace how a shell is made."""
    before = _named_buffers(module)
    buffers = _clones(before)
    given = {**params, **buffers}
    out = plain_functional_call(module, given, args, kwargs)
    message = (
        "apply(params): the forward changed the buffer {}. Use functionalize_with_buffers or module.eval()."
    )
    for name, owner in module.named_modules():
        if not owner.training and type(owner).__module__.startswith("torch.nn.modules."):
            continue
        for key, _ in owner.named_buffers(name, recurse=False):
            if key not in buffers:
                continue
            if given[key] is not buffers[key]:
                raise ValueError(message.format(key))
            # Dynamo knows no versions, so the compiled graph compares values when it runs.
            same = (buffers[key] == before[key]) | (before[key] != before[key])
            torch._assert_async(same.all(), message.format(key))
    return out


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Name the buffers, without those that are parameters too."""
    params = set(module.parameters())
    return {name: buffer for name, buffer in module.named_buffers() if buffer not in params}


def _new_buffers(shell: Shell) -> dict[str, Tensor]:
    # Copies: a checkpoint in forward keeps the shell, and writes to its buffers again in backward.
    current = shell.current()
    new = {name: buffer.clone() for name, buffer in current.items() if buffer is not None}
    removed = [name for name in current if name not in new]
    if removed:
        raise ValueError(
            f"apply(params, buffers): the forward removed the buffers {', '.join(removed)}.\n"
            "Write an empty tensor to a buffer instead of None, so that the names stay."
        )
    return new


def _as_module(module: object, call: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{call}: expected an nn.Module, got {type(module).__name__}.\nA function needs no splitting."
        )


def _as_mapping(given: object, what: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"apply: {what} is a {type(given).__name__}, not a mapping from names to tensors.\n"
            f"Call apply with the {what} that functionalize returned, or a dict of their names."
        )
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"apply: {what}[{name!r}] is a {kind}.\nGive a tensor under each name.")


def _check_names(what: str, given: Mapping[str, Tensor], names: Mapping[str, Any]) -> None:
    if given.keys() != names.keys():
        missing = [name for name in names if name not in given]
        lines = [f"  {name!r}  missing" for name in missing]
        for name in given:
            if name not in names:
                # Dynamo cannot trace difflib, and shows no message anyway.
                near = [] if torch.compiler.is_dynamo_compiling() else missing or names
                close = difflib.get_close_matches(str(name), near, n=2)
                guess = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
                lines.append(f"  {name!r}  unknown{guess}")
        raise ValueError(
            f"apply: the names in {what} are not the module's:\n" + "\n".join(lines) + "\n"
            f"Give each of the module's {len(names)} {what} under its name, and nothing else."
        )
