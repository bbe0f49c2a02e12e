"""Reports: the tables that people read, and the file that programs read."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BUSY_IDEAL, EAGER, IDEAL
from benchmarks.measure import Rounds, ratio
from benchmarks.models import Model


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def summarize_steps(rounds: Rounds, num_devices: int) -> dict[str, dict[str, float]]:
    """Return for each contender its median and its ratios to the ideals and to plain eager.

    ``work_over_ideal`` compares the processor time of all threads with the ideal's on every device.
    """
    found = rounds.seconds
    summary = {}
    for name, times in found.items():
        summary[name] = {
            "median_ms": 1e3 * statistics.median(times),
            "fastest_ms": 1e3 * min(times),
            "over_ideal": ratio(times, found[IDEAL]),
            "over_busy_ideal": ratio(times, found[BUSY_IDEAL]),
            "speedup_over_eager": ratio(found[EAGER], times),
            "work_over_ideal": ratio(rounds.work[name], rounds.work[IDEAL]) / num_devices,
            "work_ms": 1e3 * statistics.median(rounds.work[name]),
            "page_faults": statistics.median(rounds.faults[name]),
        }
    return summary


def step_table(model: Model, summary: dict[str, dict[str, float]], devices: int, load: float) -> str:
    """Return the table of one model's training step."""
    rows = [
        (
            name,
            f"{each['median_ms']:.3g}",
            f"{each['over_ideal']:.2f}",
            f"{each['over_busy_ideal']:.2f}",
            f"{each['speedup_over_eager']:.2f}",
            f"{each['work_over_ideal']:.2f}",
            f"{each['page_faults']:.0f}",
        )
        for name, each in summary.items()
    ]
    head = (
        "training step",
        "ms",
        "over ideal",
        "over busy ideal",
        "speedup",
        "work over ideal",
        "page faults",
    )
    title = f"{model.title}; {devices} devices; others used {load:.0%} of the machine"
    return f"{title}\n\n{_table(head, rows)}"


def call_table(records: Sequence[dict[str, Any]], load: float) -> str:
    """Return the table of what a call costs."""
    rows = [
        (
            each["function"],
            str(each["leaves"]),
            str(each["devices"]),
            f"{each['plain_us']:.1f}",
            f"{each['pmap_us']:.1f}",
            f"{each['own_us']:.1f}",
            f"{each['own_us_per_further_leaf']:.2f}",
            f"{each['over_plain']:.3g}" if each["function"] == "gradient" else "",
            f"{each['over_pool']:.2f}",
        )
        for each in records
    ]
    head = (
        "function", "leaves", "devices", "plain us", "pmap us", "own us", "own us per further leaf",
        "over plain", "over thread pool",
    )  # fmt: skip
    title = f"a call of a function that does next to nothing; others used {load:.0%} of the machine"
    return f"{title}\n\n{_table(head, rows)}"


def collective_table(record: dict[str, Any], load: float) -> str:
    """Return the table of what a sum over shards costs."""
    small, large = f"{record['small_leaves']} small leaves", f"{record['large_bytes'] >> 20} MB"
    over_out, over_new = record["large_over_add_with_out"], record["large_over_add"]
    rows = [
        (small, f"{record['small_own_us']:.0f}", f"{record['small_own_over_call']:.2f}", "", ""),
        (large, f"{1e3 * record['large_ms']:.0f}", "", f"{over_out:.2f}", f"{over_new:.2f}"),
    ]
    head = ("psum of", "us", "own over call", "over torch.add(out=)", "over torch.add")
    title = f"psum on {record['devices']} devices; others used {load:.0%} of the machine"
    return f"{title}\n\n{_table(head, rows)}"


def compat_table(record: dict[str, Any], load: float) -> str:
    """Return the table of what the wrapper costs over pmap."""
    rows = [(f"{record['model']}", f"{record['ratio']:.3f}", f"{record['ratio_of_work']:.3f}")]
    title = (
        f"compat.DataParallel over pmap; {record['devices']} devices; others used {load:.0%} of the machine"
    )
    return f"{title}\n\n{_table(('training step', 'seconds', 'work'), rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay a table out as Markdown, so that it can be pasted."""
    lines = [head, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [
        [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        for line in (head, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in aligned)
