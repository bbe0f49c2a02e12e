"""Measure pmap against the ideal alone: ``python -m benchmarks.pair wide_mlp cnn transformer``.

In the whole suite five contenders share one process, and which of them pays for page faults depends on
what the others left in the C library's memory. Here there are two, and the faults are shown.
"""

from __future__ import annotations

import contextlib
import statistics
import sys

import torch

from benchmarks.contenders import ideal, pmap_of_gradient
from benchmarks.measure import Effort, take_turns
from benchmarks.models import MODELS

CONTENDERS = {"ideal": ideal, "pmap": pmap_of_gradient}


def main(parts: list[str]) -> None:
    """Print one line for each training step: ratio of medians over rounds, and page faults a step."""
    devices = torch.get_num_threads()
    for part in parts or list(MODELS):
        with contextlib.ExitStack() as stack:
            runs = {
                name: stack.enter_context(enter(MODELS[part], devices)) for name, enter in CONTENDERS.items()
            }
            rounds = take_turns(runs, Effort(9, 0.5, 18), lambda name: None)
        pairs = zip(rounds.seconds["pmap"], rounds.seconds["ideal"], strict=True)
        ratio = statistics.median(mapped / plain for mapped, plain in pairs)
        faults = {name: round(statistics.median(values)) for name, values in rounds.faults.items()}
        load = statistics.median(rounds.loads)
        print(f"{part}: {devices} devices, over ideal {ratio:.2f}, page faults {faults}, load {load:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
