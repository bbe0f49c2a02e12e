"""What a module keeps in its attributes and hooks points at the shell."""

import argparse
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_zoo import cnn, mlp, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from funcpar._functional import functionalize, functionalize_with_buffers
from funcpar._isolation import isolate
from funcpar._shell import make_shell
from tests.cycles import no_cycle_collection


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Keeper(nn.Module):
    """Calls what was kept on it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def double(self, x: Tensor) -> Tensor:
        return 2 * self.lin(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Helper:
    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, x: Tensor) -> Tensor:
        return self.owner.double(x)


class SlottedHelper:
    __slots__ = ("slotted",)
    __call__ = Helper.__call__

    def __init__(self, owner: nn.Module) -> None:
        self.slotted = owner

    @property
    def owner(self) -> nn.Module:
        return self.slotted


def closure_over(module: Keeper) -> Callable[[Tensor], Tensor]:
    old = module.double

    def run(x: Tensor, depth: int = 2) -> Tensor:
        return run(x, depth - 1) if depth else old(x)

    return run


KEPT: dict[str, Callable[[Keeper], Any]] = {
    "bound method": lambda m: m.double,
    "list": lambda m: [m.double, 1],
    "nested": lambda m: {"a": ({"b": [m.lin]},)},
    "partial": lambda m: functools.partial(Keeper.double, m),
    "keyword partial": lambda m: functools.partial(lambda x, f: f(x), f=m.double),
    "closure": closure_over,
    "default": lambda m: lambda x, m=m: m.double(x),
    "helper": Helper,
    "slotted helper": SlottedHelper,
    "bound method of a helper": lambda m: Helper(m).__call__,
    "weakref": weakref.ref,
    "proxy": weakref.proxy,
    "namespace": lambda m: argparse.Namespace(inner=types.SimpleNamespace(m=m)),
    "method of a parameter": lambda m: m.lin.weight.matmul,
    "parameter": lambda m: {"w": m.lin.weight},
    "module outside": lambda m: (o := nn.Sequential(), o.__dict__.update(back=[m]), [o])[2],
}
RUN: dict[str, Callable[[Keeper, Tensor], Tensor]] = {
    "list": lambda m, x: m.kept[0](x),
    "nested": lambda m, x: 2 * m.kept["a"][0]["b"][0](x),
    "weakref": lambda m, x: m.kept().double(x),
    "proxy": lambda m, x: m.kept.double(x),
    "namespace": lambda m, x: m.kept.inner.m.double(x),
    "method of a parameter": lambda m, x: 2 * (m.kept(x.T).T + m.lin.bias),
    "parameter": lambda m, x: 2 * (x @ m.kept["w"].T + m.lin.bias),
    "module outside": lambda m, x: m.kept[0].back[0].double(x),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_on_self_points_at_the_shell(kind: str) -> None:
    module = Keeper()
    module.__dict__["kept"] = KEPT[kind](module)
    module.run = types.MethodType(RUN.get(kind, lambda m, x: m.kept(x)), module)
    apply, params = functionalize(module)
    x = torch.randn(4, 3)
    given = {name: torch.zeros_like(p, requires_grad=True) for name, p in params.items()}
    before = snapshot(module)
    out = apply(given, x)
    assert torch.equal(out, torch.zeros(4, 3))
    assert all(g is not None for g in torch.autograd.grad(out.sum(), list(given.values())))
    assert torch.allclose(apply(params, x), 2 * module.lin(x), atol=1e-6)
    assert snapshot(module) == before


def test_a_replaced_forward_that_closes_over_the_old_one_is_rebound() -> None:
    module = mlp()
    calls = 0

    def wrap(old: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(old)
        def forward(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return old(x) + 1

        return forward

    module.forward = wrap(module.forward)
    module[0].forward = wrap(wrap(module[0].forward))
    apply, params = functionalize(module)
    given = {name: torch.zeros_like(p) for name, p in params.items()}
    assert torch.equal(apply(given, torch.ones(2, 3)), torch.ones(2, 3))
    assert calls == 3


def test_hooks_see_the_shell_and_outside_lists_still_fill() -> None:
    module = Keeper()
    module.run = module.double
    seen: list[Tensor] = []

    class Hook:
        def __init__(self, owner: nn.Module) -> None:
            self.owner = owner

        def __call__(self, m: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out + self.owner.lin.weight.sum()

    module.lin.register_forward_hook(Hook(module))
    module.lin.register_forward_hook(functools.partial(lambda owner, m, a, out: out + owner.lin.bias, module))
    module.register_forward_pre_hook(lambda m, args: seen.append(module.lin.weight))
    module.register_forward_hook(lambda m, args, kwargs, out: out + 1, with_kwargs=True)
    module.lin.register_full_backward_hook(lambda m, gi, go: seen.append(m.weight))
    apply, params = functionalize(module)
    x = torch.randn(2, 3, requires_grad=True)
    given = {name: torch.zeros_like(p).requires_grad_() for name, p in params.items()}
    out = apply(given, x)
    assert torch.equal(out, torch.ones(2, 3))
    out.sum().backward()
    assert [t is given["lin.weight"] for t in seen] == [True, True]
    assert torch.allclose(apply(params, x), module(x))


shared_model = Keeper()


def test_a_hook_that_reads_a_global_module_is_refused_by_name() -> None:
    module = shared_model
    handle = module.register_forward_hook(lambda m, args, out: out + shared_model.lin.bias)
    with pytest.raises(
        TypeError, match=r"model\._forward_hooks\[\d+\] reads .* global variable 'shared_model'"
    ):
        functionalize(module)
    handle.remove()


def test_what_cannot_be_copied_is_refused_by_path() -> None:
    module = nn.Sequential(Keeper())
    module[0].helper = {"thread": threading.Thread(target=module[0].double)}
    with pytest.raises(TypeError, match=r"model\[0\]\.helper\['thread'\] is a threading\.Thread"):
        functionalize(module)


def test_too_many_objects_to_search_are_refused() -> None:
    module = Keeper()
    module.many = [[object()] for _ in range(60_000)]
    with pytest.raises(TypeError, match="too many to search"):
        functionalize(module)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.calls, self.cache, self.out = [], {}, None

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.out = self.lin(x)
        self.calls.append(1)
        self.cache["x"] = x
        self.register_buffer("new", x)
        self.extra = nn.Linear(1, 1)
        self.lin.register_forward_hook(lambda *a: None)
        self.lin.train(False)
        if fail:
            raise RuntimeError("on purpose")
        return self.out


@pytest.mark.parametrize("fail", [False, True])
def test_writes_in_forward_land_on_the_shell_also_after_an_exception(fail: bool) -> None:
    module = Writer()
    apply, params = functionalize(module)
    before = snapshot(module)
    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            apply(params, torch.ones(3), fail=True)
    else:
        apply(params, torch.ones(3))
    assert snapshot(module) == before


class Guarded(nn.Module):
    __slots__ = ("slotted",)

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        object.__setattr__(self, "slotted", [self.lin])
        object.__setattr__(self, "sealed", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "sealed", False):
            raise AttributeError("sealed")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self, Guarded) and next(self.parameters()).device == x.device
        return self.slotted[0](x) + sum(p.sum() for _, p in self.named_parameters())


def test_slots_and_own_setattr_are_respected() -> None:
    apply, params = functionalize(Guarded())
    given = {name: torch.zeros_like(p) for name, p in params.items()}
    assert torch.equal(apply(given, torch.ones(2, 3)), torch.zeros(2, 3))


def test_changes_of_the_module_between_calls_are_seen() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9))
    apply, params = functionalize(module)
    x = torch.randn(50, 3)
    assert (apply(params, x) == 0).any()
    module.eval()
    assert not (apply(params, x) == 0).any()
    handle = module.register_forward_hook(lambda m, a, out: out * 0)
    assert (apply(params, x) == 0).all()
    handle.remove()
    module[1] = nn.ReLU()
    assert (apply(params, x) >= 0).all()


def test_a_checkpoint_recomputed_in_backward_leaves_the_new_buffers_alone() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    apply, params, buffers = functionalize_with_buffers(Block())
    given = {name: p.clone().requires_grad_() for name, p in params.items()}
    before = isolate(True)
    out, new = apply(given, buffers, torch.randn(4, 3))
    kept = {name: b.clone() for name, b in new.items()}
    out.square().sum().backward()
    isolate(before)
    assert all(torch.equal(new[name], kept[name]) for name in new)
    assert all(p.grad is not None for p in given.values())


def test_containers_without_the_module_are_copied_and_cycles_left_alone() -> None:
    module = Keeper()
    module.run = module.double
    module.vocabulary, module.ring = {str(i): i for i in range(100)}, argparse.Namespace()
    module.ring.back = argparse.Namespace(ring=module.ring)
    module.__dict__["dead"] = weakref.proxy(type("Gone", (), {})())
    shell = make_shell(module, {}, {}).module
    assert shell.vocabulary == module.vocabulary and shell.vocabulary is not module.vocabulary
    assert shell.ring is not module.ring and shell.ring.back.ring is shell.ring


def test_shells_are_freed_without_a_collection() -> None:
    module = nn.Sequential(mlp(), cnn(), nn.LSTM(3, 3))
    with no_cycle_collection():
        shell = weakref.ref(make_shell(module, {}, {}).module)
        assert shell() is None
