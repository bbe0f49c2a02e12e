"""Measure compiled pmap against pmap alone: ``python -m benchmarks.compiled mlp transformer``."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Iterator

import torch

import funcpar as fp
from benchmarks.contenders import Run, functional_step, pmap_of_gradient, timed
from benchmarks.measure import Effort, take_turns
from benchmarks.models import MODELS, Model


@contextlib.contextmanager
def compiled(model: Model, num_devices: int) -> Iterator[Run]:
    """``pmap(value_and_grad(loss), compile=True)``."""
    mapped = functools.partial(fp.pmap, compile=True)
    yield timed(functional_step(model, num_devices, mapped, fp.value_and_grad))


CONTENDERS = {"pmap": pmap_of_gradient, "compiled": compiled}


def main(parts: list[str]) -> None:
    """Print one line for each training step: median over rounds of the ratios, and the time to compile."""
    devices = torch.get_num_threads()
    for part in parts or list(MODELS):
        with contextlib.ExitStack() as stack:
            runs = {
                name: stack.enter_context(enter(MODELS[part], devices)) for name, enter in CONTENDERS.items()
            }
            start = time.perf_counter()
            runs["compiled"](1)
            first = time.perf_counter() - start
            rounds = take_turns(runs, Effort(9, 0.5, 18), lambda name: None)
        pairs = zip(rounds.seconds["compiled"], rounds.seconds["pmap"], strict=True)
        ratio = statistics.median(plain / mapped for mapped, plain in pairs)
        load = statistics.median(rounds.loads)
        print(f"{part}: {devices} devices, {ratio:.2f} times as fast as pmap, compiled in {first:.0f} s, "
              f"load {load:.0%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
