"""Modules that people wrap, and what the plain module would give for them."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def rand(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, dtype=options.pop("dtype", torch.float64), **options)


def classifier() -> nn.Module:
    """A small convolutional classifier for 3 x 8 x 8 images, in float64."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 5)
    ).double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class Calling(nn.Module):
    """A module whose forward is a function of its one linear layer."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.fun = fun

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fun(self.layer, *args, **kwargs)


class Counting(nn.Module):
    """A module that keeps counters, features and a list on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.feature = self.layer(x)
        return self.feature.tanh()


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Result:
    logits: Tensor
    name: str = "a"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Named(dict):
    """A dict with a constructor of its own."""

    def __init__(self, name: str, items: Any = ()) -> None:
        super().__init__(items)
        self.name = name


def counting_dict() -> defaultdict[str, int]:
    return defaultdict(int)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a module and a copy, one to wrap and one to compare with."""
    module = build()
    return module, copy.deepcopy(module)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in module.named_parameters()}


def assert_same_gradients(module: nn.Module, plain: nn.Module) -> None:
    mine, theirs = gradients(module), gradients(plain)
    assert {n for n, g in mine.items() if g is None} == {n for n, g in theirs.items() if g is None}
    for name, grad in mine.items():
        if grad is not None:
            assert_close(grad, theirs[name], msg=lambda m, n=name: f"{n}: {m}")


def ids() -> list[int]:
    return [device.rank for device in fp.devices()]
