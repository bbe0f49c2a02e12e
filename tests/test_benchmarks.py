"""The benchmarks: contenders compute the same gradients, turns are fair, reports say what was measured."""

import dataclasses
import functools
import json
import os
import re
import sys

import processes
import pytest
import torch
from torch import nn

from benchmarks import command, growth, measure, memory, report
from benchmarks.contenders import COMPILED_EAGER, CONTENDERS, EAGER, IDEAL, JAX, PMAP, Place, eager
from benchmarks.measure import Cost, Effort, Rounds
from benchmarks.models import MODELS, NUM_CLASSES, Model
from benchmarks.processes import Team, teams
from benchmarks.resnet import RESNET18, resnet18

SMALL = {name: dataclasses.replace(model, rows=4) for name, model in MODELS.items()}


def expected(model: Model, rows: slice) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and the gradients of these rows by nothing but the module and autograd."""
    module = model.module()
    inputs, labels = (each[rows] for each in model.batch(model.rows))
    loss = torch.nn.functional.cross_entropy(module(inputs), labels)
    return loss.detach(), list(torch.autograd.grad(loss, list(module.parameters())))


def results(team: Team) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    return team.ask("result")


LINEAR = Model("linear", "", 4, (3,), functools.partial(nn.Linear, 3, NUM_CLASSES))
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
# What is not the module itself: with each model in a long campaign, with some models always.
WRITTEN_ANEW = (PMAP, JAX) if THOROUGH else (JAX,)
# Each takes seconds to compile.
COMPILED = [
    name for name, each in CONTENDERS.items() if each.compiles and (THOROUGH or name != COMPILED_EAGER)
]
CASES = {
    # Wrappers know nothing of the model; what JAX computes was written anew for each.
    **{(name, "mlp"): SMALL["mlp"] for name, each in CONTENDERS.items() if not each.compiles},
    **{(name, model): SMALL[model] for model in SMALL for name in WRITTEN_ANEW if name in CONTENDERS},
    **{(name, "linear"): LINEAR for name in COMPILED},
}


@pytest.mark.parametrize(("name", "model"), CASES)
def test_every_contender_computes_the_gradients_that_plain_autograd_computes(name, model):
    contender, model = CONTENDERS[name], CASES[name, model]
    loss, grads = expected(model, slice(2) if contender.shard_only else slice(None))
    with teams([contender], model, devices=2) as found:
        by_process = results(found[name])
        assert len(by_process) == (2 if contender.per_device else 1)
        # Wrappers of one process per device leave each with the loss of its own rows.
        losses = torch.stack([each for each, _ in by_process])
        torch.testing.assert_close(losses.mean(), loss, rtol=1e-5, atol=1e-6)
        for _, found_grads in by_process:
            torch.testing.assert_close(found_grads, grads, rtol=1e-4, atol=1e-5)
        (cost,) = found[name].run(1)
        assert cost.seconds > 0 and cost.work >= 0


def test_compat_and_pmap_compute_the_gradients_of_the_resnet():
    model = dataclasses.replace(RESNET18, rows=3, row=(3, 32, 32))
    loss, grads = expected(model, slice(None))
    names = (PMAP, "compat.DataParallel")
    with teams([CONTENDERS[name] for name in names], model, devices=2) as found:
        for name in names:
            ((found_loss, found_grads),) = results(found[name])
            torch.testing.assert_close(found_loss, loss)
            torch.testing.assert_close(found_grads, grads, rtol=1e-4, atol=1e-5)


def test_the_resnet_has_the_size_of_the_known_one():
    params = list(resnet18().parameters())
    assert len(params) == 62
    assert sum(param.numel() for param in params) == 11_181_642  # 10 classes.


def failing(model: Model, place: Place):
    raise ValueError("no such step")


def dying(model: Model, place: Place):
    sys.exit(3)


@pytest.mark.parametrize(("make", "message"), [(failing, "failed:\n(.|\n)*no such step"), (dying, "ended")])
def test_a_contender_that_fails_is_named(make, message):
    contender = dataclasses.replace(CONTENDERS[EAGER], name="new", make=make)
    with (
        teams([contender], SMALL["mlp"], 2) as found,
        pytest.raises(RuntimeError, match=rf"new: process 0 {message}"),
    ):
        found["new"].run(1)


def holding(megabytes: int, model: Model, place: Place):
    return lambda: torch.ones(megabytes << 18)  # Written to, and dropped at once.


def test_memory_is_the_peak_of_a_step_over_what_was_there_before():
    names = ("eager", "more")
    contenders = [
        dataclasses.replace(CONTENDERS[EAGER], name=name, make=functools.partial(holding, size))
        for name, size in zip(names, (64, 192), strict=True)
    ]
    (record,) = memory.measure_memory(contenders, [SMALL["wide_mlp"]], 2, print)[0].values()
    found = {name: each["peak_bytes"] / 2**20 for name, each in record["contenders"].items()}
    assert found["eager"] == pytest.approx(64, abs=16)
    assert found["more"] == pytest.approx(192, abs=16)
    more = record["contenders"]["more"]
    assert more["over_eager_bytes"] == pytest.approx(128 * 2**20, rel=0.2)
    assert more["over_eager_copies"] == more["over_eager_bytes"] / record["gradient_bytes"]


def test_quick_run_writes_every_key_and_draws_every_question(tmp_path, capsys):
    file, folder = tmp_path / "new" / "benchmarks.json", tmp_path / "plots"
    parts = ("calls", "collectives", "mlp", "depth", "memory", "messages")
    chosen = (EAGER, IDEAL, PMAP, "torch DDP, gloo")
    arguments = [
        *("--quick", "--rounds", "1", "--devices", "2", "--json", str(file), "--plots", str(folder)),
        *(word for part in parts for word in ("--only", part)),
        *(word for name in chosen for word in ("--contender", name)),
    ]
    command.main(arguments)
    printed, bars = capsys.readouterr()
    assert bars == ""  # Nobody looks.
    result = json.loads(file.read_text())
    assert result["machine"].keys() == {"processor", "cores", "threads", "python", "torch", "jax"}
    assert result["settings"] == {"devices": 2, "rounds": 1, "quick": True}
    for each in ("load_of_others", "load_average", "seconds"):
        assert result[each].keys() == set(parts)
    assert {(each["function"], each["leaves"], each["devices"]) for each in result["calls"]} == {
        (function, leaves, devices)
        for function in ("nothing", "constant", "gradient")
        for leaves in (10, 300)
        for devices in (1, 2, 4)
    }
    assert min(value for key, value in result["collectives"].items() if "_own_" not in key) > 0
    check_steps(result["steps"], chosen)
    points = result["growth"]["depth"]
    assert [each["size"] for each in points] == list(growth.QUESTIONS["depth"].quick_sizes())
    assert all(min(each["us"].values()) > 0 and each["over_plain"] > 0 for each in points)
    whole = {EAGER, PMAP, "torch DDP, gloo"}
    assert result["memory"]["wide_mlp"]["contenders"].keys() == whole
    check_messages(result["messages"]["wide_mlp"])
    drawn = {"calls", "step_mlp", "depth", "memory_wide_mlp", "messages_wide_mlp"}
    assert {each.stem for each in folder.iterdir()} == drawn
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in folder.iterdir())
    for text in ("| nothing  |     10 |", "| 64 MB ", f"| {PMAP} |", "| layers |", f"| wide_mlp | {PMAP} "):
        assert text in printed


def check_messages(record):
    """Check that DDP sends one copy of the gradients for each process, and nobody else anything."""
    (found,) = record["contenders"].values()
    assert record["contenders"].keys() == {"torch DDP, gloo"}
    size = sum(param.numel() for param in MODELS["wide_mlp"].module().parameters())
    assert found["collective_bytes"] == record["gradient_bytes"] == 4 * size
    assert found["loopback_bytes"] >= 2 * record["gradient_bytes"]


def check_steps(steps, chosen):
    """Check what is said of the training steps: every pair is compared, and nobody with himself."""
    assert steps.keys() == {"mlp"}
    assert list(steps["mlp"]) == list(chosen)
    for name, each in steps["mlp"].items():
        low, high = each["quartiles_ms"]
        assert 0 < each["fastest_ms"] <= low <= each["median_ms"] <= high
        assert each["over"].keys() == set(chosen) and each["over"][name] == [1.0, 1.0, 1.0]
        assert all(0 < first <= median <= third for first, median, third in each["over"].values())
        assert each["work_ms"] > 0 and each["work_over_ideal"] > 0 and each["page_faults"] >= 0


@pytest.mark.parametrize("question", growth.QUESTIONS.values(), ids=growth.QUESTIONS)
def test_growth_is_measured_at_every_size(question):
    sizes = question.sizes[:2]
    points, _ = growth.measure_growth(question, sizes, 2, Effort(1, 0.0, 1), lambda name: None)
    assert [each["size"] for each in points] == list(sizes)
    assert all(min(each["us"].values()) > 0 and each["over_plain"] > 0 for each in points)


def test_the_command_tells_of_every_option_part_and_contender():
    done = processes.program("-m", "benchmarks", "--help")
    assert done.returncode == 0, done.stderr
    options = ("--quick", "--devices", "--rounds", "--only", "--contender", "--json", "--plots")
    text = " ".join(done.stdout.split())
    assert all(name in text for name in (*options, *command.PARTS, *CONTENDERS))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "rnn"], "invalid choice: 'rnn' \\(choose from"),
        (["--contender", "horovod"], "invalid choice: 'horovod' \\(choose from"),
        (["--rounds", "0"], "argument --rounds: 0 is less than 1"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(words, message, capsys):
    with pytest.raises(SystemExit):
        command._parse(words)
    assert re.search(message, capsys.readouterr().err)


def test_a_quick_run_leaves_out_what_takes_long_unless_it_is_named():
    options = command._parse(["--quick"])
    parts = command._parts(options)
    assert {part.name for part in parts} == set(command.PARTS)
    assert options.only == [part for part in command.PARTS if part != "resnet18"]
    taken = {name for name, each in CONTENDERS.items() if command._takes_part(each, options)}
    assert taken == {name for name, each in CONTENDERS.items() if not each.compiles}
    named = command._parse(["--quick", "--only", "resnet18", "--contender", "torch.compile(eager)"])
    assert named.only == ["resnet18"] and command._takes_part(CONTENDERS["torch.compile(eager)"], named)


def test_a_contender_of_even_shards_is_left_out_where_shards_are_uneven():
    even = dataclasses.replace(CONTENDERS[EAGER], even_rows=True)
    assert [even.takes(SMALL["mlp"], devices) for devices in (1, 2, 3, 4)] == [True, True, False, True]
    assert CONTENDERS[EAGER].takes(SMALL["mlp"], 3)


def test_a_step_leaves_the_parameters_as_they_are():
    step = eager(SMALL["mlp"], Place(1))
    assert step()[0] == step()[0]


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
    seconds = iter([9.0, 5.0, 1.0, 6.0, 2.0])  # One to learn how long a step takes, then one a round.
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


def test_a_first_step_that_is_slow_does_not_decide_how_many_there_are_in_a_turn():
    seconds = iter([1.5, 0.5])
    assert measure._count(lambda count: [Cost(next(seconds), 0.0, 0.0)], 2.0) == 4


def test_quartiles_enclose_the_middle_half():
    assert measure.quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == (2.0, 4.0)
    assert measure.quartiles([7.0]) == (7.0, 7.0)


def test_summary_compares_every_pair():
    seconds = {"eager": [4.0, 4.0], "ideal": [1.0, 1.0], "new": [2.0, 3.0]}
    work = {"eager": [9.0, 9.0], "ideal": [1.0, 1.0], "new": [5.0, 5.0]}
    faults = {"eager": [0.0, 0.0], "ideal": [0.0, 0.0], "new": [70.0, 70.0]}
    summary = report.summarize_steps(Rounds([0.0, 0.0], seconds, work, faults), num_devices=2)["new"]
    assert summary == {
        "median_ms": 2500.0,
        "quartiles_ms": (2250.0, 2750.0),
        "fastest_ms": 2000.0,
        "over": {
            "eager": (0.5625, 0.625, 0.6875),
            "ideal": (2.25, 2.5, 2.75),
            "new": (1.0, 1.0, 1.0),
        },
        "work_over_ideal": 2.5,
        "work_ms": 5000.0,
        "page_faults": 70.0,
    }


def test_a_step_table_compares_with_the_peers_that_took_part():
    seconds = {EAGER: [4.0], JAX: [6.0], PMAP: [2.0]}
    zeros = {name: [0.0] for name in seconds}
    table = report.step_table("title", report.summarize_steps(Rounds([0.0], seconds, zeros, zeros), 2))
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert head == [
        *("training step", "ms", "quartiles", "speedup over eager", "speedup over JAX pmap"),
        *("work over ideal", "page faults"),
    ]
    assert rows[2] == [PMAP, "2e+03", "2e+03 to 2e+03", "2.00", "3.00", "", "0"]
