"""Order, placement and counts on accelerators, shown on a simulated one. Nothing here has run on a GPU.

The simulation (``simulated.py``) takes the process's one custom backend, so it runs in another.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import processes
import pytest
import torch

import funcpar as fp

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DEVICES = ["one", "one twice", "all", "mixed", "others"]


def names_in(file: str) -> list[str]:
    tree = ast.parse((TESTS / file).read_text())
    return [
        node.name for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "program" for d in node.decorator_list)
    ]  # fmt: skip


WAYS, COUNTS = names_in("simulated_ways.py"), names_in("simulated_counts.py")
DRAWS = names_in("simulated_draws.py")
SUMS = names_in("simulated_sums.py")


@cache
def run(*options: str) -> dict[str, dict]:
    found = processes.program(str(TESTS / "simulated_run.py"), *options)
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout)


def test_there_are_as_many_ways_as_the_documents_say():
    assert (len(WAYS), len(SUMS), len(COUNTS), len(DRAWS)) == (29, 12, 16, 13)
    assert len(run()) == (29 + 12 + 16 + 13) * len(DEVICES)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("way", WAYS + SUMS)
def test_values_are_right_and_no_stream_races_with_another(way, where):
    found = run()[f"{way}, {where}"]
    assert found["error"] == ""
    assert found["races"] == []


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("count", COUNTS)
def test_what_is_asked_of_accelerators_is_as_promised(count, where):
    found = run()[f"{count}, {where}"]
    assert found["error"] == ""
    assert found["races"] == []


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("draws", DRAWS)
def test_shards_draw_from_streams_of_their_own(draws, where):
    found = run()[f"{draws}, {where}"]
    assert found["error"] == ""
    assert found["races"] == []


def test_what_gpus_are_to_show_of_random_numbers_holds_on_the_simulated_one():
    found = subprocess.run(
        [sys.executable, str(TESTS / "simulated_gpu.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed and int(passed[1]) >= 60
    assert "skipped" not in found.stdout


SOME = ["forward_of_what_is_on_a_device", "fused_gradient", "collectives"]


@pytest.mark.parametrize("broken", ["wait", "keep"])
@pytest.mark.parametrize("way", SOME)
def test_the_simulation_finds_what_is_left_out(way, broken):
    found = run("--broken", broken, *(word for name in SOME for word in ("--only", name)))
    for where in DEVICES[1:]:  # One shard runs on its caller's stream, where nothing can race.
        assert found[f"{way}, {where}"]["races"], where


ASIDE = [
    "sums_of_every_kind_of_leaf", "the_first_sum_is_asked_for_before_the_last_backward_ends",
    "sums_over_processes_of_several_devices",
]  # fmt: skip


@pytest.mark.parametrize("broken", ["wait aside", "wait for aside", "keep aside"])
@pytest.mark.parametrize("way", ASIDE)
def test_the_simulation_finds_what_is_left_out_beside_backward(way, broken):
    found = run("--broken", broken, *(word for name in ASIDE for word in ("--only", name)))
    for where in DEVICES[2:]:
        races = found[f"{way}, {where}"]["races"]
        assert races and all(" aside" in race for race in races), where


def test_the_backward_of_a_gradient_function_stays_in_its_worker():
    # Entering inference_mode(False) lets torch's engine use its own threads again, one for each GPU.
    seen = []

    def loss(w, x):
        seen.append(torch._C._is_multithreading_enabled())
        return (w * x).sum()

    fp.pmap(fp.grad(loss), devices=2)(torch.ones(3), torch.ones(4, 3))
    with torch.inference_mode():
        fp.pmap(fp.grad(loss), devices=2)(torch.ones(3), torch.ones(4, 3))
    assert seen == [False] * 4
    assert torch._C._is_multithreading_enabled()


OWNER = ROOT / "funcpar" / "_streams.py"
DEVICE_MODULES = {"cuda", "accelerator", "xpu", "mtia", "mps", "hpu"}
STREAM_NAMES = {
    "Stream", "Event", "StreamContext", "current_stream", "default_stream", "set_stream", "record_stream",
    "record_event", "wait_event", "wait_stream", "synchronize", "pin_memory", "set_device",
    "set_device_index", "device_index", "nccl",
}  # fmt: skip
# It says which devices there are, and orders no work.
ALLOWED = {("_devices.py", "torch.accelerator")}
SOURCES = [path for package in ("funcpar", "compat") for path in sorted((ROOT / package).rglob("*.py"))]


def stream_names(path: Path) -> set[str]:
    """Return what a file names of streams, events and the modules of devices: in code, not in text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DEVICE_MODULES:
                found.add(f"torch.{node.attr}")
            elif node.attr in STREAM_NAMES and ast.unparse(node.value) not in (
                "threading",
                "_random",
                "self",
            ):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            parts = {node.module.partition("torch.")[2].partition(".")[0], *(a.name for a in node.names)}
            found |= parts & (DEVICE_MODULES | STREAM_NAMES)
        elif isinstance(node, ast.keyword) and node.arg in STREAM_NAMES:
            found.add(node.arg)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_streams_and_events_have_one_owner(path):
    found = stream_names(path)
    if path == OWNER:
        assert {"Stream", "record_stream", "wait_event", "torch.accelerator", "torch.cuda"} <= found
    else:
        assert {name for name in found if (path.name, name) not in ALLOWED} == set()
