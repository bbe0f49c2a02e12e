"""compat: what a training step through the wrapper costs over pmap's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import compat
import funcpar as fp
from benchmarks.contenders import update
from benchmarks.measure import Effort, ratio, take_turns, timed
from benchmarks.models import NUM_CLASSES, Model, loss_of


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels == after
            else nn.Sequential(nn.Conv2d(channels, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Return a ResNet-18: 11.2 million parameters, 62 tensors of them, and 60 buffers."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for after in (64, 128, 256, 512):
        layers += [_Block(channels, after, 1 if after == 64 else 2), _Block(after, after, 1)]
        channels = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES))


RESNET18 = Model("resnet18", "ResNet-18, 3x64x64, batch 32, norms in eval", 32, (3, 64, 64), resnet18)


def measure_compat(
    devices: int, effort: Effort, on_turn: Callable[[str], object]
) -> tuple[dict[str, Any], float]:
    """Return the seconds of a step by DataParallel and by pmap with their ratios, and the load by others."""
    fp.set_cpu_devices(devices, threads_per_device=1)
    runs = {"compat": timed(compat_step(RESNET18)), "pmap": timed(pmap_step(RESNET18))}
    rounds = take_turns(runs, effort, on_turn)
    record = {
        "model": RESNET18.title,
        "devices": devices,
        "compat_s": statistics.median(rounds.seconds["compat"]),
        "pmap_s": statistics.median(rounds.seconds["pmap"]),
        "ratio": ratio(rounds.seconds["compat"], rounds.seconds["pmap"]),
        "ratio_of_work": ratio(rounds.work["compat"], rounds.work["pmap"]),
    }
    return record, statistics.median(rounds.loads)


def num_turns(effort: Effort) -> int:
    """Return how many turns ``measure_compat`` takes at most."""
    return effort.most_rounds * 2


def compat_step(model: Model) -> Callable[[], Tensor]:
    wrapper = compat.DataParallel(model.module().eval())
    params = list(wrapper.parameters())
    inputs, labels = model.batch(model.rows)

    def step() -> Tensor:
        for param in params:
            param.grad = None
        loss = loss_of(wrapper(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        update(params, [param.grad for param in params])
        return loss.detach()

    return step


def pmap_step(model: Model) -> Callable[[], Tensor]:
    apply, params = fp.functionalize(model.module().eval())
    inputs, labels = model.batch(model.rows)
    gradient = fp.pmap(fp.value_and_grad(lambda params, x, y: loss_of(apply(params, x), y)))

    def step() -> Tensor:
        loss, grads = gradient(params, inputs, labels)
        update(list(params.values()), list(grads.values()))
        return loss  # type: ignore[no-any-return]

    return step
