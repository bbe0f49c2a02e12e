"""What a forward leaves behind on its module: found on the replica, put on the original."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compat._nodes import hidden_gradient, leaves_of

_BASE = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set)


@dataclass(frozen=True, slots=True)
class Writes:
    """What one forward wrote, by the name of the submodule and of the attribute."""

    attributes: dict[tuple[str, str], Any]
    buffers: dict[tuple[str, str], Tensor]
    lost: dict[tuple[str, str], None]

    def names(self, lost_alone: bool) -> list[str]:
        """Return the attributes written, as code below the module; all, or those that cannot be kept."""
        kept = () if lost_alone else (*self.attributes, *self.buffers)
        return [f"{owner}.{key}".lstrip(".") for owner, key in (*kept, *self.lost)]

    def put_on(self, module: nn.Module) -> None:
        """Write the same to the original."""
        for (owner, key), value in self.attributes.items():
            target = module.get_submodule(owner).__dict__
            old = target.get(key)
            if type(old) is type(value) and isinstance(old, _CONTAINERS) and old is not value:
                _refill(old, value)
            else:
                target[key] = value
        for (owner, key), buffer in self.buffers.items():
            module.get_submodule(owner).register_buffer(key, buffer)


class Watch:
    """The attributes of a replica before its forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [
            (name, m, _attributes(m), list(m._buffers), dict(m._parameters), dict(m._modules))
            for name, m in module.named_modules()
        ]

    def writes(self) -> Writes:
        """Return what has been written since.

        Raises:
            ValueError: A parameter or a submodule was made or replaced, which would be another one in
                every replica.
        """
        found = Writes({}, {}, {})
        for name, m, attributes, buffers, parameters, children in self._before:
            self._refuse_new(name, m, parameters, children)
            if m._modules != children:  # Another name for a submodule; what it was is on the original.
                found.lost.update(
                    {(name, k): None for k, c in m._modules.items() if children.get(k) is not c}
                )
            if len(m._buffers) > len(buffers):
                fresh = [(key, b) for key, b in m._buffers.items() if key not in buffers and b is not None]
                found.buffers.update({(name, key): b.detach() for key, b in fresh})
            if attributes is None:
                continue
            for key, value in m.__dict__.items():
                if key in _BASE or _is_computed(m, key):
                    continue
                if key not in attributes or _differs(attributes[key], value):
                    # Outside of its own container types a tensor's graph cannot be followed.
                    if any(hidden_gradient(leaf) for _, leaf in leaves_of(value)):
                        found.lost[name, key] = None
                    else:
                        found.attributes[name, key] = value
        return found

    def _refuse_new(
        self, name: str, m: nn.Module, parameters: dict[str, Any], children: dict[str, nn.Module | None]
    ) -> None:
        known = {id(module) for _, module, *_ in self._before} if m._modules != children else set()
        made = [key for key, p in m._parameters.items() if p is not None and parameters.get(key) is not p]
        made += [
            key for key, child in m._modules.items()
            if child is not None and children.get(key) is not child and id(child) not in known
        ]  # fmt: skip
        if made:
            raise ValueError(
                f"forward makes or replaces {', '.join(f'{name}.{key}'.lstrip('.') for key in made)}, which "
                f"would be another one in every replica and lost afterwards.\n"
                f"Make parameters and submodules in __init__, or call the module once before it is wrapped."
            )


def _attributes(m: nn.Module) -> dict[str, Any] | None:
    # torch's own layers write none but for what their norms compute.
    if type(m).__module__.startswith("torch.nn."):
        return None
    return {
        key: (value, _contents(value)) for key, value in m.__dict__.items() if key not in _BASE
    }  # fmt: skip


def _contents(value: Any) -> list[Any] | None:
    if not isinstance(value, _CONTAINERS):
        return None
    return [item for pair in value.items() for item in pair] if isinstance(value, dict) else list(value)


def _differs(before: tuple[Any, list[Any] | None], value: Any) -> bool:
    old, contents = before
    if old is not value:
        return True
    if contents is None:
        return False
    now = _contents(value) or []
    return len(now) != len(contents) or any(a is not b for a, b in zip(now, contents, strict=True))


def _is_computed(m: nn.Module, key: str) -> bool:
    """Tell whether an attribute is the weight that an old-style weight or spectral norm computes."""
    return f"{key}_orig" in m._parameters or f"{key}_g" in m._parameters


def _refill(old: Any, value: Any) -> None:
    if isinstance(old, list):
        old[:] = value
    else:
        old.clear()
        old.update(value)
