"""The caller's world: the thread-local state of torch that a shard must see as its caller does.

A new thread inherits none of it. Captured once a call, entered in every worker, and left as the
worker had it: grad mode, inference mode, autocast (per device type, with dtype and cache),
saved-tensor hooks, TorchFunction and TorchDispatch modes (the default device is one), forward-mode
AD, and the levels of torch.func: a worker that has the caller's levels computes on the caller's
wrapped tensors, closed-over ones included, as the caller's own thread would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _autograd, _functorch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _pop_mode, _push_mode

from funcpar import _jvp


class World:
    """The thread-local state of the thread that makes it, to be entered by others."""

    __slots__ = (
        "autocast", "autocast_cache", "dispatch_modes", "forward_ad", "function_modes", "grad",
        "hooks", "hooks_disabled", "inference", "levels",
    )  # fmt: skip

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.forward_ad = torch._C._is_fwd_grad_enabled()
        self.autocast = _autocast_states() if torch._C._is_any_autocast_enabled() else []
        self.autocast_cache = torch.is_autocast_cache_enabled()
        # Only the top pair of hooks is used when a tensor is saved.
        self.hooks = _autograd._top_saved_tensors_default_hooks(False)
        self.hooks_disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
        self.function_modes = [
            torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
        ]
        self.dispatch_modes = [
            torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())
        ]
        self.levels = _torch_func_levels()

    def enter(self) -> list[Any]:
        """Enter this world in the current thread; returns what :meth:`leave` needs."""
        before: list[Any] = []
        for level in self.levels:
            _functorch.push_dynamic_layer_stack(level)
        if self.inference:
            mode = torch._C._InferenceMode(True)
            mode.__enter__()  # type: ignore[no-untyped-call]
            before.append(mode)
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_ad)
        if self.autocast:
            before.append(_autocast_states())
            _set_autocast(self.autocast)
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.hooks is not None:
            _autograd._push_saved_tensors_default_hooks(*self.hooks)
        if self.hooks_disabled is not None:
            _autograd._saved_tensors_hooks_disable(self.hooks_disabled)
        # Pushed, not entered with ``with``: a mode's own __enter__ may reset what it counts.
        for mode in self.function_modes:
            torch._C._push_on_torch_function_stack(mode)
        for mode in self.dispatch_modes:
            _push_mode(mode)
        return before

    def leave(self, before: list[Any]) -> None:
        """Undo :meth:`enter`: a worker between two jobs has torch's defaults."""
        for mode in reversed(self.dispatch_modes):
            _pop_mode(getattr(mode, "_mode_key", None))
        for _ in self.function_modes:
            torch._C._pop_torch_function_stack()
        if self.hooks_disabled is not None:
            _autograd._saved_tensors_hooks_enable()
        if self.hooks is not None:
            _autograd._pop_saved_tensors_default_hooks()
        if self.autocast:
            torch.autocast_decrement_nesting()
            # The cache is one for the process, and what this shard cast is never asked for again
            # (its leaves are made for each call): it would stay until the caller's autocast ends.
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(True)
            _set_autocast(before.pop())
        if self.inference:
            before.pop().__exit__(None, None, None)
        torch._C._set_fwd_grad_enabled(True)
        torch._C._set_grad_enabled(True)
        for _ in self.levels:
            _functorch.pop_dynamic_layer_stack()


def in_torch_func() -> bool:
    """Tell whether a torch.func transform is active here."""
    return _functorch.peek_interpreter_stack() is not None


def in_dual_level() -> bool:
    """Tell whether the user entered a level of ``torch.autograd.forward_ad``."""
    return int(forward_ad._current_level) >= (1 if _jvp.is_shared() else 0)


def is_transformed() -> bool:
    """Tell whether tensors here may carry more than values and a graph."""
    return in_torch_func() or in_dual_level()


def num_levels() -> int:
    """Return how many torch.func transforms are active here."""
    return 0 if _functorch.peek_interpreter_stack() is None else len(_functorch.get_interpreter_stack())


def differentiates_above(levels: int) -> bool:
    """Tell whether a transform that was entered after the first ``levels`` ones takes a derivative."""
    stack = _functorch.get_interpreter_stack() or []
    return any(layer.key() != _functorch.TransformType.Vmap for layer in stack[levels:])


def _torch_func_levels() -> list[Any]:
    levels: list[Any] = []
    while _functorch.peek_interpreter_stack() is not None:
        levels.append(_functorch.pop_dynamic_layer_stack())
    levels.reverse()
    for level in levels:
        _functorch.push_dynamic_layer_stack(level)
    return levels


def _autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in torch._C._autocast_supported_devices()
    ]


def _set_autocast(states: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
