"""A rank that is killed, raises, skips a call, makes another or holds another module: no other rank hangs."""

from __future__ import annotations

import os
import signal
import time

import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import compat

BOUND = 15.0  # Seconds for what fails at once or after FUNCPAR_TIMEOUT=1, starting processes included.


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("no such thing")
        return self.layer(x)


def run(fault: str, victim: int) -> None:
    dist.init_process_group("gloo")
    is_victim = dist.get_rank() == victim
    if fault == "structure":
        module = nn.Sequential(nn.Linear(3, 2 + is_victim), nn.Linear(3, 2) if is_victim else nn.Tanh())
        compat.DistributedDataParallel(module)
    module = nn.Sequential(
        Failing(), nn.BatchNorm1d(2, track_running_stats=fault in ("other call", "twin buffers"))
    )
    wrapper = compat.DistributedDataParallel(module)
    x = torch.randn(4, 3)
    if fault.startswith("twin"):
        _mix_up(wrapper, x, fault == "twin buffers")
    wrapper(x).sum().backward()
    if is_victim:
        _go_wrong(fault, wrapper, x)
    for _ in range(3):
        wrapper(x).sum().backward()


def _mix_up(wrapper: nn.Module, x: Tensor, has_buffers: bool) -> None:
    module = nn.Sequential(Failing(), nn.BatchNorm1d(2, track_running_stats=has_buffers))
    other = compat.DistributedDataParallel(module, bucket_cap_mb=1)
    both = (wrapper, other)
    for one in both:
        one(x).sum().backward()
    losses = [one(x).sum() for one in (both if dist.get_rank() == 0 else both[::-1])]
    for loss in losses:
        loss.backward()


def _go_wrong(fault: str, wrapper: nn.Module, x: Tensor) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        wrapper.module[0].fails = True
    elif fault == "skip":
        wrapper(x)
        time.sleep(3.5)
        os._exit(0)
    elif fault == "no parameter":
        wrapper(x)
        x.requires_grad_().sum().backward()
        raise SystemExit(0)
    elif fault == "other call":
        wrapper(x)
        wrapper(x)
    elif fault == "frozen":
        wrapper.module[1].weight.requires_grad_(False)
    elif fault == "outside":
        (wrapper(x).sum() + wrapper.module[0].layer.weight.sum()).backward()


def fail(fault: str, victim: int = 1, size: int = 2, **env: str) -> list[processes.Outcome]:
    start = time.monotonic()
    outcomes = processes.run(run, size, fault, victim, timeout=BOUND, FUNCPAR_TIMEOUT="1", **env)
    assert time.monotonic() - start < BOUND
    return outcomes


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_other(victim):
    error = fail("kill", victim)[1 - victim].error
    assert f"ConnectionError: DistributedDataParallel(Sequential): rank {victim} is gone" in error
    assert error.endswith("It was ended or raised; look at its own output, and start all ranks again.")


def test_a_rank_that_raises_in_forward_is_named_with_its_error():
    first, second = fail("raise")
    assert second.error == "ValueError: no such thing"
    assert "rank 1 is gone, while others wait in the backward of a loss" in first.error
    assert "rank 1: raised ValueError: no such thing, in forward" in first.error


def test_a_rank_that_does_not_come_is_named_by_all_others():
    outcomes = fail("skip", 1, size=3)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert "rank 1 did not come to the backward of a loss within 1 s" in error or (
            "rank 1 is gone" in error
        ), error
        assert f"rank {rank}: waits in the backward of a loss" in error
    assert any("CollectiveTimeoutError" in outcomes[r].error for r in (0, 2))


def test_a_rank_whose_loss_reaches_no_parameter_is_named():
    first, second = fail("no parameter")
    assert "rank 1 is gone, while others wait in the backward of a loss" in first.error
    assert second.error == "SystemExit: 0"


def assert_told(outcomes: list[processes.Outcome], *told: str) -> None:
    for outcome in outcomes:
        assert outcome.error.startswith(
            "ReplicaMismatchError: DistributedDataParallel(Sequential): the ranks make different calls:"
        ), outcome
        for line in told:
            assert line in outcome.error
        assert outcome.error.endswith("with the same parameters, in the same order on every rank.")


def test_other_calls_are_an_error_on_every_rank():
    assert_told(
        fail("other call"),
        "rank 0: waits in the backward of a loss",
        "rank 1: waits in the broadcast of buffers before forward",
    )


def test_other_calls_are_an_error_before_anything_is_sent_where_ranks_always_meet():
    outcomes = fail("other call", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert_told(
        outcomes,
        "rank 0: the backward of a loss, 4 parameters (layout",
        "rank 1: the broadcast of buffers before forward, 40 bytes, in wrapper 1 of the group",
    )


def test_other_parameters_are_an_error_on_every_rank():
    assert_told(
        fail("frozen", TORCH_DISTRIBUTED_DEBUG="DETAIL"),
        "rank 0: the backward of a loss, 4 parameters",
        "rank 1: the backward of a loss, 3 parameters",
    )


def test_a_parameter_that_one_rank_alone_uses_outside_of_forward_is_an_error_on_every_rank():
    assert_told(
        fail("outside"),
        "rank 0: waits in the backward of a loss",
        "rank 1: waits in the mean of gradients that reach parameters outside of the wrapper's forward",
    )


def test_other_wrappers_at_the_same_time_are_an_error_on_every_rank():
    for outcome in fail("twins"):
        assert (
            "the ranks ran backward through different wrappers at the same time.\nRun them in the same"
            in (outcome.error)
        )


def test_buffers_of_another_wrapper_are_not_taken():
    first, second = fail("twin buffers")
    assert "sent buffers of others.\nRun them in the same order on every rank" in second.error
    assert first.error is not None


def test_other_modules_are_listed_by_rank_and_parameter():
    for outcome in fail("structure"):
        assert (
            "ReplicaMismatchError: DistributedDataParallel(Sequential): the ranks hold different modules"
            in (outcome.error)
        )
        assert "0.weight   rank 0: (2, 3) float32   rank 1: (3, 3) float32" in outcome.error
        assert "1.bias   rank 0: missing   rank 1: (2,) float32" in outcome.error
        assert outcome.error.endswith("Build the same module on every rank before you wrap it.")
