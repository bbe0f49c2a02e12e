"""Programs that launchers start: torchrun on one node and on two, after a crash; torch.multiprocessing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The parameters that the program ends with when it runs alone."""
    path = tmp_path_factory.mktemp("alone") / "params.pt"
    (text,) = finish([sys.executable, str(PROGRAM), "--result", str(path)])
    assert "1 processes: steps 0 to 60" in text
    return torch.load(path)


def assert_same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = torch.load(path)
    assert list(found) == list(expected)
    for name, param in found.items():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-10)


def test_after_a_crash_torchrun_ends_with_the_parameters_of_an_undisturbed_run(tmp_path, undisturbed):
    options = ["--checkpoint", str(tmp_path / "run.pt"), "--result", str(tmp_path / "params.pt")]
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    (text,) = finish([*launch, str(PROGRAM), *options, "--crash-at", "25"])
    assert "2 processes: steps 20 to 60" in text
    assert_same(tmp_path / "params.pt", undisturbed)


def test_two_nodes_end_with_the_parameters_of_one_process(tmp_path, undisturbed):
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meet, "--node-rank"]
    texts = finish(
        *([*launch, str(node), str(PROGRAM), "--result", str(tmp_path / "params.pt")] for node in range(2))
    )
    assert "2 processes: steps 0 to 60" in "".join(texts)
    assert_same(tmp_path / "params.pt", undisturbed)


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
    torch.multiprocessing.spawn(spawned, (2, free_port(), str(tmp_path / "total.pt")), nprocs=2)
    assert torch.load(tmp_path / "total.pt").item() == 3.0
