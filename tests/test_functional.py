"""Modules as pure functions, and modules that a shard calls by itself."""

import argparse
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, stateless
from torch.utils.checkpoint import checkpoint

from funcpar._functional import functionalize, functionalize_with_buffers, isolate


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def isolated() -> Iterator[None]:
    before = isolate(True)
    yield
    isolate(before)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.cell = kind(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


ROWS = lambda *shape: torch.randn(6, *shape)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: ROWS(3)),
    "cnn": (lambda: cnn().eval(), lambda: ROWS(2, 4, 4)),
    "lstm": (Recurrent, lambda: ROWS(5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: ROWS(5, 3)),
    "attention": (Attention, lambda: ROWS(5, 4)),
    "encoder": (encoder, lambda: ROWS(5, 4)),
    "encoder, fast path": (lambda: encoder().eval(), lambda: ROWS(5, 4)),
    "tied": (Tied, lambda: torch.arange(6)),
    "two names": (TwoNames, lambda: ROWS(3)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), lambda: ROWS(3)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).eval(), lambda: ROWS(3)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), lambda: ROWS(3)),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)).eval(), lambda: ROWS(3)),
    "compiled in place": (lambda: (m := mlp(), m.compile(backend="eager"))[0], lambda: ROWS(3)),
}


def snapshot(module: nn.Module) -> list[Any]:
    """List every attribute, hook, parameter and buffer of a module by identity, tensors also by value."""
    seen: list[Any] = []
    for name, m in module.named_modules():
        for key, value in m.__dict__.items():
            seen.append((name, key, id(value)))
            if isinstance(value, (list, tuple, dict, set)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                seen += [(name, key, k, id(v)) for k, v in items]
    tensors = [*module.parameters(), *module.buffers()]
    return [*seen, *((id(t), t._version, t.detach().flatten().tolist()) for t in tensors)]


def moved(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (p + 0.1 * torch.randn_like(p)).requires_grad_() for name, p in params.items()}


def reference(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Write the parameters into the module itself, call it, and put them back."""
    own = dict(module.named_parameters())
    kept = {name: p.detach().clone() for name, p in own.items()}
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(params[name])
    try:
        return module(x)
    finally:
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(kept[name])


@pytest.mark.parametrize("name", MODELS)
def test_apply_equals_the_module_with_these_parameters(name: str) -> None:
    make, data = MODELS[name]
    module, x = make(), data()
    apply, params = functionalize(module)
    given = moved(params)
    expected = reference(module, given, x).detach()
    before = snapshot(module)
    assert torch.allclose(apply(given, x), expected, atol=1e-6)
    assert snapshot(module) == before
    assert torch.allclose(apply(params, x), module(x), atol=1e-6)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "compiled in place"])
def test_gradients_reach_every_given_parameter(name: str) -> None:
    make, data = MODELS[name]
    module, x = make(), data()
    apply, params = functionalize(module)
    given = {name: p.clone().requires_grad_() for name, p in params.items()}
    (apply(given, x) ** 2).sum().backward()
    (module(x) ** 2).sum().backward()
    for key, p in module.named_parameters():
        assert torch.allclose(given[key].grad, p.grad, atol=1e-5), key


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_old_weight_norm_uses_the_given_parameters_after_a_forward() -> None:
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())
    x = torch.randn(4, 3)
    module(x)
    apply, params = functionalize(module)
    given = {name: (2 * p).requires_grad_() for name, p in params.items()}
    weight = module[0].weight
    out = apply(given, x)
    assert torch.allclose(out, torch.tanh(x @ (2 * weight).T + 2 * module[0].bias), atol=1e-6)
    assert module[0].weight is weight
    assert all(g is not None for g in torch.autograd.grad(out.sum(), list(given.values())))


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_state_flows_through_the_buffers(make: Callable[[nn.Module], nn.Module]) -> None:
    module = make(nn.Linear(5, 4))
    x = torch.randn(2, 5)
    apply, params, buffers = functionalize_with_buffers(module)
    given = {name: b.clone() for name, b in buffers.items()}
    state = given
    for _ in range(3):
        out, state = apply(params, state, x)
    assert all(torch.equal(given[name], b) for name, b in module.named_buffers())
    for _ in range(3):
        expected = module(x)
    assert torch.allclose(out, expected, atol=1e-6)
    assert all(torch.allclose(state[name], b, atol=1e-6) for name, b in module.named_buffers())


def test_params_share_storage_and_are_named_as_the_module_names_them() -> None:
    module = Tied()
    _, params = functionalize(module)
    assert list(params) == ["embed.weight"]
    assert params["embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert not params["embed.weight"].requires_grad


def test_functionalize_keeps_tied_weights_tied() -> None:
    apply, params = functionalize(Tied())
    w = torch.randn(7, 4, requires_grad=True)
    out = apply({"embed.weight": w}, torch.arange(7))
    assert torch.allclose(out, w @ w.T)


def test_new_buffers_are_complete_and_nothing_given_is_written() -> None:
    module = cnn()
    module.register_buffer("scale", torch.ones(2), persistent=False)
    apply, params, buffers = functionalize_with_buffers(module)
    x = torch.randn(6, 2, 4, 4)
    given = {name: b.clone() for name, b in buffers.items()}
    kept = {name: b.clone() for name, b in given.items()}
    before = snapshot(module)
    _, new = apply(params, given, x)
    assert snapshot(module) == before
    assert list(new) == [name for name, _ in module.named_buffers()]
    assert all(torch.equal(given[name], kept[name]) for name in kept)
    module(x)
    assert all(torch.equal(new[name], b) for name, b in module.named_buffers())
    assert all(type(b) is Tensor and b.data_ptr() != given[name].data_ptr() for name, b in new.items())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", ["plain", "inference", "no_grad", "grad", "jvp"])
def test_a_changed_buffer_is_refused_and_untouched(mode: str) -> None:
    module = cnn()
    apply, params = functionalize(module)
    x = torch.randn(6, 2, 4, 4)
    before = snapshot(module)
    with pytest.raises(
        ValueError, match=r"buffers 1\.running_mean.*\n.*functionalize_with_buffers.*module\.eval"
    ):
        if mode == "grad":
            torch.func.grad(lambda p: apply(p, x).sum())(params)
        elif mode == "jvp":
            torch.func.jvp(lambda p: apply(p, x), (params,), (params,))
        else:
            with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "plain"):
                apply(params, x)
    assert snapshot(module) == before


class Counter(nn.Module):
    how = "add_"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([0.0, float("nan")]))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "add_":
            self.count.add_(1)
        elif self.how == "assign":
            self.count = self.count + 1
        elif self.how == "data":
            self.count.data.add_(1)
        elif self.how == "None":
            self.count = None
        return x * self.scale if self.how != "return" else self.count


@pytest.mark.parametrize("how", ["add_", "assign", "data"])
def test_every_way_to_change_a_buffer_is_seen(how: str) -> None:
    module = Counter()
    module.how = how
    apply, params = functionalize(module)
    with pytest.raises(ValueError, match="buffers count, which are constants"):
        apply(params, torch.ones(2))
    assert module.count[0] == 0
    apply2, params, buffers = functionalize_with_buffers(module)
    assert apply2(params, buffers, torch.ones(2))[1]["count"][0] == 1
    assert module.count[0] == 0


def test_a_removed_buffer_is_refused() -> None:
    module = Counter()
    module.how = "None"
    apply, params, buffers = functionalize_with_buffers(module)
    with pytest.raises(ValueError, match=r"removed the buffers count\.\nWrite an empty tensor"):
        apply(params, buffers, torch.ones(2))


def test_a_buffer_may_be_the_output() -> None:
    module = Counter()
    module.how = "return"
    apply, params = functionalize(module)
    out = apply(params, torch.ones(2))
    out += 5
    assert module.count[0] == 0


def test_buffers_are_the_modules_at_the_call_also_after_data_writes() -> None:
    module = cnn().eval()
    apply, params = functionalize(module)
    x = torch.randn(6, 2, 4, 4)
    module[1].running_mean.data.fill_(3.0)
    assert torch.allclose(apply(params, x), module(x))


def test_unknown_and_missing_names_are_listed_with_close_matches() -> None:
    apply, params = functionalize(nn.Linear(3, 2))
    with pytest.raises(
        ValueError, match=r"'weight'  missing\n  'wieght'  unknown; did you mean 'weight'\?\nGive"
    ):
        apply({"wieght": params["weight"], "bias": params["bias"]}, torch.ones(3))
    apply2, params, buffers = functionalize_with_buffers(nn.BatchNorm1d(3))
    with pytest.raises(
        ValueError, match=r"names in buffers are not the module's:\n  'running_mean'  missing"
    ):
        apply2(params, {}, torch.ones(2, 3))


def test_params_that_are_no_mapping_of_tensors_are_refused() -> None:
    apply, params = functionalize(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="params is a list, not a mapping"):
        apply(list(params), torch.ones(3))
    with pytest.raises(TypeError, match=r"params\['bias'\] is a NoneType"):
        apply({**params, "bias": None}, torch.ones(3))
    with pytest.raises(TypeError, match="expected an nn.Module, got function"):
        functionalize(lambda x: x)
    frozen = types.MappingProxyType(params)
    assert apply(frozen, torch.ones(3)).shape == (2,)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"model\[0\]\.weight has no shape yet"),
        (
            lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))),
            r"model\[0\]: a DataParallel wrapper.*\.module",
        ),
    ],
)
def test_modules_without_a_function_are_refused_by_path(module: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        functionalize(module())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_script_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model\.inner: a ScriptModule cannot be copied"):
        functionalize(nn.ModuleDict({"inner": torch.jit.script(nn.Linear(2, 2))}))


# What a module keeps in its attributes and hooks.


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
    "weakref": lambda m: weakref.ref(m),
    "proxy": lambda m: weakref.proxy(m),
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


# Transforms and contexts.


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_apply_works_under_grad_hessian_and_jvp() -> None:
    module = mlp().double()
    apply, params = functionalize(module)
    x = torch.randn(4, 3, dtype=torch.float64)
    loss = lambda p: (apply(p, x) ** 2).sum()
    grads = torch.func.grad(loss)(params)
    loss(dict(module.named_parameters())).backward()
    assert all(torch.allclose(grads[name], p.grad) for name, p in module.named_parameters())
    _, slope = torch.func.jvp(loss, (params,), (grads,))
    assert torch.allclose(slope, sum((g * g).sum() for g in grads.values()))
    hessian = torch.func.hessian(loss)(params)["0.bias"]["0.bias"]
    assert torch.allclose(hessian, hessian.T) and hessian.abs().sum() > 0
    given = tuple(p.clone().requires_grad_() for p in params.values())
    names = list(params)
    assert torch.autograd.gradgradcheck(lambda *ps: apply(dict(zip(names, ps, strict=True)), x), given)


def test_apply_works_under_vmap_over_stacked_models() -> None:
    models = [cnn().eval() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    apply, _, _ = functionalize_with_buffers(models[0])
    x = torch.randn(6, 2, 4, 4)
    out, _ = torch.func.vmap(apply, in_dims=(0, 0, None))(params, buffers, x)
    assert torch.allclose(out, torch.stack([m(x) for m in models]), atol=1e-5)


def test_new_buffers_come_plain_out_of_grad() -> None:
    apply, params, buffers = functionalize_with_buffers(cnn())
    x = torch.randn(6, 2, 4, 4)

    def loss(p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out, new = apply(p, buffers, x)
        return (out**2).sum(), new

    _, new = torch.func.grad(loss, has_aux=True)(params)
    expected = apply(params, buffers, x)[1]
    assert all(type(b) is Tensor and torch.equal(b, expected[name]) for name, b in new.items())
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(b) for b in new.values())


def test_apply_sees_autocast_and_inference_mode() -> None:
    apply, params = functionalize(nn.Linear(3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert apply(params, torch.ones(1, 3)).dtype == torch.bfloat16
    with torch.inference_mode():
        assert apply(params, torch.ones(1, 3)).is_inference()


def test_apply_compiles_without_a_break() -> None:
    module = cnn()
    apply, params, buffers = functionalize_with_buffers(module)
    x = torch.randn(6, 2, 4, 4)
    before = snapshot(module)
    out, new = torch.compile(apply, backend="eager", fullgraph=True)(params, buffers, x)
    expected, wanted = apply(params, buffers, x)
    assert torch.allclose(out, expected)
    assert all(torch.equal(new[name], wanted[name]) for name in wanted)
    assert snapshot(module) == before
    constant, _ = functionalize(module)
    compiled = torch.compile(constant, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"forward changed the buffer 1\.running_mean"):
        compiled(params, x)
    module.eval()
    assert torch.allclose(compiled(params, x), module(x))
    with pytest.raises(Exception, match="Observed exception"):
        compiled({**params, "0.wieght": x}, x)


# Shards: what they call by themselves.

SPELLINGS: dict[str, Callable[..., Any]] = {
    "torch.func": functional_call,
    "stateless": stateless.functional_call,
}


@pytest.mark.filterwarnings("ignore:.*stateless.functional_call:FutureWarning")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_functional_call_from_four_threads_is_right(spelling: str) -> None:
    call = SPELLINGS[spelling]
    module = nn.Sequential(mlp(), TwoNames()).double()
    names = dict(module.named_parameters())
    before = snapshot(module)
    wrong, barrier = [], threading.Barrier(4)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
        given = {name: rand(*p.shape).requires_grad_() for name, p in names.items()}
        w1, b1, w2, b2, w3, b3 = given.values()
        x = rand(2, 3)
        hidden = torch.tanh(x @ w1.T + b1) @ w2.T + b2
        expected = torch.tanh(hidden @ w3.T + b3) @ w3.T + b3
        grads = torch.autograd.grad(expected.sum(), list(given.values()))
        isolate(True)
        barrier.wait(60)
        for turn in range(700):
            out = call(module, given, (x,))
            if not torch.allclose(out, expected):
                wrong.append(seed)
            if turn % 10 == 0:
                got = torch.autograd.grad(out.sum(), list(given.values()))
                if not all(map(torch.allclose, got, grads)):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not wrong
    assert snapshot(module) == before


def test_functional_call_in_a_shard_keeps_torchs_rules(isolated: None) -> None:
    module = Tied()
    w = torch.randn(7, 4)
    x = torch.arange(7)
    for given in ({"head.weight": w}, {"embed.weight": w}, {"embed.weight": w, "head.weight": w, "other": w}):
        assert torch.allclose(functional_call(module, given, (x,)), w @ w.T)
        assert torch.allclose(functional_call(module, given, x), w @ w.T)
    untied = functional_call(module, {"head.weight": w}, (x,), tie_weights=False)
    assert torch.allclose(untied, module.embed.weight @ w.T)
    with pytest.raises(ValueError, match="multiple values"):
        functional_call(module, {"embed.weight": w, "head.weight": w + 1}, (x,))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\): 'other'"):
        functional_call(module, {"embed.weight": w, "other": w}, (x,), strict=True)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        functional_call(module, {}, (x,), strict=True)
    assert functional_call(module, {"embed.weight": w}, (x,), strict=True).shape == (7, 7)


def test_functional_call_in_a_shard_leaves_other_parameters_their_gradients(isolated: None) -> None:
    module = mlp()
    weight = torch.zeros(5, 3, requires_grad=True)
    functional_call(module, ({"0.weight": weight}, {}), (torch.ones(2, 3),)).sum().backward()
    assert weight.grad is not None and module[0].weight.grad is None
    assert module[2].weight.grad is not None


def test_functional_call_in_a_shard_may_replace_a_parametrized_weight(isolated: None) -> None:
    module = parametrizations.weight_norm(nn.Linear(3, 2))
    name = "parametrizations.weight.original0"
    out = functional_call(module, {name: torch.zeros(2, 1), "bias": torch.ones(2)}, (torch.ones(1, 3),))
    assert torch.equal(out, torch.ones(1, 2))


def test_functional_call_in_a_shard_with_lstm_and_untied_weights(isolated: None) -> None:
    module = Recurrent()
    given = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for tie in (True, False):
        out = functional_call(module, given, (torch.ones(1, 2, 3),), tie_weights=tie)
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("tie", [True, False])
def test_functional_call_in_a_shard_refuses_to_change_buffers(isolated: None, tie: bool) -> None:
    module = cnn()
    x = torch.randn(6, 2, 4, 4)
    given = {name: t.clone() for name, t in module.state_dict().items()}
    kept = {name: t.clone() for name, t in given.items()}
    before = snapshot(module)
    with pytest.raises(ValueError, match=r"functional_call in a shard: .*1\.running_mean"):
        functional_call(module, given, (x,), tie_weights=tie)
    module.eval()
    given["1.running_mean"] += 1
    kept["1.running_mean"] += 1
    shifted = functional_call(module, given, (x,), tie_weights=tie)
    assert not torch.allclose(shifted, module(x))
    module.train()
    assert snapshot(module) == before
    assert all(torch.equal(given[name], kept[name]) for name in kept)


def test_functional_call_without_isolation_is_torchs_own() -> None:
    module = cnn()
    functional_call(module, dict(module.named_parameters()), (torch.randn(6, 2, 4, 4),))
    assert module[1].num_batches_tracked == 1
    assert stateless._functional_call.__wrapped__.__module__ == "torch.nn.utils.stateless"


def test_functional_call_still_compiles_without_a_break() -> None:
    module = cnn()
    compiled = torch.compile(lambda p, x: functional_call(module, p, (x,)), backend="eager", fullgraph=True)
    params = dict(module.named_parameters())
    x = torch.randn(6, 2, 4, 4)
    assert torch.allclose(compiled(params, x), module(x))


def test_functional_call_of_wrappers_raises_as_in_torch(isolated: None) -> None:
    with pytest.raises(RuntimeError, match="DataParallel"):
        functional_call(nn.DataParallel(nn.Linear(2, 2)), {}, (torch.ones(2),))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (4, 3)),
        (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 2, 2)),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
    ],
)
def test_a_norm_called_directly_in_a_shard_is_refused_before_it_writes(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], isolated: None
) -> None:
    module = layer()
    before = snapshot(module)
    x = torch.randn(shape)
    with pytest.raises(
        ValueError, match=r"running statistics that shards share\.\n.*functionalize_with_buffers"
    ):
        module(x)
    assert snapshot(module) == before
    apply, params, buffers = functionalize_with_buffers(module)
    apply(params, buffers, x)
    module.eval()
    module(x)
    nn.BatchNorm1d(3, track_running_stats=False)(torch.randn(4, 3))
    isolate(False)
    module.train()
    module(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_functional_norm_in_a_shard_is_refused_if_it_writes(training: bool, isolated: None) -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    call = lambda: nn.functional.batch_norm(
        torch.randn(4, 3), running_mean=mean, running_var=var, training=training
    )
    if training:
        with pytest.raises(ValueError, match="shards share"):
            call()
    else:
        call()
    assert torch.equal(mean, torch.zeros(3))
    nn.functional.instance_norm(torch.randn(2, 3, 4))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_guarded_norms_can_still_be_scripted() -> None:
    x = torch.randn(4, 3)
    assert torch.allclose(torch.jit.script(nn.BatchNorm1d(3))(x), nn.BatchNorm1d(3)(x))


def test_isolation_is_of_one_thread() -> None:
    seen = []
    assert isolate(True) is False
    thread = threading.Thread(target=lambda: seen.append(isolate(False)))
    thread.start()
    thread.join(60)
    assert isolate(False) is True
    assert seen == [False]
