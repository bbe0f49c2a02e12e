"""What a psum costs, as rows for a table of benchmarks: ``python -m tests.psum_rows`` prints them."""

import statistics
import time
from typing import Any

import torch

import funcpar as fp

ENTRIES = (1, 10_000, 1_000_000)
DEVICES = (1, 2, 4)
CALLS = 20


def psum_rows(rounds: int = 7) -> list[dict[str, Any]]:
    """Return one row per number of entries and of devices: microseconds a psum, and as much by one thread.

    A shard makes ``CALLS`` sums in one pmapped call, so that the call itself does not count.
    """
    fp.set_cpu_devices(max(DEVICES), threads_per_device=1)
    found = []
    for entries in ENTRIES:
        for devices in DEVICES:
            x = torch.ones(devices, entries)
            calls = {
                "psum": _repeated(fp.psum, devices),
                "nothing": _repeated(lambda leaf: leaf, devices),
                "one_thread": lambda x: [x.sum(0) for _ in range(CALLS)],
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    start = time.perf_counter()
                    call(x)
                    times[name].append(time.perf_counter() - start)
            us = {name: 1e6 * statistics.median(taken) / CALLS for name, taken in times.items()}
            row = {"psum_us": us["psum"] - us["nothing"], "one_thread_us": us["one_thread"]}
            found.append({"entries": entries, "devices": devices, **row})
    return found


def _repeated(call: Any, devices: int) -> Any:
    def body(x: torch.Tensor) -> None:
        for _ in range(CALLS):
            call(x[0])

    return fp.pmap(body, in_axes=0, devices=devices)


if __name__ == "__main__":
    for row in psum_rows():
        print(*(f"{name} {value:.4g}" for name, value in row.items()), sep="  ")
