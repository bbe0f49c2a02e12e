"""Shells: shallow copies of a module tree that hold given tensors and share nothing a forward writes to."""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from funcpar._rebind import Kept, SlotNamespace, rebind
from funcpar._references import CONTAINERS, PLAIN, is_plain, slots_of

_BASE = frozenset(nn.Module().__dict__)
_HOOKS = tuple(key for key, value in nn.Module().__dict__.items() if type(value) is OrderedDict)
_LAZY = (UninitializedParameter, UninitializedBuffer)
_MODULE_SIZE = nn.Module.__basicsize__
# What torch's own layers keep in attributes never holds a module; to know it halves the time for a CNN.
_EXAMPLES: tuple[nn.Module, ...] = (
    *(conv(1, 1, 1, device="meta") for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)),
    *(norm(1, device="meta") for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)),
    *(nn.Linear(1, 1, device="meta"), nn.GroupNorm(1, 1, device="meta"), nn.Embedding(1, 1, device="meta")),
    *(layer() for layer in (nn.ReLU, nn.GELU, nn.SiLU, nn.Dropout, nn.Flatten, nn.Identity)),
    *(nn.MaxPool2d(1), nn.AvgPool2d(1), nn.AdaptiveAvgPool2d(1), nn.Sequential(), nn.ModuleList()),
)
_KNOWN = {type(example): frozenset(example.__dict__) for example in _EXAMPLES}
_REFUSED: dict[type, str] = {
    torch.jit.ScriptModule: "a ScriptModule cannot be copied; pass the plain nn.Module it was made from",
    nn.DataParallel: "a DataParallel wrapper has no function of its own; pass its .module",
    nn.parallel.DistributedDataParallel: "a DistributedDataParallel wrapper syncs in hooks; pass its .module",
}


class ShellBuffer(NamedTuple):
    """One buffer of a shell: where it lives, what it was cloned from, and the private clone."""

    owner: dict[str, Tensor | None]
    key: str
    source: Tensor
    clone: Tensor
    exact: bool

    def current(self) -> Tensor | None:
        """Return what is in the buffer's place now."""
        return self.owner.get(self.key)

    def is_kept(self) -> bool | Tensor:
        """Tell whether a forward left this buffer alone; on an accelerator the answer comes later."""
        # The version of a fresh clone is 0.
        if self.owner.get(self.key) is not self.clone or _version(self.clone):
            return False
        return not self.exact or _same_values(self.clone, self.source)


@dataclasses.dataclass(frozen=True, slots=True)
class Shell:
    """A private copy of a module tree; the module's own parameters and the shell's buffers, by name."""

    module: nn.Module
    params: dict[str, Tensor]
    buffers: dict[str, ShellBuffer]

    def adopt(self) -> None:
        """Take what is in the buffers' places as what they started as."""
        for name, buffer in self.buffers.items():
            current = buffer.current()
            if current is not None and current is not buffer.clone:
                self.buffers[name] = buffer._replace(source=current.clone(), clone=current)

    def changed(self) -> list[str]:
        """Name the buffers that a forward has changed."""
        # All comparisons are enqueued before the first is waited for.
        kept = {name: buffer.is_kept() for name, buffer in self.buffers.items()}
        return [name for name, same in kept.items() if not same]


def _innermost(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def _version(tensor: Tensor) -> int:
    # A wrapper of a torch.func level does not count the writes to what it wraps.
    return (tensor if maybe_current_level() is None else _innermost(tensor))._version


def _same_values(one: Tensor, other: Tensor) -> bool | Tensor:
    one, other = _innermost(one).detach(), _innermost(other).detach()
    if one.is_meta or one.layout is not torch.strided or one.shape != other.shape:
        return one.shape == other.shape
    if one.device.type == "cpu" and torch.equal(one, other):
        return True
    return ((one == other) | (one.isnan() & other.isnan())).all()


class _Builder:
    """Walk one module tree in the order of `named_modules`, and copy it."""

    def __init__(self, root: str, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.root, self.params, self.given_buffers = root, params, buffers
        self.members: dict[int, Any] = {}
        self.names: dict[str, Tensor] = {}
        self.buffers: dict[str, ShellBuffer] = {}
        self.pending: list[tuple[dict[str, Any] | SlotNamespace, str, Any, str]] = []

    def path(self, prefix: str, key: str = "") -> str:
        """Write a module's attribute as the code that reaches it: `model.blocks[0].helper`."""
        steps = [f"[{step}]" if step.isdigit() else f".{step}" for step in (prefix + key).split(".") if step]
        return self.root + "".join(steps)

    def copy(self, module: nn.Module, prefix: str) -> nn.Module:
        """Return the shell of a module and of everything below it."""
        if id(module) in self.members:
            return self.members[id(module)]  # type: ignore[no-any-return]
        cls, entries = type(module), module.__dict__
        shell: nn.Module = object.__new__(cls)
        # Always through __dict__: a module's own __setattr__ may refuse, register, or write elsewhere.
        own = entries.copy()
        object.__setattr__(shell, "__dict__", own)
        self.members[id(module)] = shell
        own["_parameters"] = new = entries["_parameters"].copy()
        if new:
            self._parameters(new, prefix)
        own["_buffers"] = new = entries["_buffers"].copy()
        if new:
            # Batch norm's kernel and writes to `.data` change values and leave the version alone.
            self._buffers(new, prefix, module.training)
        known = _KNOWN.get(cls)
        if known is None or not entries.keys() <= known:
            self._attributes(module, shell, own, prefix)
        if (
            entries["_forward_hooks"] or entries["_forward_pre_hooks"] or entries["_backward_hooks"]
            or entries["_backward_pre_hooks"] or entries["_state_dict_hooks"]
            or entries["_state_dict_pre_hooks"] or entries["_load_state_dict_pre_hooks"]
            or entries["_load_state_dict_post_hooks"]
        ):  # fmt: skip
            self.pending += [(own, key, entries[key], prefix) for key in _HOOKS if entries.get(key)]
        # A hook that a forward registers stays on the shell. In this form as each step counts, per module.
        own["_forward_hooks"] = OrderedDict()
        own["_forward_hooks_with_kwargs"] = OrderedDict()
        own["_forward_hooks_always_called"] = OrderedDict()
        own["_forward_pre_hooks"] = OrderedDict()
        own["_forward_pre_hooks_with_kwargs"] = OrderedDict()
        own["_backward_hooks"] = OrderedDict()
        own["_backward_pre_hooks"] = OrderedDict()
        own["_non_persistent_buffers_set"] = entries["_non_persistent_buffers_set"].copy()
        own["_modules"] = modules = entries["_modules"].copy()
        for key, child in modules.items():
            if child is not None:
                modules[key] = self.copy(child, f"{prefix}{key}.")
        return shell

    def _parameters(self, entries: dict[str, Tensor | None], prefix: str) -> None:
        members = self.members
        for key, param in entries.items():
            if param is None:
                continue
            place = id(param)
            if place not in members:
                if type(param) in _LAZY:
                    raise self._lazy_error(prefix, key)
                name = prefix + key
                self.names[name] = param
                members[place] = self.params.get(name, param)
            entries[key] = members[place]

    def _buffers(self, entries: dict[str, Tensor | None], prefix: str, exact: bool) -> None:
        members = self.members
        for key, buffer in entries.items():
            if buffer is None:
                continue
            place = id(buffer)
            if place not in members:
                if type(buffer) in _LAZY:
                    raise self._lazy_error(prefix, key)
                name = prefix + key
                source = self.given_buffers.get(name, buffer)
                members[place] = clone = source.clone()
                self.buffers[name] = ShellBuffer(entries, key, source, clone, exact)
            entries[key] = members[place]

    def _lazy_error(self, prefix: str, key: str) -> TypeError:
        return TypeError(
            f"functionalize: {self.path(prefix, key)} has no shape yet, as its lazy module has seen no input.\n"
            "Call the module once on an example before you functionalize it."
        )

    def _attributes(self, module: nn.Module, shell: nn.Module, own: dict[str, Any], prefix: str) -> None:
        cls = type(module)
        for kind, reason in _REFUSED.items():
            if kind in cls.__mro__:
                raise TypeError(f"functionalize: {self.path(prefix)}: {reason}.")
        if cls.__basicsize__ != _MODULE_SIZE:
            slots = SlotNamespace(shell)
            self.pending += [(slots, key, getattr(module, key), prefix) for key in slots_of(module)]
        for key in own.keys() - _BASE:
            value = own[key]
            kind = type(value)
            if kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value))):
                continue
            if key == "_compiled_call_impl":
                # What Module.compile() made is bound to the original; the shell runs eagerly.
                del own[key]
            elif kind in CONTAINERS and is_plain(value):
                self.members[id(value)] = own[key] = value.copy()
            else:
                self.pending.append((own, key, value, prefix))


def make_shell(
    module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root: str = "model"
) -> Shell:
    """Copy a module tree, with `params` and clones of `buffers` in place of its own where they are given."""
    builder = _Builder(root, params, buffers)
    if torch.is_inference_mode_enabled():
        # Inference tensors count no versions, so the clones are ordinary ones.
        with torch.inference_mode(False), torch.no_grad():
            shell = builder.copy(module, "")
    else:
        shell = builder.copy(module, "")
    if builder.pending:
        kept = [
            Kept(own, key, value, builder.path(prefix, key), key in _HOOKS)
            for own, key, value, prefix in builder.pending
        ]
        rebind(kept, builder.members)
    if parametrize._cache_enabled and any(
        isinstance(m, parametrize.ParametrizationList) for m in shell.modules()
    ):
        raise ValueError(
            f"functionalize: {root} is parametrized, and parametrize.cached() would give every call, in any "
            "thread, the weights of the first.\nCall it outside of `with parametrize.cached():`."
        )
    return Shell(shell, builder.names, builder.buffers)
