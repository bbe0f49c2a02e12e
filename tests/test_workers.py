"""Workers are named, few, persistent, thread-local in what they set, and keep nothing."""

import functools
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcpar as fp
from tests.cycles import no_cycle_collection, settle

LIMIT = 60.0
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"
CALLS = 20_000 if THOROUGH else 1_200
ROWS = torch.arange(8.0)


def loss_fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x * w) ** 2).mean()


def shards_see(look: Callable[[], Any], devices: Any) -> list[Any]:
    return fp.parallel_call(look, [()] * len(devices), devices)


def worker_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("funcpar-")}


def comes_true(condition: Callable[[], bool], within: float = LIMIT) -> bool:
    """Wait for what a worker does after it has given its result: dropping references, ending."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def test_threads_are_named_by_device_and_kept() -> None:
    name = lambda: (threading.current_thread().name, threading.get_ident())
    first = shards_see(name, fp.devices())
    assert [shown for shown, _ in first] == [f"funcpar-cpu-{k}" for k in range(4)]
    assert shards_see(name, fp.devices()) == first
    assert shards_see(name, [3, 1]) == [first[3], first[1]]


def test_device_named_twice_has_two_threads() -> None:
    names = shards_see(lambda: threading.current_thread().name, [1, 1, 0, 1])
    assert names == ["funcpar-cpu-1", "funcpar-cpu-1.1", "funcpar-cpu-0", "funcpar-cpu-1.2"]


def test_workers_are_daemons_and_started_at_the_first_use_only() -> None:
    fp.set_cpu_devices(40, threads_per_device=1)
    before = worker_threads()
    shards_see(lambda: None, [38, 39])
    assert worker_threads() - before == {"funcpar-cpu-38", "funcpar-cpu-39"}
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("funcpar-"))


def test_number_of_threads_stays_bounded_and_replaced_workers_end() -> None:
    shards_see(lambda: None, fp.devices())
    count = len(worker_threads())
    for round_ in range(12):
        fp.set_cpu_devices(4, threads_per_device=1 + round_ % 3)
        for size in (2, 3, 4):
            fp.pmap(fp.grad(loss_fn), devices=size)(torch.tensor(2.0), ROWS)
    fp.set_cpu_devices(4, threads_per_device=1)
    shards_see(lambda: None, fp.devices())
    shown = lambda: [t.name for t in threading.enumerate() if t.name.startswith("funcpar-cpu-")]
    assert comes_true(lambda: len(shown()) <= count), shown()


def test_forward_and_backward_of_a_shard_run_in_one_thread() -> None:
    names: dict[str, list[str]] = {"forward": [], "backward": []}

    class Naming(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            names["forward"].append(threading.current_thread().name)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            names["backward"].append(threading.current_thread().name)
            return grad

    fp.pmap(Naming.apply, in_axes=0)(ROWS.clone().requires_grad_()).sum().backward()
    assert sorted(names["forward"]) == sorted(names["backward"]) == [f"funcpar-cpu-{k}" for k in range(4)]


def test_intra_op_threads_are_split_and_the_callers_are_untouched() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        fp.set_cpu_devices(3)
        assert [device.threads for device in fp.devices()] == [2, 2, 2]
        assert shards_see(torch.get_num_threads, fp.devices()) == [2, 2, 2]
        fp.set_cpu_devices(2, threads_per_device=5)
        assert shards_see(torch.get_num_threads, fp.devices()) == [5, 5]
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


def test_new_user_thread_gets_the_process_wide_number_of_threads() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    try:
        torch.set_num_threads(3)
        for threads in (1, 4, 2):  # Another number each time: new workers, which set their own.
            fp.set_cpu_devices(4, threads_per_device=threads)
            fp.pmap(fp.grad(loss_fn))(torch.tensor(2.0), ROWS)
            user = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            user.start()
            user.join(LIMIT)
    finally:
        torch.set_num_threads(before)
    assert found == [3, 3, 3]


def fused(w: torch.Tensor, x: torch.Tensor) -> Any:
    return fp.pmap(fp.value_and_grad(loss_fn))(w, x)


def by_backward(w: torch.Tensor, x: torch.Tensor) -> Any:
    leaf = w.requires_grad_()
    loss = fp.pmap(loss_fn)(leaf, x)
    loss.backward()
    return loss, leaf.grad


def second_order(w: torch.Tensor, x: torch.Tensor) -> Any:
    leaf = w.requires_grad_()
    (grad,) = torch.autograd.grad(fp.pmap(loss_fn)(leaf, x), leaf, create_graph=True)
    return grad, torch.autograd.grad(grad, leaf)[0]


def by_torch_func(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.func.grad(fp.pmap(loss_fn))(w, x), None


@pytest.mark.parametrize("call", [fused, by_backward, second_order, by_torch_func])
def test_inputs_and_outputs_die_with_the_callers_references(call: Callable[..., Any], devices) -> None:
    call(torch.tensor(2.0), torch.ones(8))  # What torch imports at the first use may keep frames.
    with no_cycle_collection():
        w, x = torch.tensor(2.0), torch.ones(8)
        out, grad = call(w, x)
        watched = [weakref.ref(each) for each in (w, x, out, grad) if each is not None]
        del w, x, out, grad
        assert comes_true(lambda: not any(ref() is not None for ref in watched), within=5)


@pytest.mark.parametrize("call", [fused, by_backward, second_order])  # torch.func itself makes cycles.
def test_calls_leave_nothing_for_the_cycle_collector(call: Callable[..., Any], devices) -> None:
    call(torch.tensor(2.0), ROWS)
    with no_cycle_collection():
        for _ in range(10):
            call(torch.tensor(2.0), ROWS)
        assert gc.collect() == 0


def test_function_and_what_it_closes_over_die_with_the_callers_references(devices) -> None:
    with no_cycle_collection():
        held = torch.ones(1)
        mapped = fp.pmap(functools.partial(torch.mul, held), in_axes=0)
        mapped(ROWS)
        watched = weakref.ref(held)
        del held, mapped
        assert comes_true(lambda: watched() is None, within=5)


def figures() -> tuple[int, int, int]:
    """Return the number of threads, the resident memory in KiB, and the number of open files."""
    status = Path("/proc/self/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident is not None
    return threading.active_count(), int(resident[1]), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_many_calls_leave_threads_memory_and_files_flat() -> None:
    calls = [fp.pmap(fp.value_and_grad(loss_fn)), fp.pmap(fp.grad(loss_fn), devices=2), fp.pmap(loss_fn)]
    leaf = torch.tensor(2.0, requires_grad=True)

    def run(count: int) -> None:
        for k in range(count // 3):
            calls[0](leaf.detach(), ROWS)
            calls[1](leaf.detach(), ROWS[: 1 + k % 8])
            torch.autograd.grad(calls[2](leaf, ROWS), leaf)

    run(600)
    settle()
    before = figures()
    run(CALLS)
    settle()
    after = figures()
    print(f"{CALLS} calls: threads, RSS in KiB, files: {before} -> {after}")
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 * 1024  # Half a KiB a call would be 10 MiB.
    assert after[2] == before[2]


def test_forked_child_has_workers_of_its_own_with_one_thread_each() -> None:
    fp.set_cpu_devices(2, threads_per_device=2)
    step = fp.pmap(fp.grad(loss_fn))
    want = step(torch.tensor(2.0), ROWS)
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads.
        child = os.fork()
    if child == 0:
        try:
            got = step(torch.tensor(2.0), ROWS)
            answer: Any = (got.tolist(), shards_see(torch.get_num_threads, fp.devices()))
        except BaseException:
            answer = traceback.format_exc()
        os.write(sender, pickle.dumps(answer))
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    answer = pickle.loads(said)
    assert isinstance(answer, tuple), answer
    got, threads = answer
    assert got == want.tolist()
    assert threads == [1, 1]
    assert shards_see(torch.get_num_threads, fp.devices()) == [2, 2]


class Mapped(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return fp.pmap(lambda x: x * k, in_axes=0)(ROWS), shards_see(torch.get_num_threads, fp.devices())[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_dataset_may_call_pmap_in_a_loaders_workers() -> None:
    fp.set_cpu_devices(3, threads_per_device=2)
    assert Mapped()[1][1] == 2
    loader = torch.utils.data.DataLoader(Mapped(), batch_size=2, num_workers=2, timeout=60)
    rows, threads = zip(*loader, strict=True)
    assert torch.equal(torch.cat(rows), torch.arange(6.0)[:, None] * ROWS)
    assert torch.cat(threads).tolist() == [1] * 6


IDLE_EXIT = """
import atexit, sys, threading, time

def last():  # Registered first, so it runs after what funcpar does at exit.
    names = [t.name for t in threading.enumerate() if t.name.startswith("funcpar")]
    print(f"ended in {time.monotonic() - start:.1f} s, left {names}")

atexit.register(last)
import torch, funcpar as fp
fp.set_cpu_devices(4, threads_per_device=1)
fp.pmap(lambda x: x + 1, in_axes=0)(torch.ones(8))
print("compiler", "torch._dynamo" in sys.modules)
start = time.monotonic()
"""
EXIT_WITH_A_BUSY_WORKER = """
import os, signal, threading, time, torch, funcpar as fp
fp.set_cpu_devices(4, threads_per_device=1)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    fp.pmap(lambda x: time.sleep(100) or x, in_axes=0)(torch.ones(8))
except KeyboardInterrupt:
    print("interrupted")
"""


@functools.cache
def run(script: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a script, and return what it printed and the seconds it took."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return done, time.monotonic() - start


@pytest.mark.parametrize(
    ("script", "shown"),
    [(IDLE_EXIT, r"ended in 0\.\d s, left \[\]"), (EXIT_WITH_A_BUSY_WORKER, "interrupted")],
    ids=["idle", "busy"],
)
def test_interpreter_ends_cleanly_and_soon(script: str, shown: str) -> None:
    done, seconds = run(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(shown, done.stdout)
    assert seconds < 30


def test_nothing_of_the_compiler_is_loaded_for_functions_that_are_not_compiled() -> None:
    assert "compiler False\n" in run(IDLE_EXIT)[0].stdout
