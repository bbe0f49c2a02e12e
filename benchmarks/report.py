"""Reports: the tables that people read, and the file that programs read."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BUSY_IDEAL, COMPILED_EAGER, CONTENDERS, DDP, EAGER, IDEAL, JAX
from benchmarks.measure import Rounds, quartiles, ratio


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jax": importlib.metadata.version("jax") if JAX in CONTENDERS else None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def summarize_steps(rounds: Rounds, num_devices: int) -> dict[str, dict[str, Any]]:
    """Return for each contender its median and its ratios to all contenders.

    ``over`` has for each peer the first quartile, the median and the third quartile over rounds of this
    contender's seconds over the peer's. ``work_over_ideal`` compares the processor time of all threads with
    the ideal's on every device.
    """
    found = rounds.seconds
    summary = {}
    for name, times in found.items():
        first, third = quartiles(times)
        work = ratio(rounds.work[name], rounds.work[IDEAL]) / num_devices if IDEAL in found else None
        summary[name] = {
            "median_ms": 1e3 * statistics.median(times),
            "quartiles_ms": (1e3 * first, 1e3 * third),
            "fastest_ms": 1e3 * min(times),
            "over": {peer: _spread(times, others) for peer, others in found.items()},
            "work_over_ideal": work,
            "work_ms": 1e3 * statistics.median(rounds.work[name]),
            "page_faults": statistics.median(rounds.faults[name]),
        }
    return summary


def _spread(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    first, third = quartiles([one / other for one, other in zip(ones, others, strict=True)])
    return first, ratio(ones, others), third


def step_table(title: str, summary: dict[str, dict[str, Any]]) -> str:
    """Return the table of one model's training step."""
    over = [peer for peer in (IDEAL, BUSY_IDEAL) if peer in summary]
    speedups = [peer for peer in (EAGER, DDP, JAX, COMPILED_EAGER) if peer in summary]
    rows = []
    for name, each in summary.items():
        low, high = each["quartiles_ms"]
        work = each["work_over_ideal"]
        rows.append(
            (
                name,
                f"{each['median_ms']:.3g}",
                f"{low:.3g} to {high:.3g}",
                *(f"{each['over'][peer][1]:.2f}" for peer in over),
                *(f"{summary[peer]['over'][name][1]:.2f}" for peer in speedups),
                "" if work is None else f"{work:.2f}",
                f"{each['page_faults']:.0f}",
            )
        )
    head = (
        "training step", "ms", "quartiles", *(f"over {peer}" for peer in over),
        *(f"speedup over {peer}" for peer in speedups), "work over ideal", "page faults",
    )  # fmt: skip
    return f"{title}\n\n{_table(head, rows)}"


def growth_table(unit: str, title: str, points: Sequence[dict[str, Any]]) -> str:
    """Return the table of how calls grow."""
    lines = list(points[0]["us"])
    rows = [
        (
            f"{each['size']:,}",
            *(f"{each['us'][line]:.4g}" for line in lines),
            "" if each["over_plain"] is None else f"{each['over_plain']:.2f}",
        )
        for each in points
    ]
    return f"{title}\n\n{_table((unit, *(f'{line} us' for line in lines), 'pmap over plain'), rows)}"


def memory_table(title: str, record: dict[str, Any]) -> str:
    """Return the table of what is resident at the peak of a step."""
    rows = [
        (
            model,
            name,
            f"{found['gradient_bytes'] / 2**20:.1f}",
            f"{each['peak_bytes'] / 2**20:.1f}",
            "" if each["over_eager_bytes"] is None else f"{each['over_eager_bytes'] / 2**20:+.1f}",
            "" if each["over_eager_copies"] is None else f"{each['over_eager_copies']:+.2f}",
        )
        for model, found in record.items()
        for name, each in found["contenders"].items()
    ]
    head = (
        "model",
        "training step",
        "gradients MiB",
        "peak MiB",
        "over eager MiB",
        "in copies of the gradients",
    )
    return f"{title}\n\n{_table(head, rows, names=2)}"


def message_table(title: str, record: dict[str, Any]) -> str:
    """Return the table of what processes send each other in a step."""
    rows = [
        (
            model,
            name,
            f"{found['gradient_bytes']:,}",
            f"{each['collective_bytes']:,.0f}",
            f"{each['collective_bytes'] / found['gradient_bytes']:.4f}",
            f"{each['loopback_bytes'] / found['gradient_bytes']:.3f}",
        )
        for model, found in record.items()
        for name, each in found["contenders"].items()
    ]
    head = (
        "model", "training step", "gradient bytes", "bytes to collectives, a process", "over gradients",
        "all loopback over gradients",
    )  # fmt: skip
    return f"{title}\n\n{_table(head, rows, names=2)}"


def call_table(title: str, records: Sequence[dict[str, Any]]) -> str:
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
    return f"{title}\n\n{_table(head, rows)}"


def collective_table(title: str, record: dict[str, Any]) -> str:
    """Return the table of what a sum over shards costs."""
    small, large = f"{record['small_leaves']} small leaves", f"{record['large_bytes'] >> 20} MB"
    over_out, over_new = record["large_over_add_with_out"], record["large_over_add"]
    rows = [
        (small, f"{record['small_own_us']:.0f}", f"{record['small_own_over_call']:.2f}", "", ""),
        (large, f"{1e3 * record['large_ms']:.0f}", "", f"{over_out:.2f}", f"{over_new:.2f}"),
    ]
    head = ("psum of", "us", "own over call", "over torch.add(out=)", "over torch.add")
    return f"{title}\n\n{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """Lay a table out as Markdown, so that it can be pasted: columns of names, then of figures."""
    widths = [max(len(line[k]) for line in (head, *rows)) for k in range(len(head))]
    rule = [("-" * width) if k < names else ("-" * (width - 1) + ":") for k, width in enumerate(widths)]
    aligned = [
        [
            cell.ljust(width) if k < names else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in (head, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in aligned)
