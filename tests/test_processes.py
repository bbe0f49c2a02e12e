"""The harness that starts processes: what it returns, and that it ends what hangs."""

import os
import signal
import time

import processes
import pytest
import torch
import torch.distributed as dist


def summed() -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_processes_meet():
    assert processes.values(summed, 2) == [3.0, 3.0]


def failing() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no")


def test_processes_report_how_each_ended():
    killed, raised = processes.run(failing, 2)
    assert (killed.exitcode, killed.error) == (-signal.SIGKILL, None)
    assert raised.error == "ValueError: no" and "in failing" in raised.traceback


def test_a_process_that_hangs_is_ended_and_fails_the_test():
    with pytest.raises(AssertionError, match=r"processes \[0\] of 1 are still there"):
        processes.run(time.sleep, 1, 60, timeout=0.5)


def test_a_program_ends_as_under_python(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import sys, warnings\nprint(sys.argv[1:])\nsys.argv[2:] and sys.exit(3)\nwarnings.warn('no')"
    )
    done = processes.program(str(path), "a", "b")
    assert (done.returncode, done.stdout, done.stderr) == (3, "['a', 'b']\n", "")
    done = processes.program(str(path), "a")
    assert (done.returncode, done.stdout) == (1, "['a']\n") and "UserWarning: no" in done.stderr
