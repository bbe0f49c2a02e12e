"""What a CPU can show of benchmarks.gpu: its law, its arithmetic, and what it says without a GPU."""

import processes
import pytest
import torch

import funcpar as fp
from benchmarks import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run python -m benchmarks.gpu itself")
def test_without_a_gpu_it_says_so_and_exits_with_2():
    done = processes.program("-m", "benchmarks.gpu")
    assert done.returncode == 2, done.stderr
    assert done.stdout == "torch.cuda finds no GPU, so nothing was checked and nothing measured.\n"


def test_its_law_holds_on_virtual_devices_and_can_fail(devices, monkeypatch):
    assert gpu.check_law(range(len(devices))) < 1e-12
    monkeypatch.setattr(
        gpu.fp, "pmap", lambda fun, **_: lambda *args: fp.tree.map(lambda t: t * 1.5, fun(*args))
    )
    monkeypatch.setattr(gpu.fp, "pmean", lambda x: x)
    assert gpu.check_law([0]) > 0.1


@pytest.mark.parametrize(
    ("by_stream", "share"),
    [
        ({}, 0.0),
        ({1: [(0.0, 2.0)], 2: [(2.0, 4.0)]}, 0.0),
        ({1: [(0.0, 2.0)], 2: [(1.0, 3.0)]}, 1 / 3),
        ({1: [(0.0, 2.0)], 2: [(0.0, 2.0)]}, 1.0),
        ({1: [(0.0, 2.0), (1.0, 2.0)]}, 0.0),
    ],
)
def test_overlap_is_the_share_of_the_busy_time_of_two_streams(by_stream, share):
    assert gpu.overlap(by_stream) == pytest.approx(share)


def test_waits_of_the_host_are_counted_by_name():
    names = ["aten::mm", "cudaStreamSynchronize", "cudaLaunchKernel", "cudaStreamSynchronize"]
    assert gpu.waits_in(names) == {"cudaStreamSynchronize": 2}


def test_steps_take_turns_and_train():
    fp.set_cpu_devices(2, threads_per_device=1)
    old, gpu.ROWS = gpu.ROWS, 8
    try:
        steps = {"eager": gpu.make_step(None, "cpu"), "pmap": gpu.make_step([0, 1], "cpu")}
        first, second = steps["eager"](), steps["pmap"]()
        torch.testing.assert_close(first, second)
        assert gpu.time_steps({"one": lambda: None, "other": lambda: None}, lambda: None).keys() == {
            "one",
            "other",
        }
    finally:
        gpu.ROWS = old
