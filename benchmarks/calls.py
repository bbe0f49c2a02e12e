"""Calls: what pmap itself costs, seen with functions that do next to nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import funcpar as fp
from benchmarks.measure import Effort, Rounds, Run, ratio, take_turns, timed

LEAVES = (10, 300)
DEVICES = (1, 2, 4)
ROWS = 8
POOL = "thread pool"


def nothing(params: list[Tensor], batch: Tensor) -> None:
    """Return nothing."""


def constant(params: list[Tensor], batch: Tensor) -> float:
    """Return a number, which must be equal on all shards."""
    return 1.0


@fp.value_and_grad
def gradient(params: list[Tensor], batch: Tensor) -> Tensor:
    """Return a value in which every leaf has a part, by an op of its own as in a model."""
    return torch.stack([leaf * leaf for leaf in params]).sum()


FUNCTIONS: dict[str, Callable[..., Any]] = {"nothing": nothing, "constant": constant, "gradient": gradient}


def measure_calls(effort: Effort, on_turn: Callable[[str], object]) -> tuple[list[dict[str, Any]], float]:
    """Return one record per function, number of leaves and number of devices, and the load by others."""
    fp.set_cpu_devices(max(DEVICES), threads_per_device=1)
    with ThreadPoolExecutor(max(DEVICES)) as pool:
        runs = _runs() | {f"{POOL} {devices}": _pool_run(pool, devices) for devices in DEVICES}
        rounds = take_turns(runs, effort, on_turn)
    return _records(rounds), statistics.median(rounds.loads)


def _runs() -> dict[str, Run]:
    return {
        f"{name} {leaves} {devices}": _run(fun, leaves, devices)
        for name, fun in FUNCTIONS.items()
        for leaves in LEAVES
        for devices in (0, *DEVICES)
    }


def _records(rounds: Rounds) -> list[dict[str, Any]]:
    found = {key: 1e6 * statistics.median(times) for key, times in rounds.seconds.items()}
    records = []
    for name in FUNCTIONS:
        for devices in DEVICES:
            plain = {leaves: found[f"{name} {leaves} 0"] for leaves in LEAVES}
            keys = {leaves: f"{name} {leaves} {devices}" for leaves in LEAVES}
            mapped = {leaves: found[keys[leaves]] for leaves in LEAVES}
            few, many = LEAVES
            own = {leaves: mapped[leaves] - plain[leaves] for leaves in LEAVES}
            records += [
                {
                    "function": name,
                    "leaves": leaves,
                    "devices": devices,
                    "plain_us": plain[leaves],
                    "pmap_us": mapped[leaves],
                    "own_us": own[leaves],
                    "own_us_per_further_leaf": (own[many] - own[few]) / (many - few),
                    "over_plain": ratio(rounds.seconds[keys[leaves]], rounds.seconds[f"{name} {leaves} 0"]),
                    "over_pool": ratio(rounds.seconds[keys[leaves]], rounds.seconds[f"{POOL} {devices}"]),
                }
                for leaves in LEAVES
            ]
    return records


def num_turns(effort: Effort) -> int:
    """Return how many turns ``measure_calls`` takes at most."""
    return effort.most_rounds * (len(FUNCTIONS) * len(LEAVES) * (1 + len(DEVICES)) + len(DEVICES))


def _pool_run(pool: ThreadPoolExecutor, devices: int) -> Run:
    """Make a run of what Python's own pool needs to hand out that many empty jobs and wait for them."""
    return timed(lambda: list(pool.map(lambda rank: None, range(devices))))


def _run(fun: Callable[..., Any], leaves: int, devices: int) -> Run:
    """Make a run of calls; no devices means the plain function."""
    params = [torch.ones(()) for _ in range(leaves)]
    batch = torch.ones(ROWS, 1)
    call = fp.pmap(fun, devices=devices) if devices else fun
    return timed(lambda: call(params, batch))
