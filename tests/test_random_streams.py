"""Each shard draws from a stream of its own: repeatable, independent, lazily seeded, followed by torch."""

import itertools
import random
import time

import pytest
import torch
from random_streams import (
    COUNTS,
    FAMILIES,
    ROWS,
    after_one_draw,
    in_threads,
    installed,  # noqa: F401 (a fixture)
    on_shards,
    state,
)
from torch.nn import functional

from funcpar import _random
from funcpar._ops import dropouts
from funcpar._random import Streams, current, enter, leave, use


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
    for _ in range(20):
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


def test_ops_that_take_no_generator_on_accelerators_are_known() -> None:
    # What has a kernel for tensors without memory has one on some accelerator too.
    assert {op.name().removeprefix("aten::") for op in dropouts("Meta")} == {
        "native_dropout",
        "native_dropout.out",
        "_cudnn_rnn",
        "_efficient_attention_forward",
        "_flash_attention_forward",
        "_flash_attention_forward.quantized",
        "_flash_attention_forward_no_dropout_inplace",
        "_scaled_dot_product_attention_math_for_mps",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention.quantized",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    }


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
        seeds = [_random._mix(base, rank) for rank in range(20000)]
        there = [_random._mix_on(seed, index) for seed in seeds for index in range(3)]
        assert len(set(seeds)) == 20000
        assert len(set(there)) == 60000
        assert len({seed & 0xFFFFFFFF for seed in there[::3]}) == 20000
        assert 0 <= min(there) <= max(there) < 1 << 63


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
