"""Plots: one picture per question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.contenders import EAGER
from benchmarks.growth import QUESTIONS

matplotlib.use("agg")  # Nobody looks while it draws.


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what was measured, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in _figures(result):
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150, bbox_inches="tight")
    return files


def _figures(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    if result["calls"]:
        yield "calls", _calls(result["calls"])
    for model, summary in result["steps"].items():
        yield f"step_{model}", _steps(model, summary)
    for name, points in result["growth"].items():
        yield name, _growth(name, points)
    for model, record in result["memory"].items():
        sizes = {name: each["peak_bytes"] / 2**20 for name, each in record["contenders"].items()}
        yield f"memory_{model}", _bars(f"{model}: peak of a step", "MiB over the process before", sizes)
    for model, record in result["messages"].items():
        sizes = {
            name: each["loopback_bytes"] / record["gradient_bytes"]
            for name, each in record["contenders"].items()
        }
        yield f"messages_{model}", _bars(f"{model}: sent by all processes", "copies of the gradients", sizes)


def _calls(records: list[dict[str, Any]]) -> Figure:
    labels = {
        f"{each['function']}, {each['leaves']} leaves, {each['devices']} dev.": each for each in records
    }
    return _bars("a call's own cost", "us", {name: each["own_us"] for name, each in labels.items()})


def _steps(model: str, summary: dict[str, dict[str, Any]]) -> Figure:
    """Show the time of a step over plain eager's, or in ms where that was not measured."""
    if EAGER in summary:
        spreads = {name: each["over"][EAGER] for name, each in summary.items()}
        label = "time over plain eager's, with quartiles"
    else:
        spreads = {name: _middle(each) for name, each in summary.items()}
        label = "ms, with quartiles"
    figure = _bars(f"{model}: a training step", label, {name: mid for name, (_, mid, _) in spreads.items()})
    (axes,) = figure.axes
    for row, (low, mid, high) in enumerate(spreads.values()):
        axes.errorbar(
            mid, row, xerr=[[max(0.0, mid - low)], [max(0.0, high - mid)]], color="black", capsize=3
        )
    return figure


def _middle(each: dict[str, Any]) -> tuple[float, float, float]:
    low, high = each["quartiles_ms"]
    return low, each["median_ms"], high


def _growth(name: str, points: list[dict[str, Any]]) -> Figure:
    figure, axes = _canvas(QUESTIONS[name].title)
    sizes = [point["size"] for point in points]
    for line in points[0]["us"]:
        axes.plot(sizes, [point["us"][line] for point in points], marker="o", label=line)
        low, high = zip(*(point["quartiles_us"][line] for point in points), strict=True)
        axes.fill_between(sizes, low, high, alpha=0.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(QUESTIONS[name].unit)
    axes.set_ylabel("us")
    axes.legend()
    return figure


def _bars(title: str, label: str, values: dict[str, float]) -> Figure:
    figure, axes = _canvas(title)
    figure.set_size_inches(7, 1 + 0.35 * len(values))
    axes.barh(list(values), list(values.values()), color="tab:blue")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def _canvas(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes
