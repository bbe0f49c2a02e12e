"""Programs that run in two processes, each against the mean of both ranks' losses in one process."""

from __future__ import annotations

import copy
import functools
import importlib
import traceback
from collections.abc import Callable
from typing import Any

import processes
import torch
import torch.distributed as dist
from compat_models import assert_close, assert_same_gradients
from torch import Tensor, nn

import compat

SIZE = 2
DDP = compat.DistributedDataParallel
Loss = Callable[[Any, int], Tensor]
_PROGRAMS: dict[str, dict[str, Callable[[], None]]] = {}


def in_two_processes(fun: Callable[[], None]) -> Callable[[], None]:
    """Make a test of a function that runs in both; all of a file run in one pair of processes."""
    module, name = fun.__module__, fun.__name__
    _PROGRAMS.setdefault(module, {})[name] = fun

    @functools.wraps(fun)
    def test() -> None:
        for r, ended in enumerate(_ended(module)):
            how = ended.get(name, "not run, as one before it failed")
            assert not how, f"rank {r}: {how}"

    return test


@functools.cache
def _ended(module: str) -> list[dict[str, str]]:
    return processes.values(run_all, SIZE, module, timeout=200, FUNCPAR_TIMEOUT="30")


def run_all(module: str, *names: str) -> dict[str, str]:
    """Run the programs of a file one after another; return how each ended, "" if well."""
    importlib.import_module(module)
    dist.init_process_group("gloo")
    ended = {}
    for name in names or _PROGRAMS[module]:
        torch.manual_seed(0)
        try:
            _PROGRAMS[module][name]()
        except Exception:
            ended[name] = traceback.format_exc()
            break  # The other rank may wait for ever in what comes next.
        ended[name] = ""
    dist.destroy_process_group()
    return ended


def rank() -> int:
    return dist.get_rank()


def x_of(r: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(100 + r), dtype=torch.float64)


def rand_images(r: int) -> Tensor:
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(r), dtype=torch.float64)


def square(model: Any, r: int) -> Tensor:
    return model(x_of(r)).square().mean()


def mean_loss(plain: nn.Module, loss: Loss = square) -> Tensor:
    return sum((loss(plain, r) for r in range(SIZE)), torch.zeros(())) / SIZE


def check(module: nn.Module, loss: Loss = square, steps: int = 2, **options: Any) -> Any:
    """Compare gradients and two steps of training with those of one process; return the wrapper."""
    plain = copy.deepcopy(module)
    wrapper = DDP(module, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(wrapper, rank()).backward()
        mean_loss(plain, loss).backward()
        assert_same_gradients(module, plain)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs)
    return wrapper


class Branches(nn.Module):
    """A layer for each rank, one that nobody uses, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 2) for _ in range(SIZE)])
        self.unused = nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.own[branch](self.first(x).tanh())
