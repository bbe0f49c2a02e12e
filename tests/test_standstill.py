"""Nothing is compiled while a shard runs, whoever compiles, and nobody waits for ever."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call

import funcpar as fp
from funcpar import _graphs, _isolation, _standstill

LIMIT = 60.0
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"
ROWS = torch.linspace(-1.0, 1.0, 36, dtype=torch.float64).reshape(12, 3)


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(_graphs, "BACKEND", torch._dynamo.lookup_backend("aot_eager"))


class Thread(threading.Thread):
    """A thread whose failure is raised where it is joined."""

    def __init__(self, fun: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.fun, self.error = fun, None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.fun()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.join(LIMIT)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.value


def test_a_compilation_waits_for_running_shards_and_keeps_new_ones_from_starting():
    inside, let_go, compiling, compiled, started = (threading.Event() for _ in range(5))

    def backend(graph, example):
        assert not _standstill.state.running
        compiling.set()
        assert compiled.wait(LIMIT)
        return graph.forward

    def slow(x):
        inside.set()
        assert let_go.wait(LIMIT)
        return x + 1

    fp.pmap(lambda x: x, in_axes=0)(ROWS)  # Workers and dynamo's lock are there.
    shards = Thread(lambda: fp.pmap(slow, in_axes=0, devices=2)(ROWS))
    assert inside.wait(LIMIT)
    user = Thread(lambda: torch.compile(lambda x: x * 2, backend=backend)(ROWS))
    assert not compiling.wait(0.2)  # A shard runs.
    let_go.set()
    assert compiling.wait(LIMIT)
    later = Thread(lambda: fp.pmap(lambda x: started.set() or x, in_axes=0, devices=2)(ROWS))
    assert not started.wait(0.2)  # Something is being compiled.
    compiled.set()
    assert torch.equal(user.result(), ROWS * 2)
    assert torch.equal(shards.result(), ROWS + 1) and torch.equal(later.result(), ROWS)


def test_a_shard_that_waits_in_a_collective_does_not_hold_up_a_compilation():
    waiting, compiled = threading.Event(), threading.Event()

    def fun(x):
        if fp.axis_index() == 1:
            # The other shard is in psum, or about to be; this one compiles, then joins it.
            assert waiting.wait(LIMIT)
            y = torch.compile(lambda x: x * 3, backend="eager")(x)
            compiled.set()
            return fp.psum(y.sum()) * torch.ones(6).double()
        waiting.set()
        return fp.psum(x.sum()) * torch.ones(6).double()

    fp.pmap(lambda x: x, in_axes=0)(ROWS)
    total = fp.pmap(fun, in_axes=0, devices=2)(ROWS)
    assert compiled.is_set()
    assert torch.allclose(total, (ROWS[:6].sum() + 3 * ROWS[6:].sum()) * torch.ones(12).double())


def test_a_compilation_that_cannot_begin_says_why(monkeypatch):
    monkeypatch.setenv("FUNCPAR_TIMEOUT", "0.2")
    inside, let_go = threading.Event(), threading.Event()

    def slow(x):
        inside.set()
        assert let_go.wait(LIMIT)
        return x

    shards = Thread(lambda: fp.pmap(slow, in_axes=0, devices=2)(ROWS))
    assert inside.wait(LIMIT)
    with pytest.raises(fp.CollectiveTimeoutError, match=r"nothing is compiled while shards run.*\nCall"):
        torch.compile(lambda x: x - 1, backend="eager")(ROWS)
    let_go.set()
    assert torch.equal(shards.result(), ROWS)
    assert not _standstill.state.running and not _standstill.state.pending
    assert torch.equal(torch.compile(lambda x: x - 1, backend="eager")(ROWS), ROWS - 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Torch's, of what is between parts.
def test_collectives_between_compiled_parts_are_exact_and_the_parts_compiled_once():
    def fun(w, x):
        y = torch.tanh(x @ w)
        return ((y - fp.pmean(y.mean(0))) ** 2).mean()

    w = torch.linspace(0.5, 1.0, 6, dtype=torch.float64).reshape(3, 2)
    whole = lambda w, x: ((torch.tanh(x @ w) - torch.tanh(x @ w).mean(0)) ** 2).mean()
    compiled = torch.compile(fun, backend="aot_eager")
    expected = fp.value_and_grad(whole)(w, ROWS)
    inside, outside = fp.pmap(fp.value_and_grad(compiled), devices=3), fp.pmap(compiled, devices=3)
    for mapped in (inside, fp.value_and_grad(outside)):
        for _ in range(2):
            for got, want in zip(mapped(w, ROWS), expected, strict=True):
                assert torch.allclose(got, want, rtol=1e-12, atol=1e-15)
    # What is before pmean and what is behind it.
    assert counters["stats"]["unique_graphs"] == 2, {kind: dict(counts) for kind, counts in counters.items()}


def test_shards_keep_off_a_shared_module_while_another_thread_compiles(monkeypatch):
    # Torch tells every thread that it compiles, while one does.
    net = nn.Linear(3, 1).double()
    plainly = []
    monkeypatch.setattr(_isolation, "plain_functional_call", lambda *args, **kwargs: plainly.append(1))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    params = {name: param.detach() * 2 for name, param in net.named_parameters()}
    got = fp.pmap(lambda params, x: functional_call(net, params, (x,)), devices=3)(params, ROWS)
    assert torch.allclose(got, 2 * net(ROWS).detach()) and not plainly


def test_a_failed_compilation_ends_the_standstill_and_is_tried_in_one_shard():
    tries = []

    def backend(graph, example):
        tries.append(1)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fp.pmap(torch.compile(lambda x: x + 1, backend=backend), in_axes=0, devices=4)(ROWS)
    assert len(tries) == 1
    state = _standstill.state
    assert (state.running, state.pending, state.owner) == (set(), 0, None) and not state.turn.locked()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_something_compiles_can_run_shards():
    reader, writer = os.pipe()

    def backend(graph, example):
        child = os.fork()
        if child == 0:
            ok = torch.equal(fp.pmap(lambda x: x + 1, in_axes=0, devices=2)(ROWS), ROWS + 1)
            os.write(writer, b"y" if ok else b"n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        return graph.forward

    fp.pmap(lambda x: x, in_axes=0)(ROWS)
    torch.compile(lambda x: x * 2, backend=backend)(ROWS)
    assert os.read(reader, 1) == b"y"
    os.close(reader), os.close(writer)


def test_many_callers_with_different_signatures_get_right_numbers_and_one_graph_each():
    num_callers, num_rounds = (8, 6) if THOROUGH else (8, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    params = {name: param.detach() for name, param in net.named_parameters()}
    loss = lambda params, x: functional_call(net, params, (x,)).square().mean()
    gradient = fp.value_and_grad(loss)
    ways = [
        fp.pmap(gradient, devices=2, compile=True),
        fp.pmap(fp.value_and_grad(torch.compile(loss, backend="eager")), devices=2),
        fp.pmap(gradient, devices=2),
    ]
    sizes = (2, 4, 6)
    # Outside of shards torch's functional_call is not for several threads.
    expected = {
        (number, rows): fp.tree.leaves(gradient(params, ROWS[:rows] * (number + 1)))
        for number in range(num_callers) for rows in sizes
    }  # fmt: skip

    def caller(number: int) -> None:
        for turn in range(num_rounds):
            rows = sizes[(number + turn) % len(sizes)]
            x = ROWS[:rows] * (number + 1)
            for k in range(3):
                got = fp.tree.leaves(ways[(k + number) % 3](params, x))
                for a, b in zip(got, expected[number, rows], strict=True):
                    assert (a - b).abs().max() <= 1e-12 * b.abs().max()

    for thread in [Thread(lambda n=n: caller(n)) for n in range(num_callers)]:
        thread.result()
    cells = [cell.cell_contents for cell in ways[0].__closure__]
    (mapped,) = (inner for inner in cells if hasattr(inner, "compilation"))
    assert sum(len(kind.graphs) for kind in mapped.compilation._kinds.values()) == len(sizes)
    assert not _standstill.state.running


def test_shards_leave_the_count_of_compiled_frames_alone():
    set_count = torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count
    seen: list[int] = []

    def backend(graph, example):
        def run(*args):
            seen.append(set_count(-1))
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(fp.pmap(compiled, in_axes=0, devices=3)(ROWS), ROWS * 2)
    assert seen == [-1] * 6
    assert torch.equal(compiled(ROWS), ROWS * 2) and seen[-1] >= 0  # Outside of shards it counts.
