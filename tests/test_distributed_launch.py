"""Programs that launchers start: torchrun on one node and on two, after a crash; torch.multiprocessing."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import processes
import pytest
import torch
from processes import free_port

import funcpar as fp

PROGRAM = Path(__file__).parent.parent / "examples" / "several_processes.py"
LIMIT = 40
thorough = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="a long campaign")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(PROGRAM.parent.parent),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def finish(*programs: list[str]) -> list[str]:
    """Run programs at the same time; return what each wrote, all of them having ended well."""
    with contextlib.ExitStack() as stack:
        # Files, which do not fill up as pipes do while another program is waited for.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in programs]
        running = [
            subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT)
            for program, file in zip(programs, files, strict=True)
        ]
        try:
            for program in running:
                program.wait(LIMIT)
        finally:
            for program in running:
                program.kill()
                program.wait()
        texts = [file.seek(0) or file.read() for file in files]
    assert [program.returncode for program in running] == [0] * len(running), "".join(texts)
    return texts


# Steps with checkpoints, as the example takes them, without slow imports; nobody calls shutdown().
TRAINING = """
import os, signal, sys, torch, funcpar as fp
path, crash_at = sys.argv[1], int(sys.argv[2])
fp.distributed.initialize(timeout=60)
index, count = fp.distributed.process_index(), fp.distributed.process_count()
rows = torch.arange(5.0, dtype=torch.float64).tensor_split(count)[index]
state = {"step": 0, "w": torch.ones((), dtype=torch.float64)}
if index == 0 and os.path.exists(path):
    state = torch.load(path)
state = fp.distributed.broadcast(state)
first, w = state["step"], state["w"]
gradient = fp.pmap(fp.grad(lambda w, x: (w * x).square().mean()))
for step in range(first, 6):
    if step == crash_at and index == count - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    w = w - 0.1 * gradient(w, rows)
    if index == 0:
        torch.save({"step": step + 1, "w": w}, path)
print(f"{count} processes: steps {first} to 6, w {w.item():.12f}")
"""
ALONE = f"{(1 - 0.1 * 2 * 6) ** 6:.12f}"  # The mean of the squares of 0 to 4 is 6.


def training(folder: Path, crash_at: int = -1) -> list[str]:
    program = folder / "program.py"
    program.write_text(TRAINING)
    return [str(program), str(folder / "state.pt"), str(crash_at)]


def test_after_a_crash_torchrun_ends_with_the_parameters_of_one_process(tmp_path):
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    (text,) = finish([*launch, *training(tmp_path, crash_at=4)])
    assert len(re.findall(rf"2 processes: steps [1-4] to 6, w {ALONE}", text)) == 2, text


@thorough
def test_after_a_crash_two_nodes_end_with_the_parameters_of_one_process(tmp_path):
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "this"]
    launch = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", *meet]
    text = "".join(finish(*2 * [[*launch, *training(tmp_path, crash_at=4)]]))
    assert len(re.findall(rf"2 processes: steps [1-4] to 6, w {ALONE}", text)) == 2, text


def test_two_nodes_that_are_numbered_end_with_the_parameters_of_one_process(tmp_path):
    launch = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    port, program = str(free_port()), training(tmp_path)
    text = "".join(
        finish(*([*launch, "--master-port", port, "--node-rank", str(node), *program] for node in range(2)))
    )
    assert text.count(f"2 processes: steps 0 to 6, w {ALONE}") == 2, text


def assert_same(one: Path, other: Path) -> None:
    expected, found = torch.load(one), torch.load(other)
    assert list(found) == list(expected)
    for name, param in found.items():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-10)


def test_after_a_crash_the_example_ends_with_the_parameters_of_an_undisturbed_run(tmp_path):
    alone, disturbed = tmp_path / "alone.pt", tmp_path / "disturbed.pt"
    run = functools.partial(processes.program, str(PROGRAM), "--devices", "3")
    done = run("--result", str(alone))
    assert done.returncode == 0, done.stderr
    assert "Devices: cpu[0], cpu[1], cpu[2] in each of 1 processes\n1 processes: steps 0 to 60" in done.stdout
    options = ["--checkpoint", str(tmp_path / "run.pt"), "--result", str(disturbed), "--crash-at", "25"]
    assert run(*options).returncode == -signal.SIGKILL
    done = run(*options, TORCHELASTIC_RESTART_COUNT="1")
    assert "1 processes: steps 20 to 60" in done.stdout, done.stderr
    assert_same(disturbed, alone)


@thorough  # Five starts of Python, torch, scikit-learn and torch's compiler.
def test_after_a_crash_the_example_under_torchrun_ends_with_the_parameters_of_an_undisturbed_run(tmp_path):
    alone, together = tmp_path / "alone.pt", tmp_path / "together.pt"
    assert processes.program(str(PROGRAM), "--result", str(alone)).returncode == 0
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(PROGRAM)]
    options = ["--checkpoint", str(tmp_path / "run.pt"), "--result", str(together), "--crash-at", "25"]
    (text,) = finish([*launch, *options])
    assert "2 processes: steps 20 to 60" in text
    assert_same(together, alone)


def spawned(index: int, count: int, port: int, path: str) -> None:
    """Be one of several processes of ``torch.multiprocessing.spawn``."""
    torch.set_num_threads(1)
    fp.distributed.initialize(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=count, timeout=60
    )
    total = fp.pmap(lambda x: x.sum(), in_axes=0, out_axes="sum")(torch.ones(index + 1))
    if index == 0:
        torch.save(total, path)
    fp.distributed.shutdown()


def test_spawned_processes_are_joined_by_what_they_are_told(tmp_path):
    # As spawn does, with processes that need not import torch.
    args = 2, free_port(), str(tmp_path / "total.pt")
    torch.multiprocessing.start_processes(spawned, args, nprocs=2, start_method="forkserver")
    assert torch.load(tmp_path / "total.pt").item() == 3.0
