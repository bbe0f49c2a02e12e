"""Compiled functions: buffers, numbers, and what else a graph depends on."""

import functools
import os
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import funcpar as fp
from funcpar import _graphs

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"


needs_compiler = pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(_graphs, "BACKEND", torch._dynamo.lookup_backend("aot_eager"))


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


ROWS = torch.linspace(-1.0, 2.0, 36, dtype=torch.float64).reshape(12, 3).sin()
WEIGHTS = torch.linspace(0.5, 1.0, 3, dtype=torch.float64)
NORMS = {
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
}


def assert_close(got: Any, expected: Any) -> None:
    for (path, ours), theirs in zip(fp.tree.leaves_with_path(got), fp.tree.leaves(expected), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15), path


@pytest.mark.parametrize(
    ("name", "how", "count"),
    [
        ("batch_norm", "aot_eager", 2), ("batch_norm", "outside first", 2), ("batch_norm", "compile=True", 1),
        ("batch_norm", "compile=True", 2), ("instance_norm", "compile=True", 2),
    ] + THOROUGH * [("batch_norm", "aot_eager", 1), ("batch_norm", "eager", 2)],
)  # fmt: skip
def test_running_statistics_are_arguments_and_results_of_compiled_code(name, how, count):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), NORMS[name](), nn.Linear(4, 1)).double()
    apply, params, buffers = fp.functionalize_with_buffers(net)
    before = {key: value.clone() for key, value in buffers.items()}

    def loss(params, buffers, x):
        out, new = apply(params, buffers, x)
        return out.square().mean(), new

    gradient = fp.value_and_grad(loss, has_aux=True)
    merged = {key: "mean" if value.is_floating_point() else None for key, value in buffers.items()}
    mapped = functools.partial(fp.pmap, in_axes=(None, None, 0), out_axes=("mean", merged), devices=count)
    expected = mapped(gradient)(params, buffers, ROWS)
    assert not all(torch.equal(expected[0][1][key], before[key]) for key in before)
    if how == "compile=True":
        ways = [mapped(gradient, compile=True), mapped(loss, compile=True)]
    else:
        compiled = torch.compile(loss, backend="eager" if how == "eager" else "aot_eager")
        if how == "outside first":
            compiled(params, buffers, ROWS[:6])
        ways = [mapped(fp.value_and_grad(compiled, has_aux=True)), mapped(compiled)]
    for _ in range(2):
        assert_close(ways[0](params, buffers, ROWS), expected)
        assert_close(ways[1](params, buffers, ROWS), expected[0])
    assert all(torch.equal(value, before[key]) for key, value in net.named_buffers())


@pytest.mark.parametrize("count", [1, 2])
def test_running_statistics_that_shards_share_are_refused_in_compiled_code_too(count):
    net = nn.BatchNorm1d(3).double()
    apply, params = fp.functionalize(net)
    for fun in (lambda params, x: net(x), apply):
        with pytest.raises(Exception, match=r"shards share(?s:.*)functionalize_with_buffers"):
            fp.pmap(torch.compile(fun, backend="aot_eager"), devices=count)(params, ROWS)
        with pytest.raises(ValueError, match="functionalize_with_buffers"):
            fp.pmap(fun, devices=count, compile=True)(params, ROWS)
    assert net.num_batches_tracked == 0 and not net.running_mean.any()


def test_a_number_that_changes_outside_the_arguments_is_named_with_a_fix_that_works():
    class Schedule:
        rate = 0.0

    schedule = Schedule()
    scaled = lambda w, x: (x @ w).mean() * schedule.rate
    mapped = fp.pmap(fp.value_and_grad(scaled), devices=1, compile=True)
    match = (
        r"compile=True\): for the same arguments it was compiled 3 times.* differs from call to call:\n"
        r".*\.rate == .* schedule\.rate.*\nPass a number that changes as an argument or as a 0-d tensor"
    )
    with torch._dynamo.config.patch(recompile_limit=3), pytest.raises(ValueError, match=match):
        for step in range(4):
            schedule.rate = step + 0.5
            mapped(WEIGHTS, ROWS)
    assert schedule.rate == 3.5  # None before the fourth.
    mapped = fp.pmap(fp.value_and_grad(scaled), devices=1, compile=True)
    for step in range(9):
        schedule.rate = torch.tensor(step + 0.5, dtype=torch.float64)
        assert_close(mapped(WEIGHTS, ROWS), fp.value_and_grad(scaled)(WEIGHTS, ROWS))


def test_a_gradient_function_that_the_user_compiled_is_refused_when_it_is_mapped():
    loss = lambda w, x: torch.tanh(x @ w).mean()
    loss.__name__ = "loss"
    compiled = functools.partial(torch.compile, backend="aot_eager")
    gradient = fp.value_and_grad(loss)

    @functools.wraps(gradient)
    def wrapped(w, x):
        return gradient(w, x)

    match = (
        r"^pmap\(.*\): torch\.compile around value_and_grad\(loss\) hides .*\n"
        r"Map value_and_grad\(torch\.compile\(loss\)\), or .* with compile=True"
    )
    for fun in (
        compiled(gradient), compiled(wrapped), compiled(functools.partial(gradient)),
        functools.partial(compiled(gradient)), functools.wraps(compiled(gradient))(lambda w, x: 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            fp.pmap(fun, devices=1)
    # What it says works, and a wrapper that has but copied torch's marks is no compiled function.
    inner = fp.value_and_grad(compiled(loss))

    @functools.wraps(inner)
    def around(w, x):
        return inner(w, x)

    for mapped in (
        fp.pmap(inner, devices=2), fp.pmap(gradient, devices=2, compile=True), fp.pmap(around, devices=2),
    ):  # fmt: skip
        assert_close(mapped(WEIGHTS, ROWS), gradient(WEIGHTS, ROWS))


def test_nan_has_one_graph():
    mapped = fp.pmap(lambda w, s, x: (x @ w).mean() * s, in_axes=(None, None, 0), devices=1, compile=True)
    for _ in range(3):
        assert mapped(WEIGHTS, float("nan"), ROWS).isnan()
    assert num_graphs() == 1


def test_zeros_of_both_signs_have_graphs_of_their_own():
    inverse = lambda w, s, x: (x @ w).mean() * 0 + (torch.ones((), dtype=w.dtype) / s).real
    mapped = fp.pmap(inverse, in_axes=(None, None, 0), devices=1, compile=True)
    for zero in (0.0, -0.0, 0.0, -0.0):
        assert mapped(WEIGHTS, zero, ROWS) == float("-inf" if str(zero) == "-0.0" else "inf")
    assert num_graphs() == 2


@pytest.mark.parametrize("count", [1, 2])
def test_an_argument_in_the_results_is_that_object_with_and_without_compile(count):
    params = {"w": WEIGHTS, "unused": torch.ones(2), "steps": torch.arange(2)}

    def loss(params, x):
        return torch.tanh(x @ params["w"]).mean(), {**params, "new": params["w"] * 2, "name": "aux"}

    for compile in (False, True):
        for fun in (fp.value_and_grad(loss, has_aux=True), loss):
            mapped = fp.pmap(fun, devices=count, compile=compile)
            for given in (params, {**params, "w": WEIGHTS.clone().requires_grad_()}):
                with torch.no_grad():
                    out = mapped(given, ROWS)
                aux = out[1] if fun is loss else out[0][1]
                assert all(aux[name] is given[name] for name in given), (compile, fun)
                assert torch.equal(aux["new"], WEIGHTS * 2) and aux["name"] == "aux"


def test_what_is_compiled_first_takes_nothing_from_the_callers_generator():
    for fun, compiled in ((lambda x: x * 2, True), (torch.compile(lambda x: x * 3, backend="eager"), False)):
        before = torch.get_rng_state()
        fp.pmap(fun, in_axes=0, devices=2, compile=compiled)(ROWS)
        assert torch.equal(torch.get_rng_state(), before)


def test_nothing_of_a_mode_stays_with_later_calls():
    gradient = fp.value_and_grad(lambda w, x: (x @ w).square().mean())
    mapped = fp.pmap(gradient, devices=2, compile=True)
    with torch.device("meta"):  # Where new tensors are made there.
        assert_close(mapped(WEIGHTS, ROWS), gradient(WEIGHTS, ROWS))
    with FakeTensorMode(allow_non_fake_inputs=True):
        mapped(WEIGHTS, ROWS)
    value, grad = mapped(WEIGHTS, ROWS)
    assert type(value) is type(grad) is torch.Tensor
    assert_close((value, grad), gradient(WEIGHTS, ROWS))


def test_hooks_that_come_and_go_are_noticed():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    apply, params = fp.functionalize(net)
    mapped = fp.pmap(apply, devices=2, compile=True)
    assert_close(mapped(params, ROWS), apply(params, ROWS))
    for register in (net[0].register_forward_hook, net[1].register_forward_pre_hook):
        handle = register(lambda module, given, out=None: given[0].sin() if out is None else out.cos())
        assert_close(mapped(params, ROWS), apply(params, ROWS))
        handle.remove()
        assert_close(mapped(params, ROWS), apply(params, ROWS))


class Noisy(torch.autograd.Function):
    """Adds noise in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


LATE_DRAWS = {
    "in backward": lambda w, x: Noisy.apply(x @ w).square().mean(),
    "in a checkpoint": lambda w, x: checkpoint(
        lambda: nn.functional.dropout((x @ w).sin(), 0.5).square(), use_reentrant=False
    ).mean(),
}


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # Torch's, while it traces.
@pytest.mark.parametrize("name", LATE_DRAWS)
def test_code_of_torchs_compiler_draws_in_graphs_of_a_backward_too(name, monkeypatch):
    monkeypatch.setattr(_graphs, "BACKEND", _graphs._inductor)
    found = []
    for compiled in (False, True):
        torch.manual_seed(5)
        w = WEIGHTS.clone().requires_grad_()
        out = fp.pmap(LATE_DRAWS[name], devices=2, compile=compiled)(w, ROWS)
        found.append((out.detach(), torch.autograd.grad(out, w)))
    assert_close(*found)


DRAWS = {
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "dropout1d": lambda x: nn.functional.dropout1d(x[:, None], 0.5),
    "rand": lambda x: torch.rand(x.shape[0], 4),
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "in a branch": lambda x: torch.cond(
        x.sum() > -99, lambda x: torch.empty_like(x).bernoulli_(0.3), torch.sin, (x,)
    ),
    "nothing": lambda x: x * 2,
}


@needs_compiler
@pytest.mark.parametrize("name", DRAWS)
def test_code_of_torchs_compiler_draws_what_its_ops_draw(name, monkeypatch):
    # Its C++ code calls some random kernels past the place where a shard's stream is handed in.
    monkeypatch.setattr(_graphs, "BACKEND", _graphs._inductor)
    found = []
    for compiled in (False, True):
        torch.manual_seed(5)
        found.append(fp.pmap(DRAWS[name], in_axes=0, devices=2, compile=compiled)(ROWS))
    assert torch.equal(*found)
    assert name == "nothing" or not torch.equal(found[1][:6], found[1][6:])
