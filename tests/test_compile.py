"""Compiled functions: the same numbers, one compilation per signature, a reason for every refusal."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call

import funcpar as fp
from funcpar import _compile, _graphs

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """Trace graphs, forward and backward, but run them with torch's own kernels, unless marked."""
    torch.compiler.reset()
    counters.clear()
    if not any(mark.args and mark.args[0] == "inductor" for mark in request.node.iter_markers("backend")):
        monkeypatch.setattr(_graphs, "BACKEND", torch._dynamo.lookup_backend("aot_eager"))


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss_fn(params: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ params["w"]) + params["deep"]["b"] - y) ** 2).mean()


PARAMS = {"w": rand(3, 2), "deep": {"b": rand(2)}, "steps": torch.arange(3)}
BATCH = rand(13, 3), rand(13, 2)


def assert_close(got: Any, expected: Any) -> None:
    for (path, ours), theirs in zip(fp.tree.leaves_with_path(got), fp.tree.leaves(expected), strict=True):
        limit = 1e-12 * float(theirs.detach().abs().max()) if theirs.numel() else 0.0
        assert float((ours - theirs).detach().abs().max()) <= limit, path


def mlp(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *more, nn.Tanh(), nn.Linear(4, 1)).double()


def detached(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in module.named_parameters()}


@pytest.mark.parametrize("count", [1, 2, 3] if THOROUGH else [1, 3])
def test_a_compiled_gradient_is_that_of_the_whole_and_compiled_once_per_size_of_shard(count):
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=count, compile=True)
    for batch in (BATCH, BATCH):
        assert_close(mapped(PARAMS, *batch), fp.value_and_grad(loss_fn)(PARAMS, *batch))
    # 13 rows; 7 and 6, and both in one; 5 and 4, and all three in one.
    assert num_graphs() == (1 if count == 1 else 3)
    shorter = tuple(leaf[:12] for leaf in BATCH)
    assert_close(mapped(PARAMS, *shorter), fp.value_and_grad(loss_fn)(PARAMS, *shorter))
    assert num_graphs() == (2 if count == 1 else 4)  # 12; 6 and 6 in one; 4 and 4 and 4 in one.


@pytest.mark.parametrize("count", [1, 3])
def test_a_compiled_function_is_differentiable_from_outside(count):
    mapped = fp.pmap(loss_fn, devices=count, compile=True)
    for _ in range(2):
        got = fp.value_and_grad(mapped)(PARAMS, *BATCH)
        assert_close(got, fp.value_and_grad(loss_fn)(PARAMS, *BATCH))
    assert num_graphs() == (1 if count == 1 else 2)
    with torch.no_grad():
        assert_close(mapped(PARAMS, *BATCH), loss_fn(PARAMS, *BATCH))


@pytest.mark.backend("inductor")
@needs_compiler
def test_generated_code_gives_the_same_numbers_and_the_same_masks():
    net = mlp(nn.Dropout(0.5))
    loss = lambda params, x: functional_call(net, params, (x,)).square().mean()
    answers = []
    for how in (False, True, True):
        torch.manual_seed(1)
        answers.append(fp.pmap(fp.value_and_grad(loss), devices=2, compile=how)(detached(net), BATCH[0][:12]))
    assert_close(answers[1], answers[0])
    for one, other in zip(fp.tree.leaves(answers[1]), fp.tree.leaves(answers[2]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not THOROUGH, reason="compiles for a minute; HYPOTHESIS_PROFILE=thorough")
@pytest.mark.backend("inductor")
@needs_compiler
@pytest.mark.parametrize("count", [1, 2, 3])
def test_generated_code_obeys_the_law(count):
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=count, compile=True)
    assert_close(mapped(PARAMS, *BATCH), fp.value_and_grad(loss_fn)(PARAMS, *BATCH))
    assert_close(
        fp.value_and_grad(fp.pmap(loss_fn, devices=count, compile=True))(PARAMS, *BATCH),
        fp.value_and_grad(loss_fn)(PARAMS, *BATCH),
    )


def test_a_function_that_the_user_compiled_is_compiled_once_for_all_shards():
    fun = lambda w, x: torch.tanh(x @ w)
    compiled = torch.compile(fun, backend="aot_eager")
    w, x = rand(3).requires_grad_(), rand(12, 3)
    mapped = fp.pmap(compiled, devices=4)
    for _ in range(2):
        (got,) = torch.autograd.grad(mapped(w, x).sum(), [w])
        assert_close(got, torch.autograd.grad(fun(w, x).sum(), [w])[0])
    assert num_graphs() == 1
    loss = lambda w, x: compiled(w, x).mean()  # Found in what the function closes over.
    assert_close(fp.pmap(fp.grad(loss), devices=3)(w.detach(), x), fp.grad(loss)(w.detach(), x))


def test_aux_partials_wrappers_and_keywords_are_as_without_compile():
    x, y = BATCH[0][:12], BATCH[1][:12]

    def fun(params, x, scale=1.0, y=None):
        value = loss_fn(params, x, y) * scale
        return value, {"prediction": x @ params["w"], "none": None, "name": "aux", "w": params["w"]}

    gradient = fp.value_and_grad(fun, has_aux=True)
    expected = gradient(PARAMS, x, scale=2.0, y=y)
    out_axes = ("mean", {"prediction": 0, "none": None, "name": None, "w": None})
    mapped = fp.pmap(gradient, devices=3, out_axes=out_axes, compile=True)
    got = mapped(PARAMS, x, scale=2.0, y=y)
    assert got[0][1].pop("name") == expected[0][1].pop("name") == "aux"
    assert_close(got, expected)
    partly = functools.partial(fp.grad(loss_fn), y=y[:1])
    axes = {"params": None, "x": 0, "y": None}
    assert_close(fp.pmap(partly, devices=2, in_axes=axes, compile=True)(PARAMS, x), partly(PARAMS, x))

    @functools.wraps(gradient)
    def scaled(params, x, scale=1.0, y=None):
        (value, _), grads = gradient(params, x, scale, y)
        return value, fp.tree.map(lambda leaf: leaf * 2, grads)

    assert_close(fp.pmap(scaled, devices=2, compile=True)(PARAMS, x, y=y), scaled(
        PARAMS, x, y=y))  # fmt: skip


def test_weights_are_part_of_the_graph_and_a_shard_of_weight_0_is_left_out():
    x = rand(12, 3)
    x[:4] = float("nan")
    mapped = fp.pmap(
        fp.value_and_grad(lambda w, x: (x @ w).square().mean()), devices=3, compile=True,
        weight=lambda w, x: 0.0 if x.isnan().any() else float(x.shape[0]),
    )  # fmt: skip
    whole = fp.value_and_grad(lambda w, x: (x @ w).square().mean())
    assert_close(mapped(rand(3), x), whole(rand(3), x[4:]))
    assert num_graphs() == 1


def test_modules_are_called_with_the_given_parameters_and_left_alone():
    net = mlp()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    apply, params = fp.functionalize(net)
    params = fp.tree.map(lambda leaf: leaf + 1, params)
    for loss in (
        lambda params, x: functional_call(net, params, (x,)).square().mean(),
        lambda params, x: apply(params, x).square().mean(),
    ):
        got = fp.pmap(fp.value_and_grad(loss), devices=3, compile=True)(params, BATCH[0][:12])
        assert_close(got, fp.value_and_grad(loss)(params, BATCH[0][:12]))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_dropout_draws_what_it_draws_without_compile_and_shards_get_masks_of_their_own():
    net = mlp(nn.Dropout(0.5))
    loss = lambda params, x: functional_call(net, params, (x,)).square().mean()
    mapped = {how: fp.pmap(fp.value_and_grad(loss), devices=3, compile=how) for how in (False, True)}
    answers = []
    for seed, how in ((1, False), (1, True), (1, True), (2, True)):
        torch.manual_seed(seed)
        answers.append(mapped[how](detached(net), BATCH[0][:12]))
    assert_close(answers[1], answers[0])
    assert torch.equal(answers[1][0], answers[2][0]) and not torch.equal(answers[2][0], answers[3][0])
    masks = fp.pmap(nn.functional.dropout, in_axes=0, devices=2, compile=True)(torch.ones(8, 50))
    assert not torch.equal(masks[:4], masks[4:])


def test_transforms_inside_work_and_so_does_a_gradient_within_the_function():
    per_sample = torch.vmap(torch.func.grad(lambda w, row: torch.tanh(row @ w)), (None, 0))
    w, x = GIVEN
    assert_close(fp.pmap(per_sample, devices=2, compile=True)(w, x), per_sample(w, x))
    inner = lambda w, x: (fp.grad(lambda v: torch.tanh(x @ v).mean())(w) ** 2).sum() * x.mean()
    assert_close(fp.pmap(inner, devices=1, compile=True)(w, x), inner(w, x))
    outer = fp.value_and_grad(inner)
    assert_close(fp.pmap(outer, devices=1, compile=True)(w, x), outer(w, x))


def test_what_surrounds_the_call_is_part_of_the_signature():
    loss = lambda w, x: (x @ w).square().mean()
    w, x = rand(3, 2).float(), rand(12, 3).float()
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    plain = fp.pmap(fp.value_and_grad(loss), devices=2)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = mapped(w, x), plain(w, x)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        with torch.inference_mode():
            assert torch.allclose(mapped(w, x)[1], plain(w, x)[1])
        assert torch.allclose(mapped(w, x)[1], plain(w, x)[1])
    assert num_graphs() == 6  # Of a shard, and of both.


def test_a_module_that_changes_between_calls_is_compiled_again():
    net = mlp(nn.Dropout(0.5)).eval()
    loss = lambda params, x: functional_call(net, params, (x,)).square().mean()
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    params, x = detached(net), BATCH[0][:12]
    for train in (False, True, False):
        net.train(train)
        torch.manual_seed(3)
        got = mapped(params, x)
        torch.manual_seed(3)
        assert_close(got, fp.pmap(fp.value_and_grad(loss), devices=2)(params, x))


def test_many_signatures_are_reported(monkeypatch):
    monkeypatch.setattr(_compile, "_MANY", 2)
    mapped = fp.pmap(lambda w, x: (x * w).mean(), devices=1, compile=True)
    mapped(1.0, BATCH[0])
    with pytest.warns(RuntimeWarning, match=r"compiled for 2 signatures.*\nPad the rows"):
        mapped(2.0, BATCH[0])


def branching(w, x):
    return (x @ w).mean() if x.sum() > 0 else w.sum()


def raising(w, x):
    raise LookupError(f"{x.shape[0]} rows")


CLOSED_OVER = rand(3).requires_grad_()
GIVEN = rand(3), rand(12, 3)
BATCHNORM = nn.BatchNorm1d(3).double()
REFUSALS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a branch on data": (
        fp.grad(branching), ValueError,
        r"(?s)^pmap\(branching, compile=True\): cannot compile the function: Data-dependent branching"
        r".*x\.sum\(\) > 0.*torch\.where for a branch\)",
    ),
    "a collective": (
        lambda w, x: fp.pmean((x @ w).mean()), ValueError, r"(?s)cannot compile.*pmean.*Collectives .* meet",
    ),
    "a nested pmap": (
        fp.pmap(branching), ValueError, r"(?s)cannot compile.*nested pmaps meet other shards",
    ),
    "a closed-over parameter": (
        fp.grad(lambda w, x: (x @ w * CLOSED_OVER.sum()).mean()), ValueError,
        r"uses tensors that require a gradient.*\n.*CLOSED_OVER.*\nDetach them",
    ),
    "a write to an argument": (
        lambda w, x: x @ w.add_(1), ValueError, r"writes in place to what .*\n.*args.*\nReturn the new value",
    ),
    "a write through a view": (
        lambda w, x: x @ w.view(3, 1).mul_(2), ValueError, r"writes in place to what .*\n.*args.*\nReturn",
    ),
    "running statistics": (
        fp.grad(lambda w, x: (BATCHNORM(x) * w).mean()), ValueError, r"batch_norm|writes in place",
    ),
    "its own error": (fp.grad(raising), LookupError, "^'?6 rows"),
    "no scalar": (fp.grad(lambda w, x: x @ w), ValueError, r"returned a tensor of shape \(6,\)"),
    "shapes": (fp.grad(lambda w, x: (x @ w[:2]).mean()), RuntimeError, "size mismatch|cannot be multiplied"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_compiled_is_refused_with_the_reason(name):
    fun, kind, match = REFUSALS[name]
    w, x = GIVEN
    with pytest.raises(kind, match=match):
        fp.pmap(fun, devices=2, compile=True)(w.clone(), x)
    assert BATCHNORM.num_batches_tracked == 0
    # The machine goes on.
    assert fp.pmap(lambda x: x + 1, in_axes=0, devices=2, compile=True)(x).shape == x.shape


def test_a_write_to_a_float64_number_is_not_lost_in_silence():
    # Torch traces such graphs again, without the write, and from then on all that follow.
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.count += 1.0 + x.sum()
            return x

    net = Counting()
    for _ in range(2):
        with pytest.raises(ValueError, match="writes in place"):
            fp.pmap(fp.grad(lambda w, x: (net(x) @ w).mean()), devices=1, compile=True)(*GIVEN)
    assert net.count == 0.0


def test_derivatives_that_compiled_code_does_not_have_are_refused():
    loss = lambda w, x: torch.tanh(x @ w).mean()
    gradient = fp.pmap(fp.grad(loss), devices=2, compile=True)
    w, x = rand(3).requires_grad_(), rand(12, 3)
    with pytest.raises(ValueError, match=r"compile=True\): arguments require a gradient.*\n  w\nDetach"):
        gradient(w, x)
    with torch.no_grad():
        assert_close(gradient(w, x), fp.grad(loss)(w.detach(), x))
    mapped = fp.pmap(loss, devices=2, compile=True)
    for transformed in (torch.func.grad(mapped), torch.func.grad(lambda w, x: gradient(w, x).sum())):
        with pytest.raises(ValueError, match=r"torch\.func transform .*\nUse the transform inside"):
            transformed(w.detach(), x)
    with pytest.raises(RuntimeError, match="double backward") as caught:
        fp.grad(lambda w: fp.grad(mapped)(w, x).sum())(w.detach())
    assert any("leave torch.compile or compile=True out" in note for note in caught.value.__notes__)


def test_a_missing_compiler_is_named(monkeypatch):
    def missing(graph, inputs):
        raise RuntimeError("No working C++ compiler found in cpp.cxx")

    monkeypatch.setattr(_graphs, "BACKEND", missing)
    with pytest.raises(ValueError, match=r"(?s)No working C\+\+.*\nInstall a C\+\+ compiler"):
        fp.pmap(fp.grad(lambda w, x: (x @ w).mean()), devices=2, compile=True)(*GIVEN)


def test_a_graph_of_unknown_writes_is_refused(monkeypatch):
    monkeypatch.setattr(_graphs, "BACKEND", lambda graph, inputs: graph.forward)
    with pytest.raises(
        ValueError, match=r"does not tell what the graph writes to in place\.\nLeave compile=True"
    ):
        fp.pmap(lambda w, x: x @ w, devices=2, compile=True)(*GIVEN)


@pytest.mark.backend("inductor")
@needs_compiler
def test_a_write_is_refused_also_where_torch_has_the_code_on_disk():
    for _ in range(2):
        torch.compiler.reset()
        buffer = torch.zeros(3, dtype=torch.float64)
        with pytest.raises(ValueError, match="writes in place to what"):
            fp.pmap(lambda w, x: x @ (w + buffer.view(1, 3).add_(1)[0]), devices=1, compile=True)(*GIVEN)
        assert not buffer.any()


def test_compile_is_a_bool():
    with pytest.raises(TypeError, match=r"compile='inductor' is not a bool\.\nGive True or False"):
        fp.pmap(loss_fn, compile="inductor")
