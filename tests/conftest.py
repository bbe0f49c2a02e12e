"""Fixtures and hypothesis profiles for the whole suite."""

import os
import sys

import hypothesis
import pytest
import torch

import funcpar as fp
from tests import cycles

# They make a simulated device this process's accelerator: test_streams.py runs them in another one.
collect_ignore_glob = ["simulated*.py"]

# Idle OpenMP threads of the main thread spin, and take the cores from the shards that are tested.
torch.set_num_threads(1)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish():
    cycles.settle()


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda n: f"cpu{n}")
def devices(request):
    """Run the test on 1, 2, 3 and 4 virtual CPU devices."""
    fp.set_cpu_devices(request.param, threads_per_device=1)
    return fp.devices()


@pytest.fixture
def hurried():
    """Let threads take turns far more often, so that a race is met."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _seeded():
    """Start every test with four virtual CPU devices and a seed of its own."""
    torch.manual_seed(0)
    fp.set_cpu_devices(4, threads_per_device=1)
