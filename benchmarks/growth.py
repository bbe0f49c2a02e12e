"""Growth: how the time of a call grows with rows, parameters, leaves, devices and depth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import funcpar as fp
from benchmarks.calls import gradient, nothing
from benchmarks.measure import Effort, Run, quartiles, ratio, take_turns, timed
from benchmarks.models import MODELS, NUM_CLASSES, loss_of

LEAVES = 10
ROWS = 8
WIDTH = 32
MOST_DEVICES = 8

NOTHING = "pmap(nothing)"
PMAP = "pmap(value_and_grad(f))"
PLAIN = "value_and_grad(f)"
Runs: TypeAlias = dict[str, Run]


@dataclass(frozen=True, slots=True)
class Question:
    """What grows, and what is called.

    Attributes:
        name: Short name, for ``--only``.
        title: What tables and plots call it.
        unit: What grows.
        sizes: How far it grows.
        make: Makes the runs of one size on that many devices.
    """

    name: str
    title: str
    unit: str
    sizes: tuple[int, ...]
    make: Callable[[int, int], Runs]

    def quick_sizes(self) -> tuple[int, ...]:
        """Return few of the sizes, without the largest."""
        return self.sizes[:-1:2]


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one size.

    Attributes:
        size: How many of what grows.
        us: For each line the median of its microseconds over the rounds.
        quartiles_us: For each line the first and the third quartile of them.
        over_plain: The pmapped call over the plain one, where both are measured: the median of ratios.
    """

    size: int
    us: dict[str, float]
    quartiles_us: dict[str, tuple[float, float]]
    over_plain: float | None


def measure_growth(
    question: Question, sizes: tuple[int, ...], devices: int, effort: Effort, on_turn: Callable[[str], object]
) -> tuple[list[dict[str, Any]], float]:
    """Return one point per size, and the load by others."""
    points, loads = [], []
    for size in sizes:
        rounds = take_turns(question.make(size, devices), effort, on_turn)
        loads += rounds.loads
        found = rounds.seconds
        us = {name: [1e6 * each for each in times] for name, times in found.items()}
        over = ratio(found[PMAP], found[PLAIN]) if PMAP in found and PLAIN in found else None
        medians = {name: statistics.median(times) for name, times in us.items()}
        points.append(
            asdict(Point(size, medians, {name: quartiles(times) for name, times in us.items()}, over))
        )
    return points, statistics.median(loads)


def _rows(size: int, devices: int) -> Runs:
    fp.set_cpu_devices(devices, threads_per_device=1)
    model = MODELS["mlp"]
    step = _module_gradient(model.module(), *model.batch(size), devices)
    return _nothing(LEAVES, size, devices) | step


def _parameters(size: int, devices: int) -> Runs:
    fp.set_cpu_devices(devices, threads_per_device=1)
    params = [torch.ones(size // LEAVES) for _ in range(LEAVES)]
    return _gradient(_sum_of_squares, params, (torch.ones(ROWS, 1),), devices, 1)


def _leaves(size: int, devices: int) -> Runs:
    fp.set_cpu_devices(devices, threads_per_device=1)
    params = [torch.ones(()) for _ in range(size)]
    step = _gradient(gradient, params, (torch.ones(ROWS, 1),), devices, 1)
    return _nothing(size, ROWS, devices) | step


def _devices(size: int, devices: int) -> Runs:
    fp.set_cpu_devices(MOST_DEVICES, threads_per_device=1)
    params = [torch.ones(()) for _ in range(LEAVES)]
    step = _gradient(gradient, params, (torch.ones(ROWS, 1),), size, 1)
    return _nothing(LEAVES, ROWS, size) | step


def _depth(size: int, devices: int) -> Runs:
    fp.set_cpu_devices(devices, threads_per_device=1)
    layers = [layer for _ in range(size) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    module = nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))
    return _module_gradient(module, torch.ones(64, WIDTH), torch.zeros(64, dtype=torch.int64), devices)


def _nothing(leaves: int, rows: int, devices: int) -> Runs:
    params, batch = [torch.ones(()) for _ in range(leaves)], torch.ones(rows, 1)
    call = fp.pmap(nothing, devices=devices)
    return {NOTHING: timed(lambda: call(params, batch))}


def _module_gradient(module: nn.Module, inputs: Tensor, labels: Tensor, devices: int) -> Runs:
    apply, params = fp.functionalize(module)

    def loss_fn(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return loss_of(apply(params, inputs), labels)

    return _gradient(fp.value_and_grad(loss_fn), params, (inputs, labels), devices, devices)


def _gradient(
    fun: Callable[..., Any], params: Any, batch: tuple[Tensor, ...], devices: int, threads: int
) -> Runs:
    """Make runs of a gradient function, plain with so many threads, and pmapped."""
    call = fp.pmap(fun, devices=devices)
    return {
        PLAIN: timed(lambda: fun(params, *batch), threads=threads),
        PMAP: timed(lambda: call(params, *batch)),
    }


@fp.value_and_grad
def _sum_of_squares(params: list[Tensor], batch: Tensor) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in params]).sum() * batch.mean()


QUESTIONS = {
    each.name: each
    for each in (
        Question(
            "rows", "rows of the batch of the small MLP", "rows", tuple(2**k for k in range(3, 16, 2)), _rows
        ),
        Question(
            "parameters",
            f"parameters in {LEAVES} leaves, a function whose arithmetic is one pass over them",
            "parameters",
            (10**4, 10**5, 10**6, 10**7, 10**8),
            _parameters,
        ),
        Question("leaves", "leaves of the parameters", "leaves", (10, 30, 100, 300, 1000, 3000), _leaves),
        Question(
            "devices",
            "virtual devices, more than cores too: overhead alone",
            "devices",
            (1, 2, 3, 4, 6, 8),
            _devices,
        ),
        Question("depth", f"layers of width {WIDTH}, 64 rows", "layers", (1, 4, 16, 64, 256), _depth),
    )
}
