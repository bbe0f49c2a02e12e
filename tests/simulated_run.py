"""Run programs on the simulated accelerator, and say as JSON what became of each.

``--broken wait`` and ``--broken keep`` leave out all waits for events, or all records of tensors on
streams, so that tests can see that races are found. ``"wait aside"`` and ``"keep aside"`` are those of the
second streams of workers alone, ``"wait for aside"`` are the waits of others for those.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections import Counter
from typing import Any

import simulated_counts
import simulated_draws
import simulated_sums
import simulated_ways
import torch
from simulated_common import DEVICES, books, recorder

PROGRAMS = {
    **simulated_ways.PROGRAMS,
    **simulated_sums.PROGRAMS,
    **simulated_counts.PROGRAMS,
    **simulated_draws.PROGRAMS,
}


def outcome(name: str, devices: list[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    books.clear()
    gc.freeze()  # What is here already need not be looked through again.
    error = ""
    try:
        PROGRAMS[name](devices)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    gc.collect()
    books.is_closed = False
    asked = Counter(entry[0] for entry in books.log)
    return {"error": error[:2000], "races": books.races[:5], "waits": len(books.waits), "asked": dict(asked)}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # Torch warns of itself.
    parser = argparse.ArgumentParser()
    parser.add_argument("--broken", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    args = parser.parse_args()
    recorder.broken = frozenset(args.broken)
    found = {
        f"{name}, {where}": outcome(name, devices)
        for name in PROGRAMS if not args.only or name in args.only
        for where, devices in DEVICES.items()
    }  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
