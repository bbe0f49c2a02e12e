"""Each shard draws from a stream of its own: repeatable, independent, lazily seeded, followed by torch."""

import itertools
import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from funcpar import _random
from funcpar._random import Streams, current, enter, leave, use

LIMIT = 60.0
ROWS = torch.linspace(0.1, 0.9, 24).reshape(4, 6)
COUNTS = torch.full((4, 6), 9.0)


def attend() -> torch.Tensor:
    query = ROWS.reshape(1, 2, 3, 4)
    return functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def attend_many() -> torch.Tensor:
    return nn.MultiheadAttention(6, 2, dropout=0.5)(ROWS, ROWS, ROWS)[0].detach()


def recurrent(kind: type[nn.RNNBase]) -> torch.Tensor:
    return kind(6, 5, num_layers=2, dropout=0.5)(ROWS[None])[0].detach()


FAMILIES: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(8),
    "rand_like": lambda: torch.rand_like(ROWS),
    "randn": lambda: torch.randn(20),
    "randint": lambda: torch.randint(0, 1 << 30, (8,)),
    "randint_like": lambda: torch.randint_like(ROWS, 1 << 20),
    "randperm": lambda: torch.randperm(40),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "normal_": lambda: torch.empty(8).normal_(),
    "normal floats": lambda: torch.normal(0.0, 1.0, (8,)),
    "normal mean": lambda: torch.normal(ROWS, 1.0),
    "normal std": lambda: torch.normal(0.0, ROWS),
    "normal both": lambda: torch.normal(ROWS, ROWS),
    "normal out": lambda: torch.normal(ROWS, ROWS, out=torch.empty(4, 6)),
    "random_": lambda: torch.empty(8, dtype=torch.int64).random_(),
    "random_ to": lambda: torch.empty(8).random_(1 << 20),
    "random_ from": lambda: torch.empty(8).random_(5, 1 << 20),
    "cauchy_": lambda: torch.empty(8).cauchy_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "geometric_": lambda: torch.empty(40).geometric_(0.1),
    "log_normal_": lambda: torch.empty(8).log_normal_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((80,), 0.5)),
    "bernoulli p": lambda: torch.bernoulli(torch.empty(80), 0.5),
    "bernoulli_ tensor": lambda: torch.empty(80).bernoulli_(torch.full((80,), 0.5)),
    "bernoulli out": lambda: torch.bernoulli(torch.full((80,), 0.5), out=torch.empty(80)),
    "multinomial": lambda: torch.multinomial(torch.ones(4, 50), 9),
    "multinomial replacement": lambda: torch.multinomial(torch.ones(4, 50), 9, replacement=True),
    "poisson": lambda: torch.poisson(100 * torch.ones(20)),
    "binomial": lambda: torch.binomial(100 * torch.ones(20), torch.full((20,), 0.5)),
    "gamma": lambda: torch._standard_gamma(COUNTS),
    "dirichlet": lambda: torch._sample_dirichlet(COUNTS),
    "rrelu": lambda: functional.rrelu(-COUNTS, training=True),
    "rrelu_": lambda: functional.rrelu(-COUNTS, training=True, inplace=True),
    "dropout": lambda: functional.dropout(torch.ones(80)),
    "dropout_": lambda: functional.dropout(torch.ones(80), inplace=True),
    "dropout2d": lambda: functional.dropout2d(torch.ones(4, 20, 1, 1)),
    "alpha_dropout": lambda: functional.alpha_dropout(torch.ones(80), training=True),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(torch.ones(4, 20, 2), training=True),
    "native_dropout": lambda: torch.native_dropout(torch.ones(80), 0.5, True)[0],
    "attention": attend,
    "multihead attention": attend_many,
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "gumbel_softmax": lambda: functional.gumbel_softmax(ROWS),
    "fractional_max_pool": lambda: functional.fractional_max_pool2d(
        torch.arange(900.0).reshape(1, 1, 30, 30), 2, output_size=11
    ),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "distribution": lambda: torch.distributions.Beta(ROWS, ROWS).sample(),
    "int seed": lambda: torch.tensor([float(torch.initial_seed() % 9973), float(torch.rand(()))]),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    _random.install()
    torch.manual_seed(20)


def in_threads(funs: list[Callable[[], Any]]) -> list[Any]:
    """Run all at the same time, one thread each, and return the results in order."""
    results: list[Any] = [None] * len(funs)
    start = threading.Barrier(len(funs))

    def work(rank: int) -> None:
        try:
            start.wait(LIMIT)
            results[rank] = funs[rank]()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(funs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def on_shards(fun: Callable[[], Any], size: int = 2) -> list[Any]:
    """Run `fun` on `size` shards, as a call of funcpar does."""
    streams = Streams()

    def shard(rank: int) -> Any:
        with use(streams[rank]):
            return fun()

    return in_threads([lambda rank=rank: shard(rank) for rank in range(size)])


def state() -> torch.Tensor:
    return torch.default_generator.get_state()


def after_one_draw() -> torch.Tensor:
    """The default generator's state, had one int64 been drawn from it."""
    copy = torch.default_generator.clone_state()
    torch.empty((), dtype=torch.int64).random_(generator=copy)
    return copy.get_state()


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_repeat_whatever_the_timing(family: str) -> None:
    jitter = random.Random(0)

    def fun() -> torch.Tensor:
        drawn = []
        for _ in range(3):
            if jitter.random() < 0.3:
                time.sleep(jitter.random() * 3e-4)
            drawn.append(FAMILIES[family]().flatten().double())
        return torch.cat(drawn)

    expected = None
    for _ in range(50):
        torch.manual_seed(5)
        once = after_one_draw()
        results = on_shards(fun)
        assert torch.equal(state(), once)
        if expected is None:
            expected = results
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert not torch.equal(expected[0], expected[1])


def test_every_random_cpu_op_of_torch_is_routed() -> None:
    names = {op.name() for op in _random.random_ops()}
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags:
                tagged.add(name)
    composed = {
        "aten::native_dropout",
        "aten::_fused_sdp_choice",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
    assert tagged - names == composed
    assert {"aten::random_", "aten::binomial", "aten::_sample_dirichlet"} <= names


def test_flash_attention_has_no_dropout_on_cpu() -> None:
    query = ROWS.reshape(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="do not support dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, 0.5)


def test_all_pairs_of_shards_differ() -> None:
    masks = on_shards(lambda: functional.dropout(torch.ones(200)), size=8)
    for one, other in itertools.combinations(masks, 2):
        assert not torch.equal(one, other)


def test_seeds_of_a_call_never_collide() -> None:
    for base in (0, 1, (1 << 63) - 1, 123456789012345678):
        assert len({_random._mix(base, rank) for rank in range(20000)}) == 20000


def test_successive_calls_differ_and_a_seed_restores_both() -> None:
    first, second = on_shards(lambda: torch.rand(4)), on_shards(lambda: torch.rand(4))
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(20)
    assert torch.equal(on_shards(lambda: torch.rand(4))[1], first[1])
    assert torch.equal(on_shards(lambda: torch.rand(4))[0], second[0])


def test_nothing_drawn_leaves_the_default_generator_alone() -> None:
    before = state()
    on_shards(lambda: functional.dropout(ROWS, training=False) + ROWS.sum())
    assert torch.equal(state(), before)


def test_something_drawn_takes_one_number() -> None:
    expected = after_one_draw()
    on_shards(lambda: [torch.rand(100) for _ in range(5)], size=4)
    assert torch.equal(state(), expected)


def test_outside_a_shard_numbers_are_torchs_own() -> None:
    generator = torch.Generator().manual_seed(20)
    assert torch.equal(torch.rand(5), torch.rand(5, generator=generator))
    assert torch.equal(torch.randperm(5), torch.randperm(5, generator=generator))
    assert torch.equal(state(), generator.get_state())


def test_explicit_generator_is_respected() -> None:
    before = state()
    results = on_shards(lambda: torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(results[0], results[1])
    gamma = on_shards(lambda: torch._standard_gamma(COUNTS, torch.Generator().manual_seed(7)))
    assert torch.equal(gamma[0], torch._standard_gamma(COUNTS, torch.Generator().manual_seed(7)))
    assert torch.equal(state(), before)


@pytest.mark.parametrize("name", ["torch", "torch.random"])
def test_default_generator_given_by_name_means_the_shards_stream(name: str) -> None:
    given = torch.default_generator if name == "torch" else torch.random.default_generator
    assert isinstance(given, torch.Generator)
    expected = on_shards(lambda: (torch.rand(3), torch._standard_gamma(COUNTS)))
    torch.manual_seed(20)
    results = on_shards(lambda: (torch.rand(3, generator=given), torch._standard_gamma(COUNTS, given)))
    assert torch.equal(results[1][0], expected[1][0])
    assert torch.equal(results[1][1], expected[1][1])
    torch.manual_seed(3)
    outside = torch.rand(3, generator=given)
    torch.manual_seed(3)
    assert torch.equal(outside, torch.rand(3))


def test_nested_streams_descend_from_the_shards_stream() -> None:
    def outer() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        before = torch.rand(3)
        inner = on_shards(lambda: torch.rand(3))
        return before, torch.rand(3), inner

    expected_state = after_one_draw()
    expected = on_shards(outer)
    assert torch.equal(state(), expected_state)
    for _ in range(20):
        torch.manual_seed(20)
        for one, other in zip(on_shards(outer), expected, strict=True):
            assert torch.equal(one[1], other[1])
            assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    everything = [tuple(x.tolist()) for before, after, inner in expected for x in (before, after, *inner)]
    assert len(set(everything)) == 8


def test_nested_call_that_draws_nothing_leaves_the_shards_stream_alone() -> None:
    stream = Streams()[0]
    with use(stream):
        before = torch.get_rng_state()
        on_shards(lambda: ROWS + 1)
        assert torch.equal(torch.get_rng_state(), before)


def test_stream_goes_on_in_another_thread() -> None:
    def draw(stream: _random.Stream) -> torch.Tensor:
        with use(stream):
            return torch.rand(3)

    whole = Streams()[0]
    with use(whole):
        expected = torch.rand(3), torch.rand(3)
    again = whole.replay()
    assert torch.equal(in_threads([lambda: draw(again)])[0], expected[0])
    assert torch.equal(in_threads([lambda: draw(again)])[0], expected[1])


def test_replay_of_an_unused_stream_shares_the_one_draw() -> None:
    expected = after_one_draw()
    stream = Streams()[3]
    with use(stream.replay()):
        first = torch.rand(3)
    with use(stream):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(state(), expected)


def test_same_rank_is_the_same_stream() -> None:
    streams = Streams()
    assert streams[2] is streams[2]
    assert streams[2] is not streams[1]


def test_enter_and_leave_restore_after_an_error() -> None:
    streams = Streams()
    previous = enter(streams[0])
    with pytest.raises(KeyError), use(streams[1]):
        assert current() is streams[1]
        raise KeyError
    assert current() is streams[0]
    with use(None):
        assert current() is None
    leave(previous)
    assert current() is None


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
