"""DistributedDataParallel on two processes: gradients are those of the mean of both losses."""

from __future__ import annotations

import ddp_programs
import processes
import pytest


@pytest.fixture(scope="module")
def failures():
    return processes.values(ddp_programs.run_all, ddp_programs.SIZE, timeout=200, FUNCPAR_TIMEOUT="20")


@pytest.mark.parametrize("name", list(ddp_programs.PROGRAMS))
def test_two_processes_equal_one(name, failures):
    for rank, failed in enumerate(failures):
        assert name not in failed, f"rank {rank}: {failed[name]}"
