"""Measuring: contenders take turns within each round, so that noise hits all alike."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch


class Cost(NamedTuple):
    """What one step took.

    Attributes:
        seconds: Seconds that passed.
        work: Processor seconds of all threads.
        faults: Page faults of the process: pages touched for the first time since it got them.
    """

    seconds: float
    work: float
    faults: float


# Runs that many steps, after one that does not count, and returns what each took.
Run: TypeAlias = Callable[[int], list[Cost]]

MAX_STEPS = 2_000
# A round is quiet if others used no more than this share of the machine.
QUIET = 0.05
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes:
        rounds: Rounds to keep; every contender has one turn in each.
        seconds: About how long a turn lasts.
        most_rounds: Rounds to try when other processes disturb them.
    """

    rounds: int
    seconds: float
    most_rounds: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was measured.

    Attributes:
        loads: For each round the share of the machine that other processes used meanwhile.
        seconds: For each contender one number per round: the median seconds of a step in its turn.
        work: The same of processor seconds, which others on the machine disturb less.
        faults: The same of page faults.
    """

    loads: list[float]
    seconds: dict[str, list[float]]
    work: dict[str, list[float]]
    faults: dict[str, list[float]]


def timed(step: Callable[[], Any], threads: int | None = None) -> Run:
    """Make a run of a step that is over when it returns, with so many intra-op threads."""

    def run(count: int) -> list[Cost]:
        with num_threads(threads) if threads else contextlib.nullcontext():
            step()
            return [_cost(step) for _ in range(count)]

    return run


def _cost(step: Callable[[], Any]) -> Cost:
    faults, work, start = _faults(), time.process_time(), time.perf_counter()
    step()
    return Cost(time.perf_counter() - start, time.process_time() - work, _faults() - faults)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Compute with so many intra-op threads in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def take_turns(runs: Mapping[str, Run], effort: Effort, on_turn: Callable[[str], object]) -> Rounds:
    """Let each contender run once per round, until there are enough quiet rounds, and keep the quietest.

    Who begins a round changes from one to the next: a contender that always followed the same one
    would always find the same caches.
    """
    names = list(runs)
    counts = {}
    for name in names:
        counts[name] = _count(runs[name], effort.seconds)
    found: list[tuple[float, dict[str, Cost]]] = []
    while sum(load <= QUIET for load, _ in found) < effort.rounds and len(found) < effort.most_rounds:
        load = Load()
        first = len(found) % len(names)
        turns = {}
        for name in names[first:] + names[:first]:
            on_turn(name)
            steps = runs[name](counts[name])
            turns[name] = Cost(*(statistics.median(column) for column in zip(*steps, strict=True)))
        found.append((load.of_others(), turns))
    kept = sorted(found, key=lambda each: each[0])[: effort.rounds]
    return Rounds(
        [load for load, _ in kept],
        {name: [turns[name].seconds for _, turns in kept] for name in names},
        {name: [turns[name].work for _, turns in kept] for name in names},
        {name: [turns[name].faults for _, turns in kept] for name in names},
    )


def _count(run: Run, seconds: float) -> int:
    """Return how many steps take about so long."""
    one = run(1)[0].seconds
    if one < seconds:  # First calls start threads and fill caches, so this one may tell too much.
        one = run(1)[0].seconds
    return min(MAX_STEPS, max(1, int(seconds / one)))


class Load:
    """How much of the machine other processes use, from now on."""

    def __init__(self) -> None:
        self._before = _jiffies()

    def of_others(self) -> float:
        """Return the share of all cores, 0 to 1, that went to others; 0 where the system does not tell."""
        busy, ours, total = (after - before for after, before in zip(_jiffies(), self._before, strict=True))
        return max(0.0, busy - ours) / total if total > 0 else 0.0


def _jiffies() -> tuple[int, int, int]:
    """Return for how long cores were busy, for how long with this process and its children, and all time."""
    if not _STAT.exists():
        return 0, 0, 0
    user, nice, system, idle, wait, irq, soft_irq, stolen = map(int, _STAT.read_text().split()[1:9])
    busy = user + nice + system + irq + soft_irq + stolen
    ours = 0
    for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ours += int(after_name[11]) + int(after_name[12])
    return busy, ours, busy + idle + wait


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of one contender's time over another's.

    Both had their turns close together, so what slowed a whole round down cancels out.
    """
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, method="inclusive")
    return first, third
