"""The benchmarks run, write what they promise, and their contenders all make the same step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import funcpar as fp
from benchmarks import compat, measure, report
from benchmarks.contenders import CONTENDERS, LEARNING_RATE, eager_step, functional_step
from benchmarks.measure import Cost, Effort, Rounds
from benchmarks.models import MODELS, Model

ROOT = Path(__file__).parents[1]
SMALL = {name: Model(name, model.title, 5, model.row, model.build) for name, model in MODELS.items()}
WAYS = {
    "pmap of the gradient": (fp.pmap, fp.value_and_grad),
    "gradient of the pmap": (fp.value_and_grad, fp.pmap),
}


def test_quick_run_writes_every_key(tmp_path):
    file = tmp_path / "new" / "benchmarks.json"
    options = ["--quick", "--rounds", "1", "--devices", "2"]
    options += [word for part in ("calls", "collectives", "mlp", "compat") for word in ("--only", part)]
    command = [sys.executable, "-m", "benchmarks", *options, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result.keys() == {
        "machine",
        "settings",
        "load_of_others",
        "calls",
        "collectives",
        "steps",
        "compat",
    }
    assert result["machine"].keys() == {"processor", "cores", "threads", "python", "torch"}
    assert result["settings"] == {"devices": 2, "rounds": 1}
    assert result["load_of_others"].keys() == {"calls", "collectives", "mlp", "compat"}
    assert {(each["function"], each["leaves"], each["devices"]) for each in result["calls"]} == {
        (function, leaves, devices)
        for function in ("nothing", "constant", "gradient")
        for leaves in (10, 300)
        for devices in (1, 2, 4)
    }
    figures = {"plain_us", "pmap_us", "own_us", "own_us_per_further_leaf", "over_plain", "over_pool"}
    assert all(each.keys() == {"function", "leaves", "devices", *figures} for each in result["calls"])
    assert result["steps"].keys() == {"mlp"}
    assert list(result["steps"]["mlp"]) == [each.name for each in CONTENDERS]
    positive = {"median_ms", "fastest_ms", "over_ideal", "over_busy_ideal", "speedup_over_eager"}
    figures = positive | {"work_over_ideal", "work_ms", "page_faults"}
    for each in result["steps"]["mlp"].values():
        assert each.keys() == figures
        assert min(value for key, value in each.items() if key in positive) > 0
    assert result["steps"]["mlp"]["ideal"]["over_ideal"] == 1.0
    assert result["collectives"].keys() == {
        *("devices", "small_leaves", "small_call_us", "small_own_us", "small_own_over_call"),
        *("large_bytes", "large_ms", "large_over_add_with_out", "large_over_add"),
    }
    assert min(value for key, value in result["collectives"].items() if "_own_" not in key) > 0
    assert result["compat"].keys() == {"model", "devices", "compat_s", "pmap_s", "ratio", "ratio_of_work"}
    assert result["compat"]["ratio"] > 0
    assert "| ResNet-18, 3x64x64, batch 32, norms in eval |" in done.stdout
    assert "| 64 MB " in done.stdout
    assert "| pmap(value_and_grad(loss)) |" in done.stdout
    assert "| nothing  |     10 |" in done.stdout


def test_help_tells_of_every_option_and_part():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    names = [
        "--quick",
        "--devices",
        "--rounds",
        "--only",
        "--json",
        "calls",
        "collectives",
        *MODELS,
        "compat",
    ]
    assert all(name in done.stdout for name in names)


def test_a_part_that_is_not_there_is_refused_with_those_that_are():
    command = [sys.executable, "-m", "benchmarks", "--only", "rnn"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'rnn' (choose from" in done.stderr


def test_compat_and_pmap_make_the_same_step_of_the_resnet():
    fp.set_cpu_devices(2, threads_per_device=1)
    small = Model("resnet18", "", 3, (3, 32, 32), compat.resnet18)
    wrapped, mapped = compat.compat_step(small), compat.pmap_step(small)
    for _ in range(2):
        torch.testing.assert_close(mapped(), wrapped(), rtol=1e-4, atol=1e-5)


def test_the_resnet_has_the_size_of_the_known_one():
    params = list(compat.resnet18().parameters())
    assert len(params) == 62
    assert sum(param.numel() for param in params) == 11_181_642  # 10 classes.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_contenders_make_the_step_that_plain_autograd_makes(name, way):
    plain, mapped = eager_step(SMALL[name], 5), functional_step(SMALL[name], 2, *WAYS[way])
    for _ in range(2):  # The second loss depends on the first update.
        torch.testing.assert_close(mapped(), plain())


def test_a_step_changes_the_parameters():
    step = eager_step(SMALL["mlp"], 5)
    first = step()
    assert LEARNING_RATE > 0
    assert step() < first


def test_turns_are_taken_in_rounds_that_begin_with_another_contender():
    order = []
    runs = {name: lambda count, name=name: [Cost(1.0, 2.0, 3.0)] * count for name in "abc"}
    rounds = measure.take_turns(runs, Effort(rounds=2, seconds=2.0, most_rounds=2), order.append)
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert rounds.seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0]}
    assert rounds.work == {"a": [2.0, 2.0], "b": [2.0, 2.0], "c": [2.0, 2.0]}
    assert rounds.faults == {"a": [3.0, 3.0], "b": [3.0, 3.0], "c": [3.0, 3.0]}


def test_rounds_that_others_disturb_are_measured_again_and_dropped(monkeypatch):
    loads = iter([0.5, 0.01, 0.2, 0.02])
    monkeypatch.setattr(measure.Load, "of_others", lambda self: next(loads))
    seconds = iter([9.0, 9.0, 5.0, 1.0, 6.0, 2.0])  # Two to warm up, then one a round.
    runs = {"only": lambda count: [Cost(next(seconds), 0.5, 7.0)]}
    rounds = measure.take_turns(runs, Effort(rounds=2, seconds=0.0, most_rounds=9), lambda name: None)
    assert rounds == Rounds([0.01, 0.02], {"only": [1.0, 2.0]}, {"only": [0.5, 0.5]}, {"only": [7.0, 7.0]})


def test_the_quietest_rounds_are_kept_where_no_round_is_quiet(monkeypatch):
    loads = iter([0.9, 0.3, 0.6])
    monkeypatch.setattr(measure.Load, "of_others", lambda self: next(loads))
    runs = {"only": lambda count: [Cost(1.0, 1.0, 0.0)] * count}
    rounds = measure.take_turns(runs, Effort(rounds=2, seconds=0.0, most_rounds=3), lambda name: None)
    assert rounds.loads == [0.3, 0.6]


def test_a_ratio_is_the_median_over_rounds_of_the_ratios():
    assert measure.ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0


def test_summary_compares_with_both_ideals_and_with_eager():
    seconds = {"eager": [4.0], "ideal": [1.0], "ideal, all cores busy": [2.0], "new": [3.0]}
    work = {"eager": [9.0], "ideal": [1.0], "ideal, all cores busy": [2.0], "new": [5.0]}
    faults = {"eager": [0.0], "ideal": [0.0], "ideal, all cores busy": [0.0], "new": [70.0]}
    summary = report.summarize_steps(Rounds([0.0], seconds, work, faults), num_devices=2)["new"]
    assert summary == {
        "median_ms": 3000.0,
        "fastest_ms": 3000.0,
        "over_ideal": 3.0,
        "over_busy_ideal": 1.5,
        "speedup_over_eager": 4.0 / 3.0,
        "work_over_ideal": 2.5,
        "work_ms": 5000.0,
        "page_faults": 70.0,
    }
