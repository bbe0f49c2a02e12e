"""The command: measure what is asked for, print tables, write figures and plots.

python -m benchmarks                      everything, some 20 minutes
python -m benchmarks --quick              less exactly, no ResNet, nothing compiled: less than a minute
python -m benchmarks --only cnn           one part
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from benchmarks import calls, collectives, growth, memory, plots, report
from benchmarks.contenders import CONTENDERS, DATA_PARALLEL, EAGER, PMAP, Contender
from benchmarks.measure import Effort, take_turns
from benchmarks.models import MODELS, Model
from benchmarks.processes import CAN_MEASURE_MEMORY, teams
from benchmarks.resnet import RESNET18

DESCRIPTION = """\
Measure what pmap costs, beside plain torch, its own wrappers and JAX. Tables go to stdout, all
figures to a JSON file. The parts:

  calls         a call of a function that does next to nothing
  collectives   psum of small leaves, and of 64 MB
  mlp, wide_mlp, cnn, transformer
                a training step by all contenders, each in processes of its own
  resnet18      a training step of ResNet-18, plain, by compat.DataParallel and by pmap
  rows, parameters, leaves, devices, depth
                how a call grows with them
  memory        the peak of the resident size in a step
  messages      bytes that processes send each other in a step

Rounds in which other processes used more than 5 % of the machine are measured again, up to three
times as many, and the quietest are kept; not with --quick, which also leaves out the ResNet and
the contenders that compile with torch, unless they are named.
"""

PARTS = (
    "calls", "collectives", *MODELS, RESNET18.name, *growth.QUESTIONS, "memory", "messages",
)  # fmt: skip
OnTurn: TypeAlias = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Part:
    """One question.

    Attributes:
        name: For ``--only``.
        section: Where its figures are in the file; with ``key``, under that key there.
        title: What its table is called.
        measure: Returns the figures and the load by others, given what is to be told of every turn.
        table: Lays the figures out, given the title.
        turns: How often it tells, at most.
    """

    name: str
    section: str
    key: str | None
    title: str
    measure: Callable[[OnTurn], tuple[Any, float]]
    table: Callable[[str, Any], str]
    turns: int


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    parts = [part for part in _parts(options) if part.name in options.only]
    result: dict[str, Any] = {
        "machine": report.describe_machine(),
        "settings": {"devices": options.devices, "rounds": options.rounds, "quick": options.quick},
        "load_of_others": {},
        "load_average": {},
        "seconds": {},
        "calls": [],
        "collectives": {},
        "steps": {},
        "growth": {},
        "memory": {},
        "messages": {},
    }
    with tqdm(total=sum(part.turns for part in parts), unit="turn", disable=None) as bar:

        def on_turn(name: str) -> None:
            bar.update()
            bar.set_postfix_str(name)

        for part in parts:
            average, start = os.getloadavg()[0], time.monotonic()
            figures, others = part.measure(on_turn)
            result["load_average"][part.name], result["load_of_others"][part.name] = average, others
            result["seconds"][part.name] = time.monotonic() - start
            if part.key is None:
                result[part.section] = figures
            else:
                result[part.section][part.key] = figures
            title = (
                f"{part.title}; others used {others:.0%} of the machine, load average {average:.1f} before"
            )
            bar.write(part.table(title, figures) + "\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.json}")
    if options.plots:
        for file in plots.draw(result, options.plots):
            print(f"drawn in {file}")


def _parts(options: argparse.Namespace) -> list[Part]:
    most = options.rounds if options.quick else 3 * options.rounds
    steps = Effort(options.rounds, 0.1 if options.quick else 0.5, most)
    short = Effort(options.rounds, 0.005 if options.quick else 0.05, most)
    chosen = [each for each in CONTENDERS.values() if _takes_part(each, options)]
    of_wrapper = [each for each in chosen if each.name in (EAGER, PMAP, DATA_PARALLEL)]
    return [
        Part(
            "calls", "calls", None, "a call of a function that does next to nothing",
            functools.partial(calls.measure_calls, short), report.call_table, calls.num_turns(short),
        ),
        Part(
            "collectives", "collectives", None, f"psum on {collectives.DEVICES} devices",
            functools.partial(collectives.measure_collectives, steps), report.collective_table,
            collectives.num_turns(steps),
        ),
        *(_step_part(model, chosen, options.devices, steps) for model in MODELS.values()),
        _step_part(RESNET18, of_wrapper, options.devices, steps),
        *(_growth_part(each, options, short) for each in growth.QUESTIONS.values()),
        _memory_part("memory", memory.measure_memory, report.memory_table, chosen, options),
        _memory_part("messages", memory.measure_messages, report.message_table, chosen, options),
    ]  # fmt: skip


def _takes_part(contender: Contender, options: argparse.Namespace) -> bool:
    if options.contender:
        return contender.name in options.contender
    return not (options.quick and contender.compiles)


def _step_part(model: Model, chosen: list[Contender], devices: int, effort: Effort) -> Part:
    contenders = [each for each in chosen if each.takes(model, devices)]

    def measure(on_turn: OnTurn) -> tuple[Any, float]:
        with teams(contenders, model, devices) as found:
            rounds = take_turns({name: team.run for name, team in found.items()}, effort, on_turn)
        return report.summarize_steps(rounds, devices), statistics.median(rounds.loads)

    turns = effort.most_rounds * len(contenders)
    title = f"{model.title}; {devices} devices"
    return Part(model.name, "steps", model.name, title, measure, report.step_table, turns)


def _growth_part(question: growth.Question, options: argparse.Namespace, effort: Effort) -> Part:
    sizes = question.quick_sizes() if options.quick else question.sizes
    measure = functools.partial(growth.measure_growth, question, sizes, options.devices, effort)
    table = functools.partial(report.growth_table, question.unit)
    where = "" if question.unit == "devices" else f"; {options.devices} devices"
    title = f"{question.title}{where}"
    return Part(
        question.name, "growth", question.name, title, measure, table, 3 * len(sizes) * effort.most_rounds
    )


def _memory_part(
    name: str,
    measure: Callable[..., tuple[Any, float]],
    table: Callable[[str, Any], str],
    contenders: list[Contender],
    options: argparse.Namespace,
) -> Part:
    models = [MODELS[each] for each in (("wide_mlp",) if options.quick else memory.MODEL_NAMES)]
    title = f"{name} of a training step; {options.devices} devices"
    measure = functools.partial(measure, contenders, models, options.devices)
    return Part(name, name, None, title, measure, table, len(models) * len(contenders))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="measure less exactly, in less than a minute")
    parser.add_argument(
        "--devices", type=_positive, default=torch.get_num_threads(), metavar="COUNT",
        help="virtual devices of a training step (default: torch's number of threads, here %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_positive, metavar="COUNT", help="turns of each contender (default: 15, quick 3)"
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="PART",
        help="measure this part alone; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--contender", action="append", choices=list(CONTENDERS), metavar="NAME",
        help="let only this one take training steps; may be repeated; here there are: "
        + "; ".join(name.replace("%", "%%") for name in CONTENDERS),
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, default=Path("out/benchmarks.json"), metavar="FILE",
        help="the file to write (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw one PNG per question into this folder"
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else 15)
    left_out = {RESNET18.name} if options.quick else set()
    if not CAN_MEASURE_MEMORY:
        left_out.add("memory")
    options.only = options.only or [part for part in PARTS if part not in left_out]
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
