"""Every example runs, small, in a process of its own, and its own check passes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import processes
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DIGITS = str(EXAMPLES / "train_digits.py")
SMALL = {
    "batch_statistics.py": ["--devices", "3", "--rows", "20"],
    "gradient_penalty.py": ["--devices", "3", "--rows", "10"],
    "per_sample_gradients.py": ["--devices", "3", "--samples", "20"],
    "sync_batchnorm.py": ["--devices", "3", "--steps", "3"],
}
OTHERS = ["several_processes.py", "train_digits.py"]  # The first is run by test_distributed_launch.py.


def test_every_example_is_run():
    assert sorted([*SMALL, *OTHERS]) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    title, devices, *_ = done.stdout.splitlines()
    assert title.endswith(".")
    assert devices.startswith("Devices: cpu[0], cpu[1]")


@pytest.mark.parametrize("name", SMALL)
def test_an_example_runs_and_its_own_check_passes(name):
    check(processes.program(str(EXAMPLES / name), *SMALL[name]))


def test_train_digits_compares_with_one_device_and_saves_the_curves_of_both(tmp_path):
    file = tmp_path / "curves.png"
    options = ["--quick", "--epochs", "3", "--devices", "3", "--check", "--plot", str(file)]
    done = processes.program(DIGITS, *options)
    check(done)
    assert "Largest relative difference" in done.stdout
    assert file.read_bytes().startswith(b"\x89PNG")


def test_train_digits_fails_where_it_does_not_learn_enough():
    done = processes.program(
        EXAMPLES / "train_digits.py", "--epochs", "1", "--batch", "1000", "--devices", "2"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "(wanted: 97%)" in done.stdout
