"""ResNet-18: a model of many small layers and buffers, for what the wrapper of modules costs over pmap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models import NUM_CLASSES, Model


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


def _in_eval() -> nn.Module:
    return resnet18().eval()


RESNET18 = Model("resnet18", "ResNet-18, 3x64x64, batch 32, norms in eval", 32, (3, 64, 64), _in_eval)
