"""What only a GPU can show: ``python -m benchmarks.gpu``, under four minutes; exit status 2 without one.

1. The law: values and gradients on one GPU, on one named twice, and on all, against the CPU in float64.
2. Waits of the host in steady steps, of which there must be none: torch's sync debug mode counts those
   that torch knows of, the profiler those that the CUDA runtime was asked for.
3. Overlap: for how long kernels of two shards ran at the same time on two streams of one GPU.
4. Time of a training step: pmap against plain eager on one GPU, and against the replay of a CUDA graph.

Nothing of this has been run on a GPU so far; ``tests/test_benchmarks_gpu.py`` runs on CPU what can.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import funcpar as fp
from benchmarks.models import MODELS, loss_of

Interval = tuple[float, float]

ROUNDS, STEPS, WARM_UP = 5, 10, 3
ROWS = 4096
# Calls of the CUDA runtime in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
SYNC_WARNING = "synchronizing CUDA operation"
SLEEP_CYCLES = 20_000_000


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]).tanh() - y).square().mean()


def check_law(devices: Sequence[Any]) -> float:
    """Return by how much values and gradients are off at most, relative to a leaf's largest entry."""
    torch.manual_seed(0)
    params = {
        "w": torch.randn(64, 300, dtype=torch.float64),
        "b": torch.randn(300, dtype=torch.float64),
    }
    off = 0.0
    for rows in (1, 2, 13, 1000):
        x, y = torch.randn(rows, 64, dtype=torch.float64), torch.randn(rows, 300, dtype=torch.float64)
        wanted = fp.value_and_grad(loss)(params, x, y)
        fused = fp.pmap(fp.value_and_grad(loss), devices=devices)
        joint = fp.value_and_grad(fp.pmap(loss, devices=devices))
        for found in (fused(params, x, y), joint(params, x, y), fused(fp.stage(params, devices), x, y)):
            off = max(off, difference(found, wanted))
        centred = fp.pmap(lambda x: x - fp.pmean(x.mean(0)), in_axes=0, devices=devices)
        off = max(off, difference(centred(x), x - x.mean(0)))
    return off


def difference(found: Any, wanted: Any) -> float:
    """Return the largest difference of two trees, relative to the leaf's largest entry."""
    pairs = zip(fp.tree.leaves(found), fp.tree.leaves(wanted), strict=True)
    return max(
        float((one.cpu() - other).abs().max()) / max(float(other.abs().max()), 1e-30) for one, other in pairs
    )


def make_step(devices: Sequence[int] | None, device: str) -> Callable[[], Any]:
    """Return a training step of the wide MLP, on pmap's devices or as plain eager code (None)."""
    model = MODELS["wide_mlp"]
    apply, params = fp.functionalize(model.module().to(device))
    x, y = (tensor.to(device) for tensor in model.batch(ROWS))
    gradient = fp.value_and_grad(lambda p, x, y: loss_of(apply(p, x), y))
    mapped = gradient if devices is None else fp.pmap(gradient, devices=devices)

    def step() -> Any:
        value, grads = mapped(params, x, y)
        names = list(params)
        torch._foreach_add_([params[n] for n in names], [grads[n] for n in names], alpha=-1e-3)
        return value

    return step


def make_replay(device: str) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of the plain step."""
    step = make_step(None, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def count_waits(step: Callable[[], Any]) -> tuple[int, dict[str, int]]:
    """Return in how many places torch made the host wait in steady steps, and what the runtime was asked."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(STEPS):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
    # The profiler itself waits once, when it ends.
    asked = waits_in(event.name for event in profiler.events())
    return sum(SYNC_WARNING in str(warning.message) for warning in caught), asked


def waits_in(names: Iterable[str]) -> dict[str, int]:
    """Count the calls in which the host waits."""
    found: dict[str, int] = defaultdict(int)
    for name in names:
        if name in WAITS:
            found[name] += 1
    return dict(found)


def measure_overlap() -> tuple[int, float]:
    """Return on how many streams two shards' kernels ran, and the share of the time that they overlap."""
    torch_func: Any = torch.cuda._sleep

    def slow(x: Tensor) -> Tensor:
        torch_func(SLEEP_CYCLES)
        return x * 2

    mapped = fp.pmap(slow, in_axes=0, devices=[0, 0])
    x = torch.ones(2, 4, device="cuda:0")
    mapped(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        mapped(x)
        torch.cuda.synchronize()
    by_stream: dict[int, list[Interval]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA and "spin" in event.name():
            start = event.start_ns() / 1e3
            by_stream[event.device_resource_id()].append((start, start + event.duration_ns() / 1e3))
    return len(by_stream), overlap(by_stream)


def overlap(by_stream: Mapping[Any, Sequence[Interval]]) -> float:
    """Return the share of the busy time in which more than one stream is busy."""
    edges: list[tuple[float, int]] = []
    for intervals in by_stream.values():
        for start, stop in _joined(intervals):
            edges += [(start, 1), (stop, -1)]
    busy = both = 0.0
    active, last = 0, 0.0
    for when, change in sorted(edges):
        busy += (when - last) * (active > 0)
        both += (when - last) * (active > 1)
        active, last = active + change, when
    return both / busy if busy else 0.0


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Join what touches, so that one stream never counts twice."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def time_steps(steps: Mapping[str, Callable[[], Any]], wait: Callable[[], None]) -> dict[str, float]:
    """Return milliseconds of each step, the median over rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(ROUNDS + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            wait()
            if turn:  # The first round warms up.
                found[name].append(1e3 * (time.perf_counter() - start) / STEPS)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> int:
    """Print everything; return the exit status: 0 all as promised, 1 not, 2 no GPU."""
    if not torch.cuda.is_available():
        print("torch.cuda finds no GPU, so nothing was checked and nothing measured.")
        return 2
    count = torch.cuda.device_count()
    torch.backends.cuda.matmul.allow_tf32 = False
    ways = {"one": [0], "one twice": [0, 0]} | ({"all": list(range(count))} if count > 1 else {})
    print(f"{count} x {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    failed = False
    for name, devices in ways.items():
        off = check_law(devices)
        failed |= not off < 1e-11
        print(f"law on {name}: off by {off:.2g} at most")
    for name, devices in ways.items():
        waits, asked = count_waits(make_step(devices, "cuda:0"))
        failed |= waits > 0
        print(
            f"host waits on {name} in {STEPS} steady steps: {waits} by torch; the runtime was asked {asked}"
        )
    streams, share = measure_overlap()
    failed |= streams < 2 or share < 0.5
    print(f"two shards on one GPU: {streams} streams, busy together {share:.0%} of the time\n")
    steps = {"plain eager": make_step(None, "cuda:0"), "CUDA graph replay": make_replay("cuda:0")}
    steps |= {f"pmap on {name}": make_step(devices, "cuda:0") for name, devices in ways.items()}
    times = time_steps(steps, torch.cuda.synchronize)
    print(f"| step of the wide MLP, {ROWS} rows | ms | over plain eager |\n| --- | ---: | ---: |")
    for name, each in times.items():
        print(f"| {name} | {each:.3g} | {each / times['plain eager']:.2f} |")
    print("\nnot as promised" if failed else "\nall as promised")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
