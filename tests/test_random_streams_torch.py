"""What torch itself does with random numbers follows the stream of the shard."""

import os
import pickle
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from random_streams import (
    LIMIT,
    ROWS,
    after_one_draw,
    in_threads,
    installed,  # noqa: F401 (a fixture)
    on_shards,
    state,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from funcpar import _random
from funcpar._random import Streams, use


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_with_the_same_mask(use_reentrant: bool) -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    streams = Streams()

    def body(x: torch.Tensor) -> torch.Tensor:
        mask = functional.dropout(torch.ones(50))
        seen.setdefault(threading.get_ident(), []).append(mask)
        return (x * mask).sin()

    def forward(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        with use(streams[rank]):
            x = torch.full((50,), 0.3, requires_grad=True)
            return x, checkpoint(body, x, use_reentrant=use_reentrant)

    def shard(rank: int) -> None:
        x, out = forward(rank)
        with use(streams[rank]), torch.autograd.set_multithreading_enabled(False):
            torch.rand(7)
            ahead = torch.get_rng_state()
            out.sum().backward()
            assert torch.equal(torch.get_rng_state(), ahead)
        first, second = seen[threading.get_ident()]
        assert torch.equal(first, second)
        assert x.grad is not None
        assert torch.allclose(x.grad, (0.3 * first).cos() * first)

    expected = after_one_draw()
    in_threads([lambda rank=rank: shard(rank) for rank in range(3)])
    assert torch.equal(state(), expected)


def test_rng_state_functions_act_on_the_stream() -> None:
    def body() -> None:
        saved = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(saved)
        assert torch.equal(torch.rand(3), first)
        with torch.random.fork_rng(devices=[]):
            torch.rand(9)
        following = torch.rand(3)
        torch.set_rng_state(saved)
        torch.rand(3)
        assert torch.equal(torch.rand(3), following)
        torch.manual_seed(11)
        assert torch.initial_seed() == 11
        torch.random.default_generator.clone_state()
        torch.seed()

    expected = after_one_draw()
    on_shards(body)
    assert torch.equal(state(), expected)


def test_manual_seed_inside_gives_torchs_numbers() -> None:
    def body() -> torch.Tensor:
        torch.manual_seed(4)
        return torch.rand(3)

    results = on_shards(body)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(3), results[0])
    assert torch.equal(results[0], results[1])


def test_default_generator_pickles_as_a_plain_one() -> None:
    copy = pickle.loads(pickle.dumps(torch.random.default_generator))
    assert type(copy) is torch.Generator
    assert torch.equal(copy.get_state(), state())


def test_dropout_gradient_is_zero_where_the_mask_is() -> None:
    def body() -> None:
        x = torch.ones(200, dtype=torch.float64, requires_grad=True)
        out = functional.dropout(x, 0.4)
        out.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, out.detach())
        assert set(out.tolist()) <= {0.0, 1 / 0.6}

    on_shards(body)


def test_native_dropout_keeps_its_rate_and_types() -> None:
    def body() -> None:
        out, mask = torch.native_dropout(torch.ones(100_000), 0.3, True)
        assert mask.dtype == torch.bool
        assert torch.equal(out, mask / 0.7)
        assert abs(float(out.mean()) - 1) < 0.01

    on_shards(body)


def test_moments_and_correlation_of_streams_are_sane() -> None:
    numbers = torch.stack(on_shards(lambda: torch.randn(100_000), size=4))
    assert torch.allclose(torch.corrcoef(numbers), torch.eye(4), atol=0.015)
    assert torch.allclose(numbers.std(1), torch.ones(4), atol=0.01)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_draws_from_the_stream(randomness: str) -> None:
    mapped = torch.func.vmap(lambda x: functional.dropout(x) + torch.randn(20), randomness=randomness)
    expected_state = after_one_draw()
    expected = on_shards(lambda: mapped(torch.ones(3, 20)))
    assert torch.equal(state(), expected_state)
    assert torch.equal(expected[0][0], expected[0][1]) == (randomness == "same")
    torch.manual_seed(20)
    assert torch.equal(on_shards(lambda: mapped(torch.ones(3, 20)))[1], expected[1])


# Forward mode loads torch's scripted decompositions, which torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_func_grad_and_jvp_draw_from_the_stream() -> None:
    def body() -> torch.Tensor:
        return torch.func.grad(lambda x: functional.dropout(x).sum())(torch.ones(50))

    expected = on_shards(body)
    assert set(expected[0].tolist()) == {0.0, 2.0}
    torch.manual_seed(20)
    assert torch.equal(on_shards(body)[1], expected[1])
    out, tangent = torch.func.jvp(functional.dropout, (torch.ones(50),), (torch.ones(50),))
    assert torch.equal(out, tangent)


def test_autocast_and_inference_mode_draw_from_the_stream() -> None:
    def body() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return functional.dropout(ROWS @ ROWS.T, 0.5).float() + torch.rand(4, 4)

    expected_state = after_one_draw()
    expected = on_shards(body)
    assert torch.equal(state(), expected_state)
    torch.manual_seed(20)
    assert torch.equal(on_shards(body)[0], expected[0])


def test_fake_tensors_and_meta_draw_nothing() -> None:
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")

    def body() -> None:
        with fake_tensor.FakeTensorMode():
            functional.dropout(torch.rand(3))
            torch.randperm(3)
            torch.multinomial(torch.ones(3), 2)
        meta = torch.empty(3, device="meta")
        meta.normal_()
        torch.poisson(meta)

    before = state()
    body()
    on_shards(body)
    assert torch.equal(state(), before)


def test_tracing_sees_the_users_ops_only() -> None:
    stream = Streams()[0]
    with use(stream):
        graph = make_fx(lambda x: functional.dropout(x) + torch.rand_like(x))(torch.ones(5))
    assert "generator" not in graph.code
    torch.manual_seed(1)
    expected = graph(torch.ones(5))
    torch.manual_seed(1)
    assert torch.equal(graph(torch.ones(5)), expected)


def test_dispatch_mode_sees_the_users_ops_and_the_stream_is_used() -> None:
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, kwargs or {}))
            return func(*args, **(kwargs or {}))

    expected = after_one_draw()
    with use(Streams()[0]), Record():
        torch.empty(3).uniform_()
    assert torch.equal(state(), expected)
    assert all("generator" not in kwargs for _, kwargs in seen)


def test_torch_function_mode_sees_an_op_once() -> None:
    seen = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with use(Streams()[0]), Record():
        x.uniform_()
    assert len(seen) == 1


# Dynamo imports code that warns on its own account.
@pytest.mark.filterwarnings("ignore")
def test_compiled_function_draws_from_the_stream() -> None:
    compiled = torch.compile(lambda x: functional.dropout(x) + torch.rand_like(x), backend="aot_eager")
    compiled(torch.ones(20))
    expected_state = after_one_draw()
    expected = on_shards(lambda: compiled(torch.ones(20)))
    assert torch.equal(state(), expected_state)
    torch.manual_seed(20)
    first = on_shards(lambda: compiled(torch.ones(20)))
    torch.manual_seed(20)
    second = on_shards(lambda: compiled(torch.ones(20)))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(expected[0], expected[1])


def test_install_again_and_at_once_is_harmless() -> None:
    library = _random._library
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_threads([_random.install] * 4)
    assert _random._library is library


def test_kernels_run_without_the_gil() -> None:
    ticks = 0
    done = threading.Event()

    def draw() -> None:
        torch.empty(6_000_000).normal_()
        done.set()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
        assert ticks < 60_000
    thread.join(LIMIT)
    assert ticks >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_fork_while_another_thread_holds_the_lock() -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with _random._lock:
            held.set()
            free.wait(LIMIT)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(LIMIT)
    child = os.fork()
    if child == 0:
        with use(Streams()[0]):
            torch.rand(3)
        os._exit(0)
    free.set()
    thread.join(LIMIT)
    deadline = time.monotonic() + LIMIT
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
