"""Shells: shallow copies of a module tree that hold given tensors and share nothing a forward writes to."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from funcpar import _streams
from funcpar._graph import innermost
from funcpar._rebind import Kept, SlotNamespace, rebind, refuse_globals
from funcpar._references import CONTAINERS, PLAIN, is_plain, slots_of

_BASE = frozenset(nn.Module().__dict__)
_HOOKS = tuple(key for key, value in nn.Module().__dict__.items() if type(value) is OrderedDict)
_LAZY = (UninitializedParameter, UninitializedBuffer)
_MODULE_SIZE = nn.Module.__basicsize__
# What torch's own layers keep in attributes never holds a module; to know it halves the time for a CNN.
_EXAMPLES: tuple[nn.Module, ...] = (
    *(conv(1, 1, 1, device="meta") for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)),
    *(norm(1, device="meta") for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)),
    *(
        nn.Linear(1, 1, device="meta"),
        nn.GroupNorm(1, 1, device="meta"),
        nn.Embedding(1, 1, _weight=torch.empty(1, 1, device="meta")),
    ),
    *(layer() for layer in (nn.ReLU, nn.GELU, nn.SiLU, nn.Dropout, nn.Flatten, nn.Identity)),
    *(nn.MaxPool2d(1), nn.AvgPool2d(1), nn.AdaptiveAvgPool2d(1), nn.Sequential(), nn.ModuleList()),
)
# What is added comes last, so that the number of attributes and the last one tell whether there are others.
_KNOWN = {type(one): (len(one.__dict__), next(reversed(one.__dict__))) for one in _EXAMPLES}
_REFUSED: dict[type, str] = {
    torch.jit.ScriptModule: "a ScriptModule cannot be copied; pass the plain nn.Module it was made from",
    nn.DataParallel: "a DataParallel wrapper has no function of its own; pass its .module",
    nn.parallel.DistributedDataParallel: "a DistributedDataParallel wrapper syncs in hooks; pass its .module",
}


# One buffer of a shell: where it lives and under which key, what it was cloned from, the private clone, and
# whether its values count, not its version alone. A plain tuple, as there are hundreds in each call.
ShellBuffer = tuple[dict[str, Tensor | None], str, Tensor, Tensor, bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Shell:
    """A private copy of a module tree; the module's own parameters and the shell's buffers, by name.

    `shared` has the tensors in attributes, which are no copies, by path, and their versions before the call.
    """

    module: nn.Module
    params: dict[str, Tensor]
    buffers: dict[str, ShellBuffer]
    shared: dict[str, tuple[Tensor, int]]

    def clones(self) -> Iterator[Tensor]:
        """Iterate over the buffers that the shell was made with."""
        return (clone for _, _, _, clone, _ in self.buffers.values())

    def current(self) -> dict[str, Tensor | None]:
        """Return what is in the buffers' places now."""
        return {name: place.get(key) for name, (place, key, _, _, _) in self.buffers.items()}

    def adopt(self) -> None:
        """Take what is in the buffers' places as what they started as."""
        for name, (place, key, _, clone, exact) in self.buffers.items():
            current = place[key]
            if current is not None and current is not clone:
                self.buffers[name] = (place, key, current.clone(), current, exact)

    def written(self) -> list[str]:
        """Name the tensors in attributes that a forward has written to."""
        return [path for path, (tensor, version) in self.shared.items() if _version(tensor) != version]

    def changed(self) -> list[str]:
        """Name the buffers that a forward has changed."""
        # All comparisons are enqueued before the first is waited for.
        kept = {name: _is_kept(*buffer) for name, buffer in self.buffers.items()}
        return [name for name, same in kept.items() if not same]


def _is_kept(
    place: dict[str, Tensor | None], key: str, source: Tensor, clone: Tensor, exact: bool
) -> bool | Tensor:
    """Tell whether a forward left a buffer alone; on an accelerator the answer comes later."""
    # The version of a fresh clone is 0.
    if place.get(key) is not clone or _version(clone):
        return False
    return not exact or _same_values(clone, source)


def _version(tensor: Tensor) -> int:
    # A wrapper of a torch.func level does not count the writes to what it wraps.
    if maybe_current_level() is not None:
        tensor = innermost(tensor)
    return 0 if tensor.is_inference() else tensor._version


def _same_values(one: Tensor, other: Tensor) -> bool | Tensor:
    one, other = innermost(one).detach(), innermost(other).detach().to(one.device)
    if one.is_meta or one.layout is not torch.strided or one.shape != other.shape:
        return one.shape == other.shape
    if one.device.type == "cpu" and torch.equal(one, other):
        return True
    return ((one == other) | (one.isnan() & other.isnan())).all()


class _Builder:
    """Walk one module tree in the order of `named_modules`, and copy it."""

    def __init__(
        self, tree: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root: str
    ) -> None:
        self.tree, self.params, self.given_buffers, self.root = tree, params, buffers, root
        self.kinds: set[type[nn.Module]] = set()  # But for torch's own layers.
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
        members = self.members
        if id(module) in members:
            return members[id(module)]  # type: ignore[no-any-return]
        cls, entries = type(module), module.__dict__
        known = _KNOWN.get(cls)
        if known is None:
            self.kinds.add(cls)
            self._refuse(cls, prefix)
        members[id(module)] = shell = object.__new__(cls)
        # Always through __dict__: a module's own __setattr__ may refuse, register, or write elsewhere.
        own = entries.copy()
        object.__setattr__(shell, "__dict__", own)
        own["_parameters"] = self._parameters(params, prefix) if (params := entries["_parameters"]) else {}
        # Batch norm's kernel and writes to `.data` change values and leave the version alone.
        exact = module.training  # A compiled module has it in the one that it wraps.
        own["_buffers"] = self._buffers(buffers, prefix, exact) if (buffers := entries["_buffers"]) else {}
        own["_non_persistent_buffers_set"] = set(entries["_non_persistent_buffers_set"])
        self._hooks(own, prefix)
        if known is None or len(entries) != known[0] or next(reversed(entries)) != known[1]:
            self._attributes(module, shell, prefix)
        if modules := entries["_modules"]:
            own["_modules"] = modules = modules.copy()
            for key, child in modules.items():
                if child is not None:
                    modules[key] = self.copy(child, f"{prefix}{key}.")
        else:
            own["_modules"] = {}
        return shell

    def _hooks(self, own: dict[str, Any], prefix: str) -> None:
        # Both written out: a loop over the names takes three times as long, for each layer.
        if (
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
            or own["_backward_pre_hooks"] or own["_state_dict_hooks"] or own["_state_dict_pre_hooks"]
            or own["_load_state_dict_pre_hooks"] or own["_load_state_dict_post_hooks"]
        ):  # fmt: skip
            self.pending += [(own, key, own[key], prefix) for key in _HOOKS if own.get(key)]
        # A hook that a forward registers stays on the shell.
        own["_forward_hooks"] = OrderedDict()
        own["_forward_hooks_with_kwargs"] = OrderedDict()
        own["_forward_hooks_always_called"] = OrderedDict()
        own["_forward_pre_hooks"] = OrderedDict()
        own["_forward_pre_hooks_with_kwargs"] = OrderedDict()
        own["_backward_hooks"] = OrderedDict()
        own["_backward_pre_hooks"] = OrderedDict()

    def _parameters(self, entries: dict[str, Tensor | None], prefix: str) -> dict[str, Tensor | None]:
        new, members, given, names = entries.copy(), self.members, self.params, self.names
        for key, param in entries.items():
            place = id(param)
            if param is None:
                continue
            if place not in members:
                if type(param) is not nn.Parameter and type(param) in _LAZY:
                    raise self._lazy_error(prefix, key)
                name = prefix + key
                names[name] = param
                members[place] = given.get(name, param)
            new[key] = members[place]
        return new

    def _buffers(
        self, entries: dict[str, Tensor | None], prefix: str, exact: bool
    ) -> dict[str, Tensor | None]:
        new, members, given = entries.copy(), self.members, self.given_buffers
        for key, buffer in entries.items():
            if buffer is None:
                continue
            place = id(buffer)
            if place not in members:
                if type(buffer) is not Tensor and self._is_parameter(buffer, prefix, key):
                    new[key] = members[place]
                    continue
                name = prefix + key
                source = given.get(name, buffer)
                members[place] = clone = _streams.local_clone(source)
                self.buffers[name] = (new, key, source, clone, exact)
            new[key] = members[place]
        return new

    def _is_parameter(self, buffer: Tensor, prefix: str, key: str) -> bool:
        """Tell whether a buffer is the same tensor as a parameter of the tree, and if so make it a member."""
        if type(buffer) in _LAZY:
            raise self._lazy_error(prefix, key)
        name = next((name for name, p in self.tree.named_parameters() if p is buffer), None)
        if name is not None:
            self._parameters({name: buffer}, "")
        return name is not None

    def _lazy_error(self, prefix: str, key: str) -> TypeError:
        path = self.path(prefix, key)
        return TypeError(
            f"functionalize: {path} has no shape yet, as its lazy module has seen no input.\n"
            "Call the module once on an example before you functionalize it."
        )

    def _refuse(self, cls: type, prefix: str) -> None:
        for kind, reason in _REFUSED.items():
            if kind in cls.__mro__:
                raise TypeError(f"functionalize: {self.path(prefix)}: {reason}.")

    def _attributes(self, module: nn.Module, shell: nn.Module, prefix: str) -> None:
        if type(module).__basicsize__ != _MODULE_SIZE:
            slots = SlotNamespace(shell)
            self.pending += [(slots, key, getattr(module, key), prefix) for key in slots_of(module)]
        own = shell.__dict__
        for key in own.keys() - _BASE:
            value = own[key]
            kind = type(value)
            if kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value))):
                continue
            if key == "_compiled_call_impl":
                # What Module.compile() made is bound to the original; the shell runs eagerly.
                del own[key]
            elif isinstance(getattr(type(module), key, None), functools.cached_property):
                # It is computed again, from what the shell holds: the kept value may be of old parameters.
                del own[key]
            elif kind in CONTAINERS and is_plain(value):
                self.members[id(value)] = own[key] = value.copy()
            else:
                self.pending.append((own, key, value, prefix))


def make_shell(
    module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], root: str = "model"
) -> Shell:
    """Copy a module tree, with `params` and clones of `buffers` in place of its own where they are given."""
    builder = _Builder(module, params, buffers, root)
    if torch.is_inference_mode_enabled():
        # Inference tensors count no versions, so the clones are ordinary ones.
        with torch.inference_mode(False), torch.no_grad():
            shell = builder.copy(module, "")
    else:
        shell = builder.copy(module, "")
    shared: dict[str, Tensor] = {}
    if builder.pending:
        kept = [
            Kept(own, key, value, builder.path(prefix, key), key in _HOOKS)
            for own, key, value, prefix in builder.pending
        ]
        shared = rebind(kept, builder.members)
    refuse_globals(builder.kinds, builder.members)
    if parametrize._cache_enabled and any(
        isinstance(m, parametrize.ParametrizationList) for m in shell.modules()
    ):
        raise ValueError(
            f"functionalize: {root} is parametrized, and parametrize.cached() would give every call, in any "
            "thread, the weights of the first.\nCall it outside of `with parametrize.cached():`."
        )
    versions = {path: (tensor, _version(tensor)) for path, tensor in shared.items()}
    return Shell(shell, builder.names, builder.buffers, versions)
