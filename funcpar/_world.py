"""The caller's world: the thread-local state of torch that a shard must see as its caller does.

A new thread inherits none of it. Captured once a call, entered in every worker, and left as the
worker had it: grad mode, inference mode, autocast (per device type, with dtype; its cache stays off),
saved-tensor hooks, TorchFunction and TorchDispatch modes (the default device is one), forward-mode
AD, and the levels of torch.func: a worker that has the caller's levels computes on the caller's
wrapped tensors, closed-over ones included, as the caller's own thread would.
"""

from __future__ import annotations

import _thread
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _autograd, _functorch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _pop_mode, _push_mode

from funcpar import _jvp
from funcpar._devices import accelerator_kind

P = ParamSpec("P")
T = TypeVar("T")
_set_frame_evaluation: Any = torch._C._dynamo.eval_frame.set_eval_frame


class World:
    """The thread-local state of the thread that makes it, to be entered by others, and by itself."""

    __slots__ = (
        "autocast", "cache", "default_device", "dispatch_modes", "forward_ad", "function_modes", "grad",
        "hooks", "hooks_disabled", "inference", "levels", "thread",
    )  # fmt: skip

    def __init__(self) -> None:
        self.thread = _thread.get_ident()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.forward_ad = torch._C._is_fwd_grad_enabled()
        self.autocast = autocast_states()
        self.cache = torch.is_autocast_cache_enabled()
        self.hooks = _saved_tensor_hooks()
        self.hooks_disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
        self.function_modes = _function_modes()
        self.dispatch_modes = _dispatch_modes()
        self.default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        self.levels = _torch_func_levels()

    def is_made_here(self) -> bool:
        """Tell whether this thread made it."""
        return self.thread == _thread.get_ident()

    def enter(self) -> Any:
        """Enter this world in a worker; returns what :meth:`leave` needs."""
        if self.is_made_here():
            torch.set_autocast_cache_enabled(False)
            return None
        for level in self.levels:
            _functorch.push_dynamic_layer_stack(level)
        inference = None
        if self.inference:
            inference = torch._C._InferenceMode(True)
            inference.__enter__()  # type: ignore[no-untyped-call]
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_ad)
        _set_autocast(self.autocast)
        # Its cache is one for the process: a cast that one shard's graph made would serve another's.
        torch.set_autocast_cache_enabled(False)
        if self.hooks is not None:
            _autograd._push_saved_tensors_default_hooks(*self.hooks)
        if self.hooks_disabled is not None:
            _autograd._saved_tensors_hooks_disable(self.hooks_disabled)
        self._push_modes()
        return inference

    def leave(self, before: Any) -> None:
        """Give the worker torch's defaults back, or its maker its own state, whatever the job left behind.

        The maker may do so at any time.
        """
        if self.is_made_here():
            torch._C._set_grad_enabled(self.grad)
            torch._C._set_fwd_grad_enabled(self.forward_ad)
            torch.set_autocast_cache_enabled(self.cache)
            _set_autocast(self.autocast)
            if _function_modes() != self.function_modes or _dispatch_modes() != self.dispatch_modes:
                _pop_modes()
                self._push_modes()
                if self.default_device is not None:
                    torch._GLOBAL_DEVICE_CONTEXT.device_context = self.default_device
            _leave_hooks(self.hooks, self.hooks_disabled)
            return
        _pop_modes()
        _leave_hooks(None, None)
        torch.set_autocast_cache_enabled(True)
        _set_autocast(_DEFAULTS)
        if before is not None:
            before.__exit__(None, None, None)
        torch._C._set_fwd_grad_enabled(True)
        torch._C._set_grad_enabled(True)
        while _functorch.peek_interpreter_stack() is not None:
            _functorch.pop_dynamic_layer_stack()

    def _push_modes(self) -> None:
        # Pushed, not entered with ``with``: a mode's own __enter__ may reset what it counts.
        for mode in self.function_modes:
            torch._C._push_on_torch_function_stack(mode)
        for mode in self.dispatch_modes:
            _push_mode(mode)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def _pop_modes() -> None:
    for mode in reversed(_dispatch_modes()):
        _pop_mode(getattr(mode, "_mode_key", None))
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    if hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def _leave_hooks(hooks: Any, disabled: str | None) -> None:
    """Leave the hooks for saved tensors that were entered since these were in force."""
    if disabled is None and _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        _autograd._saved_tensors_hooks_enable()
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None and top != hooks:
        _autograd._pop_saved_tensors_default_hooks()


def untraced(fun: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that dynamo, if it is on in this thread, compiles nothing that it calls.

    What holds a lock must not come upon a compilation, which waits for other shards.
    """

    @functools.wraps(fun)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _set_frame_evaluation(None)
        try:
            return fun(*args, **kwargs)
        finally:
            _set_frame_evaluation(before)

    return wrapper


def in_torch_func() -> bool:
    """Tell whether a torch.func transform is active here."""
    return _functorch.peek_interpreter_stack() is not None


def in_dual_level() -> bool:
    """Tell whether the user entered a level of ``torch.autograd.forward_ad``."""
    return forward_ad._current_level >= 0 and _jvp.num_user_levels() > 0


def is_transformed() -> bool:
    """Tell whether tensors here may carry more than values and a graph."""
    return in_torch_func() or in_dual_level()


def is_transformed_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor carries more than its values and a graph."""
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return in_dual_level() and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


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


def _saved_tensor_hooks() -> Any:
    """Return the pair of hooks that is in force: only the top one is used when a tensor is saved.

    Those of a checkpoint around the call stay outside: they would run the whole call again in the
    worker that first needs a tensor. What a shard saves is then kept, not computed again.
    """
    return None if is_checkpointed() else _autograd._top_saved_tensors_default_hooks(False)


def is_checkpointed() -> bool:
    """Tell whether what this thread saves for backward is dropped, and computed again, by a checkpoint."""
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def is_below_autograd() -> bool:
    """Tell whether this thread is in an op that Python implements, where torch records no graph."""
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEYS.AutogradOther)
    return excluded and not torch.is_inference_mode_enabled()


def is_in_op() -> bool:
    """Tell whether this thread is in an op that Python implements: below autograd, or below transforms."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    return is_below_autograd() or is_excluded(_KEYS.FuncTorchDynamicLayerFrontMode)


_KEYS: Any = torch._C.DispatchKey
# The device types whose autocast a function on this machine can meet.
_KINDS = ("cpu", accelerator_kind() or "cuda")


def autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    """Return for each device type whether autocast is on in this thread, and with which dtype."""
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]


def is_autocast() -> bool:
    """Tell whether autocast is on in this thread, for any device type."""
    return torch._C._is_any_autocast_enabled()


def _set_autocast(states: list[tuple[str, bool, torch.dtype]]) -> None:
    if states != autocast_states():
        for kind, enabled, dtype in states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _fresh_autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    """Return what a new thread starts with."""
    found: list[list[tuple[str, bool, torch.dtype]]] = []
    thread = threading.Thread(target=lambda: found.append(autocast_states()), daemon=True)
    thread.start()
    thread.join(timeout=60)
    return found[0]


_DEFAULTS = _fresh_autocast_states()
