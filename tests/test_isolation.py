"""Modules that a shard calls by itself."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from module_zoo import Recurrent, Tied, TwoNames, cnn, mlp, snapshot
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, stateless

from funcpar._functional import functionalize_with_buffers
from funcpar._isolation import isolate


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def isolated() -> Iterator[None]:
    before = isolate(True)
    yield
    isolate(before)


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
        (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), (4, 3)),
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), (4, 3)),
    ],
)
def test_a_norm_called_directly_in_a_shard_is_refused_before_it_writes(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], isolated: None
) -> None:
    isolate(False)
    module = layer()
    isolate(True)
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
