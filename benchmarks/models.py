"""Models: what the training steps train, and on what."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 10
NUM_HEADS = 4


@dataclass(frozen=True, slots=True)
class Model:
    """One model with the shape of its batch.

    Attributes:
        name: Short name, for ``--only``.
        title: What tables call it.
        rows: Rows of the whole batch.
        row: Shape of one row.
        build: Makes the module. Pickled, for contenders in processes of their own.
    """

    name: str
    title: str
    rows: int
    row: tuple[int, ...]
    build: Callable[[], nn.Module]

    def module(self) -> nn.Module:
        """Return a new module, every time with the same parameters."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build()

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of that many rows, every time the same."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows, *self.row, generator=generator)
        return inputs, torch.randint(NUM_CLASSES, (rows,), generator=generator)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over the rows."""
    return F.cross_entropy(out, labels)


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width, after in itertools.pairwise(widths):
        layers += [nn.Linear(width, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    def block(channels: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 8 * 8, NUM_CLASSES))


class _Classifier(nn.Module):
    """A transformer encoder, the mean over its sequence, and a linear head."""

    def __init__(self, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, sequence: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(sequence).mean(1))
        return out


MODELS = {
    model.name: model
    for model in (
        Model(
            "mlp",
            "MLP 64-128-128-10, batch 64",
            64,
            (64,),
            functools.partial(_mlp, 64, 128, 128, NUM_CLASSES),
        ),
        Model(
            "wide_mlp",
            "wide MLP 784-2048-2048-10, batch 256",
            256,
            (784,),
            functools.partial(_mlp, 784, 2048, 2048, NUM_CLASSES),
        ),
        Model("cnn", "CNN of two 3x3 blocks, 3x32x32, batch 128", 128, (3, 32, 32), _cnn),
        Model(
            "transformer",
            "transformer of 4 layers, width 128, length 64, batch 32",
            32,
            (64, 128),
            functools.partial(_Classifier, width=128, num_heads=NUM_HEADS, num_layers=4),
        ),
    )
}
