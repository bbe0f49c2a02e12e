"""Workers: one persistent thread per device, which runs shards in the caller's world.

A call hands one job to each of its workers, all at once, so that two calls that meet in
collectives are queued in the same order on every device and cannot wait for each other. Workers
start at the first use, live until the interpreter ends, keep no reference to a finished job, and
are made anew in a forked child.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import contextvars
import functools
import itertools
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from funcpar import _streams
from funcpar._devices import Device
from funcpar._intraop import can_take, taking
from funcpar._pages import keep_freed
from funcpar._watch import watched
from funcpar._world import World, is_checkpointed, is_in_op

Job: TypeAlias = Callable[[], None]


class Worker:
    """One thread with an inbox. ``None`` in the inbox ends it."""

    def __init__(self, name: str, device: Device, threads: int) -> None:
        self.device = device
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads = threads
        ready = threading.Event()
        self.thread = threading.Thread(target=self._loop, args=(ready,), name=name, daemon=True)
        self.thread.start()
        ready.wait(timeout=60)

    def _loop(self, ready: threading.Event) -> None:
        # A thread starts with the process-wide number of intra-op threads, and setting its own
        # also sets that; a thread that lives for a moment sets it back.
        process_wide = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        restore = threading.Thread(target=torch.set_num_threads, args=(process_wide,), daemon=True)
        restore.start()
        restore.join(timeout=60)
        # Backward stays in this thread and on its stream: two shards that shared an engine
        # thread would wait for each other in a collective's backward.
        torch._C._set_multithreading_enabled(False)
        _streams.open_stream(self.device)
        keep_freed()
        ready.set()
        while (job := self.inbox.get()) is not None:
            job()
            del job


class Pool:
    """The workers of this process, by device rank and by how often a call names that device."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads
        self.lock = threading.Lock()
        self.workers: dict[tuple[str, int, int], Worker] = {}
        self.idle: dict[tuple[str, int, int], list[Worker]] = {}
        self.num_relieving = 0

    def submit(self, devices: Sequence[Device], jobs: Sequence[Job]) -> None:
        """Queue one job per device, atomically."""
        named: Counter[int] = Counter()
        with self.lock:
            chosen = []
            for device in devices:
                chosen.append(self._worker(device, named[device.rank]))
                named[device.rank] += 1
            for worker, job in zip(chosen, jobs, strict=True):
                worker.inbox.put(job)

    def relieve(self, device: Device, job: Job) -> None:
        """Run a job in a thread that has nothing else to do, whatever is queued for the device.

        Somebody in a worker waits for it, so that in a queue it could come to wait for itself.
        """
        with self.lock:
            key = (device.torch_device.type, device.rank, self.threads or device.threads)
            idle = self.idle.setdefault(key, [])
            self.num_relieving += not idle
            worker = idle.pop() if idle else self._worker(device, -self.num_relieving)

        def last() -> None:
            job()
            idle.append(worker)

        worker.inbox.put(last)

    def _worker(self, device: Device, slot: int) -> Worker:
        key = (device.torch_device.type, device.rank, slot)
        threads = self.threads or device.threads
        worker = self.workers.get(key)
        if worker is not None and worker.threads != threads:
            worker.inbox.put(None)  # It ends after what is queued.
            worker = None
        if worker is None:
            name = f"funcpar-{key[0]}-{device.rank}" + (f".{slot}" if slot else "")
            worker = self.workers[key] = Worker(name, device, threads)
        return worker

    def close(self, timeout: float) -> None:
        """Let every worker end, in so many seconds. One inside native code is left behind: it is a daemon."""
        with self.lock:
            workers = list(self.workers.values())
            self.workers.clear()
        for worker in workers:
            worker.inbox.put(None)
        deadline = time.monotonic() + timeout
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            # Joined is not gone: a thread that autograd failed in has objects to destroy, which
            # takes the GIL, and aborts the process once the interpreter is being taken down.
            while (
                os.path.exists(f"/proc/self/task/{worker.thread.native_id}") and time.monotonic() < deadline
            ):
                time.sleep(0.0005)


_pool = Pool()


def _after_fork() -> None:
    # The parent's threads are not in the child, and OpenMP is not safe there with more than one
    # thread, which is also what DataLoader gives its workers.
    global _pool
    _pool = Pool(threads=1)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _pool.close(timeout=1.0))


class Relay:
    """The jobs of one call, done one after another in the caller's thread, until one waits for the rest."""

    def __init__(self) -> None:
        self._left: deque[tuple[Device, Job]] = deque()

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Relay | None:
        """Return one, unless shards here could not be given what they have in a worker."""
        if is_checkpointed() or is_in_op():
            return None
        return cls() if can_take(_pool.threads or devices[0].threads) else None

    def run(self, devices: Sequence[Device], jobs: Sequence[Job], world: World) -> None:
        """Do what is not handed on."""
        self._left.extend(zip(devices, jobs, strict=True))
        watch, threads = watched(self.hand_on), taking(_pool.threads or devices[0].threads)
        engine = torch._C._is_multithreading_enabled()
        try:
            # As in a worker.
            with watch, threads, torch.autograd.set_multithreading_enabled(False):
                while (job := self._next()) is not None:
                    job[1]()
        finally:  # Once more: Ctrl-C may have come as one of them ended.
            self._left.clear()
            world.leave(None)
            torch._C._set_multithreading_enabled(engine)
            threads.__exit__()
            watch.__exit__()

    def _next(self) -> tuple[Device, Job] | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def hand_on(self) -> None:
        """Let all that has not begun run at the same time, in other threads."""
        for job in list(self._left):  # Given away before it is taken, lest Ctrl-C in between loses one.
            _pool.relieve(*job)
            with contextlib.suppress(ValueError, IndexError):  # Taken, or others are, at this very moment.
                self._left.remove(job)


class Outcome:
    """What became of one shard: a value, or the exception it ended with."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None


def run(
    devices: Sequence[Device],
    bodies: Sequence[Callable[[], Any]],
    on_failure: Callable[[], None],
    order: _streams.Order | None = None,
    relay: Relay | None = None,
) -> list[Outcome]:
    """Run one body per device at the same time, each in its device's worker, and wait for all.

    With a relay they run here, one after another, until one waits for what has not begun. All see the
    caller's world. A body's exception is kept in its outcome, after ``on_failure`` was told so that it can
    release the others. When the caller is interrupted, bodies that have not started are dropped, and a
    later call queues behind those that have. ``order`` is that of the accelerators' work, None on CPU.
    """
    outcomes = [Outcome() for _ in bodies]
    finished = itertools.count(1)
    done = _thread.allocate_lock()
    done.acquire()
    world, dropped = World(), False

    def job(held: list[Any]) -> None:
        nonlocal dropped
        # The list is the caller's too, as are the queue and the frames that a traceback reaches:
        # emptied, none of them keeps a finished call alive, or leads from an error back to it.
        try:
            body, outcome, context = held.pop()
        except IndexError:  # Of a relay it may be given to two, of whom the first has it.
            return
        try:
            if not dropped:
                before = world.enter()
                try:
                    outcome.value = context.run(body if order is None else functools.partial(order.run, body))
                finally:
                    world.leave(before)
        except BaseException as error:
            outcome.error = error
            dropped |= isinstance(error, KeyboardInterrupt) and world.is_made_here()
            on_failure()
        finally:
            del body, outcome, context
            if next(finished) == len(bodies):
                done.release()

    held = [[(*pair, contextvars.copy_context())] for pair in zip(bodies, outcomes, strict=True)]
    jobs = [functools.partial(job, each) for each in held]
    try:
        if relay is None:
            _pool.submit(devices, jobs)
        else:
            relay.run(devices, jobs, world)
        if not dropped:  # By Ctrl-C in a shard here: nobody waits for those handed on.
            done.acquire()
    except BaseException:
        dropped = True
        on_failure()
        raise
    if order is not None:
        order.join()
    return outcomes
