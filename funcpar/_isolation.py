"""Keep shards off each other's modules: functional calls on shells, no shared running statistics."""

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, stateless
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

from funcpar._shell import Shell, make_shell


class _Isolation(threading.local):
    on = False


isolation = _Isolation()


def isolate(on: bool) -> bool:
    """Set whether this thread runs a shard beside others; return what was set before.

    While it is on, `torch.func.functional_call` in any spelling runs on a private shell, and a module that
    would write its running statistics, called directly, is refused.

    Args:
        on: the new setting, of this thread alone.

    Returns:
        The previous setting, to be put back.

    Example:
        >>> before = isolate(True)
        >>> isolate(before)
        True
    """
    before = isolation.on
    isolation.on = on
    return before


def refuse_changes(call: str, shell: Shell) -> None:
    """Raise if a forward has changed a buffer of its shell, or a tensor that all calls share."""
    refuse_writes(call, shell)
    if changed := shell.changed():
        raise ValueError(
            f"{call}: the forward would change the buffers {_listed(changed)}, which are constants here.\n"
            "Use functionalize_with_buffers, which takes and returns buffers, or call module.eval() before."
        )


def refuse_writes(call: str, shell: Shell) -> None:
    """Raise if a forward has written to a tensor in an attribute, which all calls share."""
    if written := shell.written():
        raise ValueError(
            f"{call}: the forward wrote to {_listed(written)}, an attribute that every call shares.\n"
            "Register the tensor as a buffer and use functionalize_with_buffers, or make it in forward."
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def own_buffers(shell: Shell) -> None:
    """Mark a shell's buffers as private, so that norms in this shard may write running statistics to them."""
    if isolation.on:
        for clone in shell.clones():
            clone._funcpar_owned = True  # type: ignore[attr-defined]


def owned_clone(tensor: Tensor) -> Tensor:
    """Return a clone that norms in this shard may write to; in a graph, one function that dynamo calls."""
    clone = tensor.clone()
    # Called, not traced, the mark is on whatever stands for the tensor while the graph is made, and later.
    if not torch.compiler.is_dynamo_compiling():
        clone._funcpar_owned = True  # type: ignore[attr-defined]
    return clone


def _shell_for(module: nn.Module, given: dict[str, Tensor], tie: bool, strict: bool) -> Shell:
    """Make a shell by torch's rules for aliases, unknown names and attributes that are no parameters."""
    if tie and not strict:
        shell = make_shell(module, given, given)
        if given.keys() <= shell.params.keys() | shell.buffers.keys():
            return shell
    untied = stateless._untie_named_tensors_map(module, given) if tie else given
    if strict:
        _check_strictly(module, untied)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    known = buffers | {name for name, _ in module.named_parameters(remove_duplicate=False)}
    shell = make_shell(module, untied, untied) if tie else make_shell(module, {}, {})
    placed = known if tie else set()
    rest = {name: tensor for name, tensor in untied.items() if name not in placed}
    rest.update({name: tensor.clone() for name, tensor in rest.items() if name in buffers})
    NamedMemberAccessor(shell.module).swap_tensors_dict(rest, allow_missing=True)
    shell.adopt()
    return shell


def _check_strictly(module: nn.Module, given: dict[str, Tensor]) -> None:
    missing, unexpected = NamedMemberAccessor(module).check_keys(given)
    problems = [f"Unexpected key(s): {', '.join(map(repr, unexpected))}."] if unexpected else []
    problems += [f"Missing key(s): {', '.join(map(repr, missing))}."] if missing else []
    if problems:
        message = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in reparametrizing for {type(module).__name__}:\n\t{message}")


_TORCH_REFUSES = (torch.jit.ScriptModule, torch.jit.ScriptFunction, nn.DataParallel)
plain_functional_call = stateless._functional_call


@functools.wraps(plain_functional_call)
def _functional_call(
    module: nn.Module,
    parameters_and_buffers: dict[str, Tensor],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    # Compilation is asked first, and constant there, so that dynamo never looks at the thread's setting.
    # Not is_compiling(), which is true in every thread while one compiles.
    if torch.compiler.is_dynamo_compiling() or not isolation.on or isinstance(module, _TORCH_REFUSES):
        return plain_functional_call(
            module, parameters_and_buffers, args, kwargs, tie_weights=tie_weights, strict=strict
        )
    shell = _shell_for(module, parameters_and_buffers, tie_weights, strict)
    own_buffers(shell)
    positional = args if isinstance(args, tuple) else () if args is None else (args,)
    out = shell.module(*positional, **(kwargs or {}))
    refuse_changes("torch.func.functional_call in a shard", shell)
    return out


def _refuse_shared_statistics(written: Tensor | None, norm: str = "batch_norm or instance_norm") -> None:
    if written is not None and not hasattr(written, "_funcpar_owned"):
        raise ValueError(
            f"{norm} in a shard would write running statistics that shards share.\n"
            "Call the module through functionalize_with_buffers, or module.eval() before."
        )


def _in_place_of(original: Any, wrapper: Any) -> Any:
    """Dress a wrapper as what it wraps, also for torch.jit.script, which looks names up in its globals."""
    dressed = types.FunctionType(
        wrapper.__code__, original.__globals__, original.__name__, original.__defaults__, wrapper.__closure__
    )
    return functools.update_wrapper(dressed, original)


def _guarded_norm(original: Callable[..., Any], training_name: str, default: bool) -> Any:
    """Wrap a norm of torch.nn.functional, to refuse before it writes running statistics that shards share."""
    traced, here, refuse = torch.compiler.is_dynamo_compiling, isolation, _refuse_shared_statistics

    def norm(*args: Any, **kwargs: Any) -> Any:
        if not traced() and here.on:
            training = args[5] if len(args) > 5 else kwargs.get(training_name, default)
            if training:
                refuse(args[1] if len(args) > 1 else kwargs.get("running_mean"))
        return original(*args, **kwargs)

    return _in_place_of(original, norm)


def _guarded_method(original: Callable[..., Any], written: Callable[..., Tensor | None], norm: str) -> Any:
    """Wrap a method that writes to a module, to refuse before it does if shards share what is written."""
    traced, here, refuse = torch.compiler.is_dynamo_compiling, isolation, _refuse_shared_statistics

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not traced() and here.on:
            refuse(written(self, *args), norm)
        return original(self, *args, **kwargs)

    return _in_place_of(original, method)


def _install() -> None:
    stateless._functional_call = _functional_call
    F = nn.functional
    F.batch_norm = _guarded_norm(F.batch_norm, "training", False)
    F.instance_norm = _guarded_norm(F.instance_norm, "use_input_stats", True)
    # Torch's batch norms count a batch before they call the function.
    mean = lambda self, *_: self.running_mean if self.training and self.track_running_stats else None
    for norm in (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm):
        norm.forward = _guarded_method(norm.forward, mean, "batch_norm")  # type: ignore[method-assign]
    # The module is hidden by a function of its name.
    new, old = parametrizations._SpectralNorm, sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm
    vector = lambda self, *_: getattr(self, "_u", None) if self.training else None
    new.forward = _guarded_method(new.forward, vector, "spectral_norm")  # type: ignore[method-assign]
    vector = lambda self, module, *_: getattr(module, f"{self.name}_u") if module.training else None
    old.__call__ = _guarded_method(old.__call__, vector, "spectral_norm")


_install()
