"""What programs on the simulated accelerator share; importing it makes that the process's accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simulated
import torch
from simulated import books

simulated.install()

import funcpar as fp  # noqa: E402
from funcpar import _graph, _streams  # noqa: E402

# One device, one named twice, all, both kinds at once, and not the one that results of others are on.
DEVICES = {"one": [0], "one twice": [0, 0], "all": [0, 1, 2], "mixed": [0, 0, 1], "others": [1, 2]}

recorder = simulated.Recorder()
_streams.runtime = recorder  # type: ignore[assignment]
_graph.PLAIN_TYPES += (simulated.Sim,)

__all__ = ["DEVICES", "batch", "books", "close", "loss", "recorder", "registry", "weights"]


def registry() -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return an empty table of programs, and a decorator that puts them there."""
    programs: dict[str, Callable[[list[int]], None]] = {}

    def program(fun: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
        programs[fun.__name__] = fun
        return fun

    return programs, program


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(fp.tree.map(lambda t: t.cpu(), found), wanted)


def loss(p: Any, x: Any, y: Any) -> Any:
    return ((x @ p["w"] + p["b"]).tanh() - y).square().mean()


def weights(requires_grad: bool = False) -> dict[str, torch.Tensor]:
    made = {"w": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    return {name: tensor.requires_grad_(requires_grad) for name, tensor in made.items()}


def batch(rows: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)
