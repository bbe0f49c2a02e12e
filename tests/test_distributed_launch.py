"""Programs that launchers start: torchrun on one node and on two, after a crash; torch.multiprocessing."""

import os
import subprocess
import sys
from pathlib import Path

import processes
import torch
from processes import free_port

import funcpar as fp

PROGRAM = Path(__file__).parent.parent / "examples" / "several_processes.py"
LIMIT = 120
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(PROGRAM.parent.parent),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def finish(*programs: list[str]) -> list[str]:
    """Run programs at the same time; return what each wrote, all of them having ended well."""
    running = [
        subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        )
        for program in programs
    ]
    try:
        texts = [program.communicate(timeout=LIMIT)[0] for program in running]
    finally:
        for program in running:
            program.kill()
            program.wait()
    for program, text in zip(running, texts, strict=True):
        assert program.returncode == 0, text
    return texts


def test_after_a_crash_torchrun_ends_with_the_parameters_of_an_undisturbed_run(tmp_path):
    alone, disturbed = tmp_path / "alone.pt", tmp_path / "disturbed.pt"
    done = processes.program(str(PROGRAM), "--devices", "3", "--result", str(alone))
    assert done.returncode == 0, done.stderr
    assert "Devices: cpu[0], cpu[1], cpu[2] in each of 1 processes\n1 processes: steps 0 to 60" in done.stdout
    options = ["--checkpoint", str(tmp_path / "run.pt"), "--result", str(disturbed)]
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    (text,) = finish([*launch, str(PROGRAM), *options, "--crash-at", "25"])
    assert "2 processes: steps 20 to 60" in text
    expected, found = torch.load(alone), torch.load(disturbed)
    assert list(found) == list(expected)
    for name, param in found.items():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-10)


TRAINING = """
import torch, funcpar as fp
fp.distributed.initialize(timeout=60)
rows = torch.arange(5.0, dtype=torch.float64).tensor_split(fp.distributed.process_count())
step = fp.pmap(fp.grad(lambda w, x: (w * x).square().mean()))
w = torch.ones((), dtype=torch.float64)
for _ in range(3):
    w = w - 0.1 * step(w, rows[fp.distributed.process_index()])
print(f"{fp.distributed.process_count()} processes: {w.item():.12f}")
"""


def test_two_nodes_end_with_the_parameters_of_one_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAINING)
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meet, "--node-rank"]
    texts = finish(*([*launch, str(node), str(program)] for node in range(2)))
    alone = (1 - 0.1 * 2 * 6.0) ** 3  # The mean of the squares of 0 to 4 is 6.
    for text in texts:
        assert f"2 processes: {alone:.12f}" in text


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
