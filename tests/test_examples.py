"""Every example runs, small, in a process of its own, and its own check passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT = 180  # seconds

SMALL = {
    "batch_statistics.py": ["--devices", "3", "--rows", "20"],
    "gradient_penalty.py": ["--devices", "3", "--rows", "10"],
    "per_sample_gradients.py": ["--devices", "3", "--samples", "20"],
    "several_processes.py": ["--devices", "3", "--steps", "3"],
    "sync_batchnorm.py": ["--devices", "3", "--steps", "3"],
    "train_digits.py": ["--quick", "--devices", "2"],
}


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    # One intra-op thread: on a busy machine torch's threads wait for each other for longer than they work.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *options],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


def test_every_example_is_run_here():
    assert sorted(SMALL) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", SMALL)
def test_an_example_runs_and_its_own_check_passes(name):
    done = run(name, *SMALL[name])
    assert done.returncode == 0, done.stdout + done.stderr
    title, devices, *_ = done.stdout.splitlines()
    assert title.endswith(".")
    assert devices.startswith("Devices: cpu[0], cpu[1]")


def test_train_digits_compares_with_one_device_and_saves_the_curves_of_both(tmp_path):
    file = tmp_path / "curves.png"
    done = run("train_digits.py", "--quick", "--devices", "3", "--check", "--plot", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Largest relative difference" in done.stdout
    assert file.read_bytes().startswith(b"\x89PNG")


def test_train_digits_fails_where_it_does_not_learn_enough():
    done = run("train_digits.py", "--epochs", "1", "--batch", "1000", "--devices", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "(wanted: 97%)" in done.stdout
