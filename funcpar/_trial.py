"""A trial of the law: random programs, pmapped and plain, on this machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpar._devices import devices
from funcpar._grad import value_and_grad
from funcpar._pmap import pmap

MOST_ROWS = 40
LEAST_PROGRAMS = 20
# How far a result may be off, over the largest entry of its leaf.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-4}
WAYS = ("pmap(f)", "pmap(value_and_grad(f))", "value_and_grad(pmap(f))")

Params: TypeAlias = list[dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        seed: Repeats the same programs.
        programs: How many there were.
        leaves: How many values and gradients were compared.
        devices: The most devices that one ran on.
        dtype: What all were computed in.
        limit: How far a leaf may be off, over its largest entry.
        largest: How far the worst was off.
        failures: What was off by more than the limit, one line each.
    """

    seed: int
    programs: int
    leaves: int
    devices: int
    dtype: str
    limit: float
    largest: float
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether something was compared, and nothing differed."""
        return self.leaves > 0 and not self.failures


def try_law(seconds: float, seed: int, dtype: torch.dtype = torch.float64) -> Trial:
    """Compare random programs of random sizes with plain autograd, for so many seconds.

    Rows are 1 to ``MOST_ROWS``, so that shards are uneven and may be fewer than devices.
    """
    choose = random.Random(seed)
    most, limit, largest, leaves, programs = len(devices()), LIMITS[dtype], 0.0, 0, 0
    failures: list[str] = []
    deadline = time.monotonic() + seconds
    while programs < LEAST_PROGRAMS or time.monotonic() < deadline:
        program = _Program(choose, dtype)
        rows, count = choose.randint(1, MOST_ROWS), choose.randint(1, most)
        batch = _normal(choose, rows, program.width).to(dtype)
        expected = _expected(program, batch)
        call = f"program {programs}, {program}, {rows} rows on {count} devices"
        for way, compute in _ways(program, count).items():
            try:
                found = compute(program.params, batch)
            except Exception as error:
                failures.append(f"{call}: {way} raised {type(error).__name__}: {error}")
                continue
            for number, (one, other) in enumerate(zip(found, expected[way], strict=True)):
                distance = _distance(one, other)
                leaves, largest = leaves + 1, max(largest, distance)
                if not distance <= limit:  # A nan is no smaller.
                    failures.append(f"{call}: {way}, result {number}: off by {distance:.1e}")
        programs += 1
    name = str(dtype).removeprefix("torch.")
    return Trial(seed, programs, leaves, most, name, limit, largest, tuple(failures))


class _Program:
    """A few random layers with parameters, row by row, and the mean over rows of what comes out."""

    def __init__(self, choose: random.Random, dtype: torch.dtype) -> None:
        self.width = width = choose.randint(1, 6)
        self.layers: list[str] = []
        self.params: Params = []
        for _ in range(choose.randint(1, 4)):
            after = choose.randint(1, 6)
            weight, bias = _normal(choose, width, after).to(dtype), _normal(choose, after).to(dtype)
            self.params.append({"weight": weight, "bias": bias})
            self.layers.append(choose.choice(list(_LAYERS)))
            width = after

    def __str__(self) -> str:
        return " then ".join(self.layers)

    def rows(self, params: Params, batch: Tensor) -> Tensor:
        """Return one row for each row."""
        for layer, own in zip(self.layers, params, strict=True):
            batch = _LAYERS[layer](batch @ own["weight"] + own["bias"])
        return batch

    def mean(self, params: Params, batch: Tensor) -> Tensor:
        """Return the mean over rows."""
        return self.rows(params, batch).square().sum(-1).mean()


_LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sine": torch.sin,
    "softmax": lambda x: torch.softmax(x, -1),
    "softplus": torch.nn.functional.softplus,
    "products": lambda x: x * x.flip(-1),
    "centering": lambda x: x - x.mean(-1, keepdim=True),
}


def _expected(program: _Program, batch: Tensor) -> dict[str, list[Tensor]]:
    """Return what plain autograd gives, with nothing of this library."""
    flat = [leaf.clone().requires_grad_() for own in program.params for leaf in own.values()]
    params = [dict(zip(("weight", "bias"), flat[k : k + 2], strict=True)) for k in range(0, len(flat), 2)]
    loss = program.mean(params, batch)
    gradient = [loss.detach(), *torch.autograd.grad(loss, flat)]
    rows = program.rows(program.params, batch)
    return dict(zip(WAYS, ([rows], gradient, gradient), strict=True))


def _ways(program: _Program, count: int) -> dict[str, Callable[[Params, Tensor], list[Tensor]]]:
    rows = pmap(program.rows, devices=count)
    outer = pmap(value_and_grad(program.mean), devices=count)
    inner = value_and_grad(pmap(program.mean, devices=count))
    calls = (
        lambda *args: [rows(*args)],
        lambda *args: _flat(*outer(*args)),
        lambda *args: _flat(*inner(*args)),
    )
    return dict(zip(WAYS, calls, strict=True))


def _flat(loss: Any, grads: Params) -> list[Tensor]:
    return [loss, *(leaf for own in grads for leaf in own.values())]


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest entry; infinity where the shapes differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    difference = (found.to(expected.device) - expected).abs().max().item()
    return difference / max(expected.abs().max().item(), torch.finfo(expected.dtype).tiny)


def _normal(choose: random.Random, *shape: int) -> Tensor:
    """Draw from a stream of its own, so that the caller's generator stays as it is."""
    generator = torch.Generator().manual_seed(choose.getrandbits(48))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
