"""Measuring: contenders take turns within each round, so that noise hits all alike."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

# Runs that many steps, after one that does not count, and returns for each the seconds that passed
# and the processor seconds of all threads.
Run: TypeAlias = Callable[[int], list[tuple[float, float]]]

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
    """

    loads: list[float]
    seconds: dict[str, list[float]]
    work: dict[str, list[float]]


def timed(step: Callable[[], Any]) -> Run:
    """Make a run of a step that is over when it returns."""

    def run(count: int) -> list[tuple[float, float]]:
        step()
        found = []
        for _ in range(count):
            work, start = time.process_time(), time.perf_counter()
            step()
            found.append((time.perf_counter() - start, time.process_time() - work))
        return found

    return run


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
        runs[name](1)  # First calls start threads and fill caches.
        counts[name] = min(MAX_STEPS, max(1, int(effort.seconds / runs[name](1)[0][0])))
    found: list[tuple[float, dict[str, tuple[float, float]]]] = []
    while sum(load <= QUIET for load, _ in found) < effort.rounds and len(found) < effort.most_rounds:
        load = Load()
        first = len(found) % len(names)
        turns = {}
        for name in names[first:] + names[:first]:
            on_turn(name)
            seconds, work = zip(*runs[name](counts[name]), strict=True)
            turns[name] = statistics.median(seconds), statistics.median(work)
        found.append((load.of_others(), turns))
    kept = sorted(found, key=lambda each: each[0])[: effort.rounds]
    return Rounds(
        [load for load, _ in kept],
        {name: [turns[name][0] for _, turns in kept] for name in names},
        {name: [turns[name][1] for _, turns in kept] for name in names},
    )


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
