"""Objects that a module holds, and that its forward writes to."""

import argparse
import dataclasses
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_zoo import mlp
from torch import Tensor, nn

import funcpar as fp
from funcpar._functional import functionalize, functionalize_with_buffers


class Itself:
    note: Any = None

    def itself(self) -> "Itself":
        return self


def note(where: Any, value: int) -> None:
    where.note = value


@dataclasses.dataclass(slots=True)
class Slots:
    note: Any = None


class Named(dict):
    note: Any = None


class Ordered(OrderedDict):
    note: Any = None


class Locked:
    def __init__(self) -> None:
        self.lock, self.note = threading.Lock(), None


class Closing:
    note: Any = None
    closed = 0

    def __del__(self) -> None:
        Closing.closed += self.note is None


class Same:
    note: Any = None

    def __new__(cls) -> "Same":
        cls.one = cls.__dict__.get("one") or super().__new__(cls)
        return cls.one


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.note = None


class Notes(nn.Module):
    """Writes a note to what it holds, and reads it where else it is held."""

    def __init__(self, held: Any, holder: Callable[[Any], Any] = lambda held: held) -> None:
        super().__init__()
        self.held, self.holder = held, holder(held)

    def forward(self, x: Tensor, reach: Callable[[Any], Any] = lambda holder: holder) -> Any:
        note(self.held, 1)
        return reach(self.holder).note


@pytest.mark.parametrize(
    "make", [Itself, Slots, Named, Ordered, Hidden, types.SimpleNamespace, argparse.Namespace]
)
def test_plain_objects_are_of_one_call(make: Callable[..., Any]) -> None:
    held = make()
    # Past nn.Module.__setattr__, which would make a submodule of Hidden.
    module = Notes(None, lambda _: [held])
    module.__dict__["held"] = held
    apply, params = functionalize(module)
    kept = getattr(held, "note", "none")
    assert apply(params, torch.ones(1), lambda holder: holder[0]) == 1
    assert getattr(held, "note", "none") == kept


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda held: (held, 1), lambda holder: holder[0]),
    "object in object": (lambda held: types.SimpleNamespace(inner={"x": held}), lambda h: h.inner["x"]),
    "method": (lambda held: held.itself, lambda holder: holder()),
    "closure": (lambda held: lambda: held, lambda holder: holder()),
    "partial": (lambda held: functools.partial(getattr, held), lambda holder: holder("itself")()),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_copied_object_is_one_object_wherever_it_is_held(kind: str) -> None:
    holder, reach = HOLDERS[kind]
    module = Notes(Itself(), holder)
    apply, params = functionalize(module)
    assert apply(params, torch.ones(1), reach) == 1
    assert module.held.note is None


def test_what_is_added_to_a_layer_of_torch_is_copied_too() -> None:
    layer = nn.Linear(3, 3)
    del layer.in_features
    layer.held = Itself()
    layer.register_forward_hook(lambda layer, args, out: note(layer.held, 1))
    apply, params = functionalize(layer)
    apply(params, torch.ones(3))
    assert layer.held.note is None


@pytest.mark.parametrize("make", [Locked, Closing, Same])
def test_objects_that_are_made_to_be_shared_stay_shared(make: Callable[[], Any]) -> None:
    module = Notes(make())
    apply, params = functionalize(module)
    assert apply(params, torch.ones(1)) == 1
    assert module.held.note == 1 and not Closing.closed


def test_what_cannot_be_copied_keeps_the_object_that_it_holds() -> None:
    module = Notes(Itself(), lambda held: threading.Thread(target=held.itself))
    apply, params = functionalize(module)
    assert apply(params, torch.ones(1), lambda thread: thread._target()) is None


def test_objects_that_hooks_hold_are_written_to() -> None:
    class Saver:
        out = None

        def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.out = out

    module, saver = mlp(), Saver()
    module[0].register_forward_hook(saver)
    apply, params = functionalize(module)
    apply(params, torch.ones(2, 3))
    assert saver.out.shape == (2, 5)


def test_a_generator_over_submodules_is_refused() -> None:
    module = mlp()
    module.__dict__["layers"] = (layer for layer in list(module))
    with pytest.raises(TypeError, match=r"model\.layers is a builtins\.generator that points back"):
        functionalize(module)


@pytest.mark.parametrize("inside", [lambda t: t, lambda t: {"x": [t]}, lambda t: types.SimpleNamespace(t=t)])
def test_a_write_to_a_tensor_that_calls_share_is_refused(inside: Callable[[Tensor], Any]) -> None:
    cache = torch.zeros(3)
    module = Notes(Itself(), lambda _: inside(cache))
    apply, params = functionalize(module)

    def reach(holder: Any) -> Any:
        cache[0] = 1
        return module.held

    with pytest.raises(ValueError, match=r"apply\(params\): .* wrote to model\.holder.*\n.*as a buffer"):
        apply(params, torch.ones(1), reach)
    apply2, params, buffers = functionalize_with_buffers(module)
    with pytest.raises(ValueError, match=r"apply\(params, buffers\): the forward wrote to model\.holder"):
        apply2(params, buffers, torch.ones(1), reach)
    assert apply(params, torch.ones(1), lambda holder: module.held) is None


class ReadsGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return GLOBAL.linear(x)


GLOBAL = ReadsGlobal()


def test_a_forward_that_reads_its_module_through_a_global_is_refused():
    with pytest.raises(TypeError, match=r"ReadsGlobal\.forward reads the module .* variable 'GLOBAL'"):
        functionalize(GLOBAL)


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @functools.cached_property
    def transposed(self):
        return self.linear.weight.t()

    def forward(self, x):
        return x @ self.transposed


def test_a_cached_property_is_computed_from_the_given_parameters():
    module = Caches()
    module(torch.ones(2, 3))  # Fills the cache with the module's own.
    apply, params = functionalize(module)
    grads = fp.grad(lambda p: apply(p, torch.ones(2, 3)).sum())(params)
    assert torch.equal(grads["linear.weight"], torch.full((3, 3), 2.0))
    assert "transposed" in module.__dict__
