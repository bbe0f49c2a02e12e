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

from benchmarks import report
from benchmarks.calls import measure_calls, num_turns
from benchmarks.contenders import CONTENDERS
from benchmarks.measure import Effort, Rounds, take_turns
from benchmarks.models import MODELS, Model

CALLS = "calls"


def main() -> None:
    """Run the command."""
    options = _parse()
    num_rounds = options.rounds or (3 if options.quick else 15)
    most = num_rounds if options.quick else 3 * num_rounds
    steps = Effort(num_rounds, 0.1 if options.quick else 0.5, most)
    calls = Effort(num_rounds, 0.005 if options.quick else 0.05, most)
    parts = options.only or [CALLS, *MODELS]
    models = [MODELS[name] for name in parts if name != CALLS]
    total = len(models) * most * len(CONTENDERS) + (num_turns(calls) if CALLS in parts else 0)
    result: dict[str, Any] = {
        "machine": report.describe_machine(),
        "settings": {"devices": options.devices, "rounds": num_rounds},
        "load_of_others": {},
        "calls": [],
        "steps": {},
    }
    with tqdm(total=total, unit="turn", dynamic_ncols=True) as bar:

        def on_turn(name: str) -> None:
            bar.update()
            bar.set_postfix_str(name)

        if CALLS in parts:
            result["calls"], load = measure_calls(calls, on_turn)
            result["load_of_others"][CALLS] = load
            bar.write(report.call_table(result["calls"], load) + "\n")
        for model in models:
            rounds = _measure_steps(model, options.devices, steps, on_turn)
            summary, load = report.summarize_steps(rounds, options.devices), statistics.median(rounds.loads)
            result["steps"][model.name], result["load_of_others"][model.name] = summary, load
            bar.write(report.step_table(model, summary, options.devices, load) + "\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.json}")


def _measure_steps(model: Model, devices: int, effort: Effort, on_turn: Callable[[str], object]) -> Rounds:
    with contextlib.ExitStack() as stack:
        runs = {each.name: stack.enter_context(each.enter(model, devices)) for each in CONTENDERS}
        return take_turns(runs, effort, on_turn)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what pmap costs.")
    parser.add_argument("--quick", action="store_true", help="measure less exactly, in under a minute")
    parser.add_argument(
        "--devices", type=_positive, default=torch.get_num_threads(), help="of a training step"
    )
    parser.add_argument("--rounds", type=_positive, help="turns of each contender (default 15, quick 3)")
    parser.add_argument(
        "--only", action="append", choices=[CALLS, *MODELS], metavar="NAME",
        help=f"measure this part alone; may be repeated: {', '.join([CALLS, *MODELS])}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks.json"), help="the file to write")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    main()
