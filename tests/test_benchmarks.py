"""The benchmarks run, write what they promise, and their contenders all make the same step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import funcpar as fp
from benchmarks import measure, report
from benchmarks.contenders import CONTENDERS, LEARNING_RATE, eager_step, functional_step
from benchmarks.measure import Effort, Rounds
from benchmarks.models import MODELS, Model

ROOT = Path(__file__).parents[1]
SMALL = {name: Model(name, model.title, 5, model.row, model.build) for name, model in MODELS.items()}
WAYS = {
    "pmap of the gradient": (fp.pmap, fp.value_and_grad),
    "gradient of the pmap": (fp.value_and_grad, fp.pmap),
}


def test_quick_run_writes_every_key(tmp_path):
    file = tmp_path / "new" / "benchmarks.json"
    options = ["--quick", "--rounds", "1", "--devices", "2", "--only", "calls", "--only", "mlp"]
    command = [sys.executable, "-m", "benchmarks", *options, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result.keys() == {"machine", "settings", "load_of_others", "calls", "steps"}
    assert result["machine"].keys() == {"processor", "cores", "threads", "python", "torch"}
    assert result["settings"] == {"devices": 2, "rounds": 1}
    assert result["load_of_others"].keys() == {"calls", "mlp"}
    assert {(each["function"], each["leaves"], each["devices"]) for each in result["calls"]} == {
        (function, leaves, devices)
        for function in ("nothing", "constant", "gradient")
        for leaves in (10, 300)
        for devices in (1, 2, 4)
    }
    figures = {"plain_us", "pmap_us", "own_us", "own_us_per_further_leaf"}
    assert all(each.keys() == {"function", "leaves", "devices", *figures} for each in result["calls"])
    assert result["steps"].keys() == {"mlp"}
    assert list(result["steps"]["mlp"]) == [each.name for each in CONTENDERS]
    figures = {"median_ms", "fastest_ms", "over_ideal", "over_busy_ideal"}
    figures |= {"speedup_over_eager", "work_over_ideal"}
    for each in result["steps"]["mlp"].values():
        assert each.keys() == figures
        assert min(value for key, value in each.items() if key != "work_over_ideal") > 0
    assert result["steps"]["mlp"]["ideal"]["over_ideal"] == 1.0
    assert "| pmap(value_and_grad(loss)) |" in done.stdout
    assert "| nothing  |     10 |" in done.stdout


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
    runs = {name: lambda count, name=name: [(1.0, 2.0)] * count for name in "abc"}
    rounds = measure.take_turns(runs, Effort(rounds=2, seconds=2.0, most_rounds=2), order.append)
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert rounds.seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0]}
    assert rounds.work == {"a": [2.0, 2.0], "b": [2.0, 2.0], "c": [2.0, 2.0]}


def test_rounds_that_others_disturb_are_measured_again_and_dropped(monkeypatch):
    loads = iter([0.5, 0.01, 0.2, 0.02])
    monkeypatch.setattr(measure.Load, "of_others", lambda self: next(loads))
    seconds = iter([9.0, 9.0, 5.0, 1.0, 6.0, 2.0])  # Two to warm up, then one a round.
    runs = {"only": lambda count: [(next(seconds), 0.5)]}
    rounds = measure.take_turns(runs, Effort(rounds=2, seconds=0.0, most_rounds=9), lambda name: None)
    assert rounds == Rounds([0.01, 0.02], {"only": [1.0, 2.0]}, {"only": [0.5, 0.5]})


def test_the_quietest_rounds_are_kept_where_no_round_is_quiet(monkeypatch):
    loads = iter([0.9, 0.3, 0.6])
    monkeypatch.setattr(measure.Load, "of_others", lambda self: next(loads))
    runs = {"only": lambda count: [(1.0, 1.0)] * count}
    rounds = measure.take_turns(runs, Effort(rounds=2, seconds=0.0, most_rounds=3), lambda name: None)
    assert rounds.loads == [0.3, 0.6]


def test_a_ratio_is_the_median_over_rounds_of_the_ratios():
    assert measure.ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0


def test_summary_compares_with_both_ideals_and_with_eager():
    seconds = {"eager": [4.0], "ideal": [1.0], "ideal, all cores busy": [2.0], "new": [3.0]}
    work = {"eager": [9.0], "ideal": [1.0], "ideal, all cores busy": [2.0], "new": [5.0]}
    summary = report.summarize_steps(Rounds([0.0], seconds, work), num_devices=2)["new"]
    assert summary == {
        "median_ms": 3000.0,
        "fastest_ms": 3000.0,
        "over_ideal": 3.0,
        "over_busy_ideal": 1.5,
        "speedup_over_eager": 4.0 / 3.0,
        "work_over_ideal": 2.5,
    }
