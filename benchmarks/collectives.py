"""Collectives: what a sum over shards costs beside the call, and beside an addition."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import funcpar as fp
from benchmarks.measure import Effort, ratio, take_turns, timed

DEVICES = 2
SMALL_LEAVES = 10
SMALL_ENTRIES = 100
LARGE_BYTES = 64 << 20
NUM_CONTENDERS = 5


def nothing(x: Any) -> None:
    """Return nothing."""


def add_up(x: Any) -> None:
    """Sum over shards, and return nothing, so that merging does not count."""
    fp.psum(x)


def measure_collectives(effort: Effort, on_turn: Callable[[str], object]) -> tuple[dict[str, Any], float]:
    """Return figures of a psum of small leaves and of a psum of a large one, and the load by others.

    The large psum sums one leaf of ``LARGE_BYTES`` per shard. ``torch.add`` of two such tensors reads
    and writes the same bytes, with as many threads; with ``out=`` it writes into memory that is there.
    """
    fp.set_cpu_devices(DEVICES, threads_per_device=1)
    small = [torch.ones(DEVICES, SMALL_ENTRIES) for _ in range(SMALL_LEAVES)]
    large = torch.ones(DEVICES, LARGE_BYTES // 4)
    one, other, out = large[0], large[1], torch.empty(LARGE_BYTES // 4)

    def add_into() -> Tensor:
        return torch.add(one, other, out=out)

    def add_anew() -> Tensor:
        return one + other

    runs = {
        "call": timed(_mapped(nothing, small)),
        "small psum": timed(_mapped(add_up, small)),
        "large psum": timed(_mapped(add_up, large)),
        "add with out=": timed(add_into, threads=DEVICES),
        "add": timed(add_anew, threads=DEVICES),
    }
    rounds = take_turns(runs, effort, on_turn)
    found = rounds.seconds
    own = [psum - call for psum, call in zip(found["small psum"], found["call"], strict=True)]
    record = {
        "devices": DEVICES,
        "small_leaves": SMALL_LEAVES,
        "small_call_us": 1e6 * statistics.median(found["call"]),
        "small_own_us": 1e6 * statistics.median(own),
        "small_own_over_call": ratio(own, found["call"]),
        "large_bytes": LARGE_BYTES,
        "large_ms": 1e3 * statistics.median(found["large psum"]),
        "large_over_add_with_out": ratio(found["large psum"], found["add with out="]),
        "large_over_add": ratio(found["large psum"], found["add"]),
    }
    return record, statistics.median(rounds.loads)


def num_turns(effort: Effort) -> int:
    """Return how many turns ``measure_collectives`` takes at most."""
    return effort.most_rounds * NUM_CONTENDERS


def _mapped(fun: Callable[[Any], None], x: Any) -> Callable[[], Any]:
    call = fp.pmap(fun, in_axes=0, devices=DEVICES)
    return lambda: call(x)
