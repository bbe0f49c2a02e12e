"""The command: measure what is asked for, print tables, write a file.

python -m benchmarks                      everything, some minutes
python -m benchmarks --quick              everything, less exactly, under a minute
python -m benchmarks --only cnn           one part
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import calls, collectives, compat, report
from benchmarks.contenders import CONTENDERS
from benchmarks.measure import Effort, take_turns
from benchmarks.models import MODELS, Model

CALLS, COLLECTIVES, COMPAT = "calls", "collectives", "compat"
PARTS = (CALLS, COLLECTIVES, *MODELS, COMPAT)
DESCRIPTION = """\
Measure what pmap costs. Tables go to stdout, all figures to a JSON file. The parts:

  calls         a call of a function that does next to nothing
  collectives   psum of small leaves, and of 64 MB
  mlp, wide_mlp, cnn, transformer
                a training step, by pmap and by plain autograd
  compat        a training step of ResNet-18, by compat.DataParallel and by pmap

Rounds in which other processes used more than 5 % of the machine are measured again, up to three
times as many, and the quietest are kept; not with --quick.
"""


def main() -> None:
    """Run the command."""
    options = _parse()
    num_rounds = options.rounds or (3 if options.quick else 15)
    most = num_rounds if options.quick else 3 * num_rounds
    steps = Effort(num_rounds, 0.1 if options.quick else 0.5, most)
    short = Effort(num_rounds, 0.005 if options.quick else 0.05, most)
    parts = [name for name in PARTS if name in (options.only or PARTS)]
    result: dict[str, Any] = {
        "machine": report.describe_machine(),
        "settings": {"devices": options.devices, "rounds": num_rounds},
        "load_of_others": {},
        "calls": [],
        "collectives": {},
        "steps": {},
        "compat": {},
    }
    with tqdm(total=sum(_num_turns(part, steps, short) for part in parts), unit="turn") as bar:

        def on_turn(name: str) -> None:
            bar.update()
            bar.set_postfix_str(name)

        for part in parts:
            load, table = _measure(part, options.devices, steps, short, on_turn, result)
            result["load_of_others"][part] = load
            bar.write(table + "\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.json}")


def _measure(
    part: str,
    devices: int,
    steps: Effort,
    short: Effort,
    on_turn: Callable[[str], object],
    result: dict[str, Any],
) -> tuple[float, str]:
    """Measure one part into ``result``; return the load by others and the table."""
    if part == CALLS:
        result[part], load = calls.measure_calls(short, on_turn)
        return load, report.call_table(result[part], load)
    if part == COLLECTIVES:
        result[part], load = collectives.measure_collectives(steps, on_turn)
        return load, report.collective_table(result[part], load)
    if part == COMPAT:
        result[part], load = compat.measure_compat(devices, steps, on_turn)
        return load, report.compat_table(result[part], load)
    model = MODELS[part]
    summary, load = _measure_steps(model, devices, steps, on_turn)
    result["steps"][part] = summary
    return load, report.step_table(model, summary, devices, load)


def _measure_steps(
    model: Model, devices: int, effort: Effort, on_turn: Callable[[str], object]
) -> tuple[dict[str, dict[str, float]], float]:
    with contextlib.ExitStack() as stack:
        runs = {each.name: stack.enter_context(each.enter(model, devices)) for each in CONTENDERS}
        rounds = take_turns(runs, effort, on_turn)
    return report.summarize_steps(rounds, devices), statistics.median(rounds.loads)


def _num_turns(part: str, steps: Effort, short: Effort) -> int:
    if part == CALLS:
        return calls.num_turns(short)
    if part == COLLECTIVES:
        return collectives.num_turns(steps)
    if part == COMPAT:
        return compat.num_turns(steps)
    return steps.most_rounds * len(CONTENDERS)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="measure less exactly, in under a minute")
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
        "--json", type=Path, default=Path("out/benchmarks.json"), metavar="FILE",
        help="the file to write (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    main()
