"""What funcpar finds and what it gains on this machine: ``python -m funcpar``.

Lists devices and versions, measures a hand-over to the workers, tries the law on random programs, and
compares a training step of three models with plain autograd. Exits with 1 if the law does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from funcpar._devices import devices, set_cpu_devices
from funcpar._gain import Gain, call_us, hand_over_us, measure_gains
from funcpar._trial import MOST_ROWS, WAYS, Trial, try_law

LAW_S = 1.0
GAIN_S = 2.0
HAND_OVER_S = 0.3
# So many virtual devices at least try the law, since on one there is nothing to go wrong.
LEAST_DEVICES = 4
BAR = 40
MOST_FAILURES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return what the process exits with."""
    parser = argparse.ArgumentParser(
        prog="python -m funcpar", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--seed", type=int, help="try the law on these random programs (default: others every time)"
    )
    parser.add_argument(
        "--seconds", type=float, default=GAIN_S, help="how long to compare each model (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    found = _machine()
    found["hand_over_us"], found["call_us"] = hand_over_us(HAND_OVER_S), call_us(HAND_OVER_S)
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    trial = _try_law(seed)
    gains = measure_gains(options.seconds)
    if options.json:
        found["law"] = {**dataclasses.asdict(trial), "compared": WAYS, "holds": trial.holds}
        found["gains"] = [{**dataclasses.asdict(each), "verdict": each.verdict} for each in gains]
        print(json.dumps(found, indent=1))
    else:
        print("\n\n".join((_machine_text(found), _law_text(trial), _gain_text(gains, found))))
    return 0 if trial.holds else 1


def _machine() -> dict[str, Any]:
    try:
        version = importlib.metadata.version("funcpar")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "versions": {
            "funcpar": version,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "intra_op_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "devices": [
            {"name": repr(each), "torch_device": str(each.torch_device), "threads": each.threads}
            for each in devices()
        ],
    }


def _try_law(seed: int) -> Trial:
    """Try the law on the devices there are, or on more virtual ones where they are virtual."""
    before = devices()
    virtual = all(each.is_cpu for each in before)
    if virtual:
        set_cpu_devices(max(LEAST_DEVICES, len(before)), threads_per_device=1)
    try:
        # Apple's accelerators have no float64.
        single = any(each.torch_device.type == "mps" for each in before)
        return try_law(LAW_S, seed, torch.float32 if single else torch.float64)
    finally:
        if virtual:
            set_cpu_devices(len(before), before[0].threads)


def _machine_text(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    load = "" if found["load_average"] is None else f", load average {found['load_average']:.1f}"
    return "\n".join(
        [
            versions,
            f"{found['system']}, {found['cores']} cores, {found['intra_op_threads']} intra-op threads{load}",
            "",
            f"Devices: {len(found['devices'])}",
            *(f"  {each['name']}  {each['threads']} thread(s)" for each in found["devices"]),
            "",
            f"Hand-over to all of them and back: {found['hand_over_us']:.0f} us; "
            f"a pmapped call of nothing, with 10 leaves: {found['call_us']:.0f} us",
        ]
    )


def _law_text(trial: Trial) -> str:
    return "\n".join(
        [
            f"Law: {'holds' if trial.holds else 'DOES NOT HOLD'}",
            f"  {trial.programs} random programs (--seed {trial.seed}), 1 to {MOST_ROWS} rows, "
            f"1 to {trial.devices} devices: {trial.leaves} values and gradients",
            f"  of {', '.join(WAYS)} against plain autograd in {trial.dtype}",
            f"  the largest difference is {trial.largest:.1e} of its leaf's largest entry, "
            f"the limit {trial.limit:.0e}",
            *(f"  {failure}" for failure in trial.failures[:MOST_FAILURES]),
        ]
    )


def _gain_text(gains: Sequence[Gain], found: dict[str, Any]) -> str:
    scale = BAR / max(2.0, *(each.gain for each in gains))
    lines = [
        f"Gain of pmap(value_and_grad(f)) on {len(found['devices'])} device(s) over plain autograd with "
        f"{found['intra_op_threads']} thread(s):"
    ]
    for each in gains:
        low, high = each.quartiles
        bar = ("#" * round(scale * each.gain)).ljust(BAR)
        one = round(scale)
        lines += [
            f"  {each.model}",
            f"    {bar[:one]}|{bar[one:]}  {each.gain:.2f} times as fast: {each.verdict}",
            f"    medians {each.plain_ms:.3g} ms -> {each.pmap_ms:.3g} ms; in turns, {each.rounds} rounds: "
            f"median {each.gain:.2f}, quartiles {low:.2f} to {high:.2f}",
        ]
    lines.append("  The bar | is plain autograd: it pays where the line goes beyond.")
    if len(found["devices"]) == 1:
        lines.append("  On one device there is nothing to gain: FUNCPAR_CPU_DEVICES=2 makes two of the CPU.")
    if found["load_average"] is not None and found["load_average"] > found["cores"] / 2:
        lines.append("  The machine was busy when this began, and figures of a busy machine say little.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
