"""One graph for all shards of short compiled calls: the same bits, or the shards themselves."""

import os
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call
from torch.utils import _pytree as pytree

import funcpar as fp
from funcpar import _bundle, _graphs, _steps
from funcpar._bundle import COMPARED, Bundle, State

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"
ROWS = torch.linspace(-1.0, 1.0, 39, dtype=torch.float64).reshape(13, 3)
W = torch.linspace(0.5, 1.0, 6, dtype=torch.float64).reshape(3, 2)


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(_bundle, "SHORT", 60.0)  # Whatever else this machine does.
    monkeypatch.setattr(_bundle, "COMPARED", 1)
    if not any(mark.args and mark.args[0] == "inductor" for mark in request.node.iter_markers("backend")):
        monkeypatch.setattr(_graphs, "BACKEND", torch._dynamo.lookup_backend("aot_eager"))


@pytest.fixture
def bundles(monkeypatch) -> list[Bundle]:
    """Every bundle that the test makes."""
    made: list[Bundle] = []

    class Noted(Bundle):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("funcpar._compile.Bundle", Noted)
    return made


def loss_fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).square().mean()


def leaves_of(*trees: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in fp.tree.leaves(trees)]


def same(one: Any, other: Any) -> bool:
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in pairs)


CASES = {
    "a mean": (fp.value_and_grad(loss_fn), {}, (W, ROWS)),
    "a gradient alone": (fp.grad(loss_fn), {}, (W, ROWS)),
    "a sum": (fp.value_and_grad(lambda w, x: (x @ w).square().sum()), {"out_axes": "sum"}, (W, ROWS)),
    "half precision": (fp.grad(loss_fn), {}, (W.bfloat16().repeat(1, 4), ROWS.bfloat16())),
    "a mean of half precision": (fp.value_and_grad(loss_fn), {}, (W.bfloat16(), ROWS.bfloat16())),
    "a mean of half precision, the same by chance": (
        fp.value_and_grad(loss_fn), {}, (W.bfloat16(), ROWS[:12].bfloat16()),
    ),
    "single precision": (fp.value_and_grad(loss_fn), {}, (W.float(), ROWS.float())),
    "gradients of rows": (fp.value_and_grad(loss_fn, argnums=(0, 1)), {}, (W, ROWS)),
    "gradients of rows alone": (fp.grad(loss_fn, argnums=1), {}, (W, ROWS)),
    "rows along dimension 1": (
        fp.grad(lambda w, x: loss_fn(w, x.T), argnums=(0, 1)), {"in_axes": (None, 1)}, (W, ROWS.T),
    ),
    "weights": (
        fp.value_and_grad(loss_fn), {"weight": lambda w, x: float(x.shape[0]) ** 2}, (W, ROWS),
    ),
    "aux": (
        fp.value_and_grad(lambda w, x: (loss_fn(w, x), {"rows": x, "out": x @ w, "w": w}), has_aux=True),
        {}, (W, ROWS),
    ),
    "aux of a differentiated batch": (
        fp.grad(lambda w, x: (loss_fn(w, x), (x, x.mean())), argnums=(0, 1), has_aux=True), {}, (W, ROWS),
    ),
    "an unused leaf": (
        fp.value_and_grad(lambda p, x: loss_fn(p["w"], x)), {}, ({"w": W, "n": W + 1, "k": None}, ROWS),
    ),
    "numbers": (fp.value_and_grad(lambda w, x, s: loss_fn(w, x) * s), {}, (W, ROWS, 3.0)),
    "a named argument": (fp.value_and_grad(lambda w, x: loss_fn(w, x["x"])), {}, (W, {"x": ROWS})),
    "tied leaves": (fp.value_and_grad(lambda p, x: loss_fn(p[0] * p[1], x)), {}, ([W, W], ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 3] if THOROUGH else [3])
@pytest.mark.parametrize("case", CASES)
def test_one_graph_gives_the_bits_of_the_shards(case, count, bundles):
    gradient, options, args = CASES[case]
    plain = fp.pmap(gradient, devices=count, **options)(*args)
    mapped = fp.pmap(gradient, devices=count, compile=True, **options)
    answers = [mapped(*args) for _ in range(3)]
    # One number in half precision is the same by chance too often.
    is_refused = case.startswith("a mean of half precision")
    assert [bundle.state for bundle in bundles] == [State.REFUSED if is_refused else State.RIGHT]
    assert all(same(answer, answers[0]) for answer in answers)
    for got, expected in zip(leaves_of(answers[-1]), leaves_of(plain), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_caller_runs_it_and_no_worker_is_woken(monkeypatch, bundles):
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    first = mapped(W, ROWS)
    monkeypatch.setattr("funcpar._frame.run", lambda *_: pytest.fail("a worker was asked"))
    assert same(mapped(W, ROWS), first)
    w = W * 2
    assert_close(mapped(w, ROWS), fp.value_and_grad(loss_fn)(w, ROWS))


def assert_close(got: Any, expected: Any) -> None:
    for ours, theirs in zip(leaves_of(got), leaves_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_results_are_the_callers_own(bundles):
    mapped = fp.pmap(fp.value_and_grad(lambda w, x: loss_fn(w, x) + w.sum()), devices=2, compile=True)
    expected = fp.value_and_grad(lambda w, x: loss_fn(w, x) + w.sum())(W, ROWS)
    for _ in range(3):
        value, grads = mapped(W, ROWS)
        assert_close((value, grads), expected)
        value += 1
        grads += 1


def test_a_finished_call_is_kept_by_nobody(bundles):
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    for _ in range(3):
        w, x = W.clone(), ROWS.clone()
        gone = [weakref.ref(w), weakref.ref(x), weakref.ref(mapped(w, x)[1])]
        del w, x
        assert all(ref() is None for ref in gone)
    assert [bundle.state for bundle in bundles] == [State.RIGHT]


def test_shards_that_are_not_short_keep_their_workers(monkeypatch, bundles):
    monkeypatch.setattr(_bundle, "SHORT", 0.0)
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    assert same(mapped(W, ROWS), mapped(W, ROWS))
    assert bundles == [] and counters["stats"]["unique_graphs"] == 2  # 7 rows and 6.


def test_large_gradients_keep_their_workers(bundles):
    w = torch.ones(3, 1 << 15, dtype=torch.float64)
    mapped = fp.pmap(fp.grad(loss_fn), devices=2, compile=True)
    assert same(mapped(w, ROWS), mapped(w, ROWS)) and bundles == []


@pytest.mark.parametrize("way", ["train", "draws at once"])
def test_what_draws_runs_in_shards_that_have_streams_of_their_own(way, bundles):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    loss = lambda params, x: functional_call(net, params, (x,)).square().mean()
    params = {name: param.detach() for name, param in net.named_parameters()}
    mapped, plain = (fp.pmap(fp.value_and_grad(loss), devices=2, compile=how) for how in (True, False))
    if way == "train":
        net.eval()
        assert_close(mapped(params, ROWS), fp.value_and_grad(loss)(params, ROWS))
        assert [bundle.state for bundle in bundles] == [State.RIGHT]
    net.train()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        got = mapped(params, ROWS)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        assert_close(got, plain(params, ROWS))
        assert torch.equal(after, torch.get_rng_state())
    assert all(bundle.state is State.REFUSED for bundle in bundles)
    net.eval()
    assert_close(mapped(params, ROWS), fp.value_and_grad(loss)(params, ROWS))


def test_a_change_of_the_module_is_compared_again(bundles):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    loss = lambda params, x: functional_call(net, params, (x,)).square().mean()
    params = {name: param.detach() for name, param in net.named_parameters()}
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    for layer in (nn.Tanh(), nn.Sigmoid(), nn.ReLU()):
        net[1] = layer
        for _ in range(2):
            assert_close(mapped(params, ROWS), fp.value_and_grad(loss)(params, ROWS))
    assert [bundle.state for bundle in bundles] == [State.RIGHT]


def test_other_bits_are_never_returned(monkeypatch, bundles):
    whole = _steps.whole

    def rounding_otherwise(*args: Any) -> Any:
        fun = whole(*args)

        def split_and_merge(args: Any, kwargs: Any, seeds: torch.Tensor) -> Any:
            value, auxes, grads = fun(args, kwargs, seeds)
            return value, auxes, [grad * (1 + 1e-15) for grad in grads]

        return split_and_merge

    monkeypatch.setattr(_steps, "whole", rounding_otherwise)
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    answers = [mapped(W, ROWS) for _ in range(3)]
    assert [bundle.state for bundle in bundles] == [State.REFUSED]
    assert same(answers[0], answers[1]) and same(answers[0], answers[2])


def test_several_calls_are_compared(monkeypatch, bundles):
    monkeypatch.setattr(_bundle, "COMPARED", COMPARED)
    whole = _steps.whole

    def rounding_otherwise(*args: Any) -> Any:
        fun = whole(*args)

        def split_and_merge(args: Any, kwargs: Any, seeds: torch.Tensor) -> Any:
            value, auxes, grads = fun(args, kwargs, seeds)
            return value, auxes, [grads[0] * (1 + 1e-15), *grads[1:]]

        return split_and_merge

    monkeypatch.setattr(_steps, "whole", rounding_otherwise)
    loss = lambda p, x: loss_fn(p["in"] @ p["out"], x)  # The gradient of one is zero where the other is.
    params = {"in": W, "out": torch.zeros(2, 2, dtype=torch.float64)}
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    mapped(params, ROWS)
    params = {"in": W, "out": W[:2]}
    answers = [mapped(params, ROWS) for _ in range(2)]
    assert [bundle.state for bundle in bundles] == [State.REFUSED] and same(*answers)


def test_its_result_is_not_used_before_so_many_calls_agreed(monkeypatch, bundles):
    monkeypatch.setattr(_bundle, "COMPARED", COMPARED)
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    for number in range(1, COMPARED + 1):
        mapped(W * number, ROWS)
        assert [bundle.state for bundle in bundles] == [State.NEW if number < COMPARED else State.RIGHT]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
def test_a_registered_type_may_look_at_what_it_holds(bundles):
    class Weights:
        def __init__(self, w: torch.Tensor) -> None:
            self.w, self.rows = w, w.shape[0]

    pytree.register_pytree_node(Weights, lambda held: ([held.w], None), lambda held, _: Weights(*held))
    loss = lambda weights, x: loss_fn(weights.w, x)
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    for _ in range(2):
        value, grads = mapped(Weights(W), ROWS)
        assert_close((value, grads.w), fp.value_and_grad(loss_fn)(W, ROWS))
    assert [bundle.state for bundle in bundles] == [State.RIGHT]


def test_an_error_names_its_shard(bundles):
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x >= 0).all(), "a row is negative")
        return (x @ w).mean()

    mapped = fp.pmap(fp.grad(loss), devices=2, compile=True)
    assert_close(mapped(W, ROWS.abs()), fp.grad(loss)(W, ROWS.abs()))
    assert [bundle.state for bundle in bundles] == [State.RIGHT]
    rows = ROWS.abs()
    rows[-1] = -1.0
    with pytest.raises(RuntimeError, match="a row is negative") as caught:
        mapped(W, rows)
    assert "raised in shard 1 of 2 on cpu[1]" in "".join(caught.value.__notes__)
    assert_close(mapped(W, ROWS.abs()), fp.grad(loss)(W, ROWS.abs()))


def test_several_callers_get_their_own_numbers(bundles):
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    expected = [fp.value_and_grad(loss_fn)(W * k, ROWS) for k in range(8)]
    errors: list[BaseException] = []

    def caller(k: int) -> None:
        try:
            for _ in range(20):
                assert_close(mapped(W * k, ROWS), expected[k])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(k,), daemon=True) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and errors == []


def test_the_callers_number_of_threads_is_part_of_what_is_compared(bundles):
    mapped = fp.pmap(fp.value_and_grad(loss_fn), devices=2, compile=True)
    before, answers = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            answers.append(mapped(W, ROWS))
    finally:
        torch.set_num_threads(before)
    assert len(bundles) == 2 and same(answers[0], answers[1]) and same(answers[0], answers[2])


@pytest.mark.backend("inductor")
@pytest.mark.usefixtures("bundles")
def test_generated_code_gives_the_bits_of_the_shards(bundles):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    loss = lambda params, x, y: nn.functional.cross_entropy(functional_call(net, params, (x,)), y)
    params = {name: param.detach() for name, param in net.named_parameters()}
    batch = torch.randn(33, 16), torch.randint(10, (33,))
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    assert same(mapped(params, *batch), mapped(params, *batch))
    assert [bundle.state for bundle in bundles] == [State.RIGHT]


@pytest.mark.backend("inductor")
def test_generated_code_adds_up_in_one_order(monkeypatch, bundles):
    # Of several threads, each adds to a row of the table when it comes to it.
    seen: list[Any] = []
    compiled = _graphs.BACKEND

    def noted(graph: Any, inputs: Any) -> Any:
        seen.append((torch._inductor.config.cpp.threads, torch.get_num_threads()))
        return compiled(graph, inputs)

    monkeypatch.setattr(_graphs, "BACKEND", noted)
    table, tokens = torch.linspace(0.1, 1.0, 3200).reshape(50, 64), torch.arange(257) * 7 % 50
    loss = lambda table, tokens: nn.functional.embedding(tokens, table).tanh().square().mean()
    mapped = fp.pmap(fp.value_and_grad(loss), devices=2, compile=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert same(mapped(table, tokens), mapped(table, tokens))
    finally:
        torch.set_num_threads(before)
    assert [bundle.state for bundle in bundles] == [State.RIGHT]
    assert seen[-1] == (fp.devices()[0].threads, 2)
