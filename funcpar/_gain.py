"""The gain of pmap over plain autograd, and what it has to pay for: a hand-over to workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpar import _workers, tree
from funcpar._devices import devices
from funcpar._functional import functionalize
from funcpar._grad import value_and_grad
from funcpar._pmap import pmap

NUM_CLASSES = 10
LEAVES = 10
LEAST_ROUNDS = 3
TURN_S = 0.02


@dataclass(frozen=True, slots=True)
class Gain:
    """Two ways to the same gradients, in turns on this machine.

    Attributes:
        model: What was differentiated.
        plain_ms: The median of plain autograd, with all intra-op threads.
        pmap_ms: The median of ``pmap(value_and_grad(f))`` on all devices.
        gain: The median over rounds of how many times as fast the pmapped step was.
        quartiles: The first and the third quartile of that.
        rounds: How many rounds there were.
    """

    model: str
    plain_ms: float
    pmap_ms: float
    gain: float
    quartiles: tuple[float, float]
    rounds: int

    @property
    def verdict(self) -> str:
        """Say whether it pays, as far as the rounds agree."""
        low, high = self.quartiles
        return "pays" if low > 1 else "loses" if high < 1 else "no clear difference"


def hand_over_us(seconds: float) -> float:
    """Return the median microseconds to one worker per device and back, with nothing to do."""
    known = devices()
    bodies = [_nothing] * len(known)
    return _median_us(lambda: _workers.run(known, bodies, _nothing), seconds)


def call_us(seconds: float) -> float:
    """Return the median microseconds of a pmapped call of nothing on all devices, with ten leaves."""
    params, batch = [torch.ones(()) for _ in range(LEAVES)], torch.ones(2 * len(devices()), 1)
    call = pmap(lambda params, batch: None)
    return _median_us(lambda: call(params, batch), seconds)


def measure_gains(seconds: float) -> list[Gain]:
    """Return the gains of a small, a middle and a wide model, in so many seconds each and a little more."""
    return [_measure(name, *each, seconds) for name, each in _MODELS.items()]


def _measure(
    name: str, build: Callable[[], nn.Module], row: tuple[int, ...], rows: int, seconds: float
) -> Gain:
    steps = _steps(build, row, rows)
    counts = {}
    for way, step in steps.items():
        step()
        counts[way] = max(1, int(TURN_S / _seconds(step, 1)))
    found: dict[str, list[float]] = {way: [] for way in steps}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(found["plain"]) < LEAST_ROUNDS:
        order = list(steps) if len(found["plain"]) % 2 else list(reversed(steps))
        for way in order:
            steps[way]()  # Threads of the other one may still spin.
            found[way].append(_seconds(steps[way], counts[way]))
    ratios = [plain / mapped for plain, mapped in zip(found["plain"], found["pmap"], strict=True)]
    low, gain, high = statistics.quantiles(ratios, n=4, method="inclusive")
    plain_ms, pmap_ms = (1e3 * statistics.median(found[way]) for way in ("plain", "pmap"))
    return Gain(name, plain_ms, pmap_ms, gain, (low, high), len(ratios))


def _steps(build: Callable[[], nn.Module], row: tuple[int, ...], rows: int) -> dict[str, Callable[[], Any]]:
    """Make both steps; whatever they draw, the caller's generator is left as it was."""
    place = devices()[0].torch_device
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build().to(place)
        inputs = torch.randn(rows, *row).to(place)
        labels = torch.randint(NUM_CLASSES, (rows,)).to(place)
    apply, params = functionalize(module)

    def loss_fn(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(apply(params, inputs), labels)

    mapped = pmap(value_and_grad(loss_fn))

    def plain() -> Any:
        module.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return {"plain": plain, "pmap": lambda: mapped(params, inputs, labels)}


def _seconds(step: Callable[[], Any], count: int) -> float:
    """Return the seconds of one of so many steps."""
    start = time.perf_counter()
    for _ in range(count):
        out = step()
    for leaf in tree.leaves(out):
        if isinstance(leaf, Tensor):  # What an accelerator has still to do is part of the time.
            leaf.flatten()[:1].cpu()
    return (time.perf_counter() - start) / count


def _median_us(call: Callable[[], Any], seconds: float) -> float:
    call()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(found) < LEAST_ROUNDS:
        found.append(1e6 * _seconds(call, 1))
    return statistics.median(found)


def _nothing() -> None:
    """Return nothing."""


def _mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, NUM_CLASSES),
    )  # fmt: skip


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, NUM_CLASSES),
    )  # fmt: skip


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "small: MLP 64-128-128-10, 64 rows": (lambda: _mlp(64, 128), (64,), 64),
    "middle: CNN 3x32x32, 32 and 64 channels, 64 rows": (_cnn, (3, 32, 32), 64),
    "wide: MLP 784-2048-2048-10, 256 rows": (lambda: _mlp(784, 2048), (784,), 256),
}
