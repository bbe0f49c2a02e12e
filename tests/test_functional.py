"""Modules as pure functions of their parameters and buffers."""

import copy
import pickle
import types
from collections.abc import Callable

import pytest
import torch
from module_zoo import MODELS, Tied, cnn, snapshot
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from funcpar._functional import functionalize, functionalize_with_buffers


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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
    apply, _ = functionalize(Tied())
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
    apply2, params, _ = functionalize_with_buffers(nn.BatchNorm1d(3))
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
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got function"):
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda apply: pickle.loads(pickle.dumps(apply))])
def test_apply_can_be_copied_and_pickled_with_its_module(copied: Callable) -> None:
    module, x = cnn(), torch.randn(6, 2, 4, 4)
    apply, params, buffers = functionalize_with_buffers(module)
    other = copied(apply)
    module.eval()
    out, new = other(params, buffers, x)
    module.train()
    assert torch.equal(out, apply(params, buffers, x)[0]) and new["1.num_batches_tracked"] == 1
    assert copied(functionalize(nn.Linear(4, 4))[0])({"weight": torch.eye(4), "bias": torch.ones(4)}, x)[
        ..., 0
    ].equal(x[..., 0] + 1)


class Aliased(nn.Module):
    """Has a buffer that is a parameter of a later submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("weight", self.lin.weight)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) @ self.weight


def test_a_buffer_that_is_a_parameter_goes_by_the_parameters_name() -> None:
    module, x, w = Aliased(), torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    apply, params, buffers = functionalize_with_buffers(module)
    assert list(buffers) == ["steps"] and sorted(params) == ["lin.bias", "lin.weight"]
    given = {**params, "lin.weight": w}
    expected = (x @ w.T + module.lin.bias) @ w
    compiled = torch.compile(apply, backend="eager", fullgraph=True)
    for call in (apply, compiled):
        out, new = call(given, buffers, x)
        assert torch.allclose(out, expected) and list(new) == ["steps"]
    constant, _ = functionalize(module)
    assert torch.allclose(constant(given, x), expected)
    assert torch.allclose(torch.compile(constant, backend="eager", fullgraph=True)(given, x), expected)
