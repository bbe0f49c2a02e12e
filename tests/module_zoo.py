"""Modules to try, with their inputs, and a snapshot that shows whether anything touched one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.cell = kind(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


ROWS = lambda *shape: torch.randn(6, *shape)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: ROWS(3)),
    "cnn": (lambda: cnn().eval(), lambda: ROWS(2, 4, 4)),
    "lstm": (Recurrent, lambda: ROWS(5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: ROWS(5, 3)),
    "attention": (Attention, lambda: ROWS(5, 4)),
    "encoder": (encoder, lambda: ROWS(5, 4)),
    "encoder, fast path": (lambda: encoder().eval(), lambda: ROWS(5, 4)),
    "tied": (Tied, lambda: torch.arange(6)),
    "two names": (TwoNames, lambda: ROWS(3)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), lambda: ROWS(3)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).eval(), lambda: ROWS(3)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), lambda: ROWS(3)),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)).eval(), lambda: ROWS(3)),
    "compiled in place": (lambda: (m := mlp(), m.compile(backend="eager"))[0], lambda: ROWS(3)),
}


def snapshot(module: nn.Module) -> list[Any]:
    """List every attribute, hook, parameter and buffer of a module by identity, tensors also by value."""
    seen: list[Any] = []
    for name, m in module.named_modules():
        for key, value in m.__dict__.items():
            seen.append((name, key, id(value)))
            if isinstance(value, (list, tuple, dict, set)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                seen += [(name, key, k, id(v)) for k, v in items]
    tensors = [*module.parameters(), *module.buffers()]
    return [*seen, *((id(t), t._version, t.detach().flatten().tolist()) for t in tensors)]
