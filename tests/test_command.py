"""``python -m funcpar``: what it says of a machine is measured, and a broken law is an error."""

import json
import re

import processes
import pytest
import torch

import funcpar as fp
from funcpar import __main__ as command
from funcpar import _trial
from funcpar._gain import Gain, call_us, hand_over_us
from funcpar._trial import WAYS, try_law

WITHOUT_THE_REST = """
import runpy, sys
for name in ("tqdm", "matplotlib", "sklearn", "jax", "pytest", "hypothesis", "benchmarks", "compat"):
    sys.modules[name] = None  # An import of it fails.
sys.argv[1:] = ["--json", "--seconds", "0.05", "--seed", "5"]
runpy.run_module("funcpar", run_name="__main__")
"""


def unweighted(fun, devices):
    """Average over shards as if all had the same number of rows, which is what the law forbids."""

    def mapped(params, batch):
        shards = [fun(params, rows) for rows in batch.tensor_split(devices) if len(rows)]
        if isinstance(shards[0], torch.Tensor):
            return torch.cat(shards) if shards[0].dim() else torch.stack(shards).mean()
        return fp.tree.map(lambda *leaves: torch.stack(leaves).mean(0), *shards)

    return mapped


def test_the_command_prints_one_json_object_with_torch_and_numpy_alone(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(WITHOUT_THE_REST)
    done = processes.program(str(path), FUNCPAR_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"].keys() == {"funcpar", "torch", "numpy", "python"}
    assert found["devices"] and {*found["devices"][0]} == {"name", "torch_device", "threads"}
    assert found["hand_over_us"] > 0 and found["call_us"] > 0
    law = found["law"]
    assert law["holds"] and law["failures"] == [] and law["seed"] == 5 and law["compared"] == list(WAYS)
    assert law["programs"] >= _trial.LEAST_PROGRAMS and law["leaves"] >= 7 * law["programs"]
    assert 0 < law["largest"] <= law["limit"] == 1e-12
    assert [each["model"].partition(":")[0] for each in found["gains"]] == ["small", "middle", "wide"]
    for each in found["gains"]:
        low, high = each["quartiles"]
        assert 0 < low <= each["gain"] <= high and each["rounds"] >= 3
        assert min(each["plain_ms"], each["pmap_ms"]) > 0


def quick(monkeypatch, *gains):
    """Let the command measure next to nothing."""
    monkeypatch.setattr(command, "measure_gains", lambda seconds: list(gains))
    monkeypatch.setattr(command, "HAND_OVER_S", 0.0)
    monkeypatch.setattr(command, "LAW_S", 0.0)


def test_the_command_prints_bars_and_leaves_devices_and_random_numbers_alone(monkeypatch, capsys):
    quick(monkeypatch, Gain("fast", 3.0, 2.0, 1.5, (1.2, 1.8), 9), Gain("slow", 2.0, 4.0, 0.5, (0.4, 1.1), 9))
    fp.set_cpu_devices(2, threads_per_device=3)
    before, state = fp.devices(), torch.get_rng_state()
    assert command.main([]) == 0
    assert fp.devices() == before and torch.equal(torch.get_rng_state(), state)
    text = capsys.readouterr().out
    assert "Devices: 2\n  cpu[0]  3 thread(s)\n  cpu[1]  3 thread(s)\n" in text
    assert re.search(
        r"^Law: holds\n  20 random programs \(--seed \d+\), 1 to 40 rows, 1 to 4 devices", text, re.M
    )
    assert f"    {'#' * 20}|{'#' * 10}{' ' * 10}  1.50 times as fast: pays\n" in text
    assert f"    {'#' * 10}{' ' * 10}|{' ' * 20}  0.50 times as fast: no clear difference\n" in text


def test_a_broken_law_is_shown_and_is_an_exit_code(monkeypatch, capsys):
    quick(monkeypatch, Gain("any", 1.0, 1.0, 1.0, (1.0, 1.0), 3))
    monkeypatch.setattr(_trial, "pmap", unweighted)
    assert command.main(["--seed", "1"]) == 1
    text = capsys.readouterr().out
    assert "Law: DOES NOT HOLD" in text
    assert re.search(
        r"  program \d+, .*, \d+ rows on [234] devices: value_and_grad\(pmap\(f\)\), result 0: off by", text
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda out: out * float("nan"), r"result \d+: off by nan"),
        (lambda out: out[None], r"result \d+: off by inf|raised ValueError: value_and_grad"),
        (lambda out: out.float(), r"result \d+: off by inf"),
    ],
)
def test_a_nan_another_shape_another_dtype_and_an_error_break_the_law(wrong, message, monkeypatch):
    right = _trial.pmap

    def broken(fun, devices):
        mapped = right(fun, devices=devices)
        return lambda *args: fp.tree.map(wrong, mapped(*args))

    monkeypatch.setattr(_trial, "pmap", broken)
    trial = try_law(0.0, seed=0)
    assert not trial.holds and len(trial.failures) >= trial.programs
    assert re.search(message, trial.failures[0]) and re.search(message, trial.failures[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_law_is_tried_on_the_same_programs_under_the_same_seed(dtype):
    first, again, other = (try_law(0.0, seed, dtype) for seed in (1, 1, 2))
    assert first == again and first.holds and other.holds
    assert (first.leaves, first.largest) != (other.leaves, other.largest)


def test_a_hand_over_is_part_of_a_call():
    assert 1 < hand_over_us(0.05) < 1e6 and 1 < call_us(0.05) < 1e6


@pytest.mark.parametrize(
    ("quartiles", "verdict"),
    [((1.1, 1.3), "pays"), ((0.9, 1.1), "no clear difference"), ((0.7, 0.9), "loses")],
)
def test_a_verdict_needs_rounds_that_agree(quartiles, verdict):
    assert Gain("any", 1.0, 1.0, 1.0, quartiles, 5).verdict == verdict


def test_one_device_is_told_that_there_is_nothing_to_gain():
    gains = [Gain("any", 1.0, 1.0, 1.0, (0.9, 1.1), 5)]
    for count in (1, 2):
        found = {"devices": [{}] * count, "intra_op_threads": 1, "load_average": None, "cores": 1}
        assert ("On one device there is nothing to gain" in command._gain_text(gains, found)) is (count == 1)
