"""Contenders: ways to make one training step. A new one is a function here and a line in the table.

A step is the loss, its gradients, and an update of plain parameters in place. A contender takes a
model and a number of devices, and gives a context with a run: see ``measure``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, TypeAlias

import torch
from torch import Tensor

import funcpar as fp
from benchmarks.measure import Cost, Run, timed
from benchmarks.models import MODELS, Model, loss_of

Step: TypeAlias = Callable[[], Tensor]

LEARNING_RATE = 1e-3
LIMIT_S = 300


def eager_step(model: Model, rows: int) -> Step:
    """Return a step of plain autograd on the module itself: nothing is functional, nothing is copied."""
    module = model.module()
    params = list(module.parameters())
    inputs, labels = model.batch(rows)

    def step() -> Tensor:
        loss = loss_of(module(inputs), labels)
        update(params, torch.autograd.grad(loss, params))
        return loss.detach()

    return step


def functional_step(model: Model, num_devices: int, outer: Any, inner: Any) -> Step:
    """Return a step of two transforms of a functional loss, on the whole batch."""
    apply, params = fp.functionalize(model.module())
    inputs, labels = model.batch(model.rows)

    def loss_fn(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return loss_of(apply(params, inputs), labels)

    fp.set_cpu_devices(num_devices, threads_per_device=1)
    gradient = outer(inner(loss_fn))

    def step() -> Tensor:
        loss, grads = gradient(params, inputs, labels)
        update(list(params.values()), list(grads.values()))
        return loss  # type: ignore[no-any-return]

    return step


@torch.no_grad()
def update(params: Any, grads: Any) -> None:
    """Take a step of gradient descent, in place."""
    torch._foreach_add_(params, grads, alpha=-LEARNING_RATE)


@contextlib.contextmanager
def eager(model: Model, num_devices: int) -> Iterator[Run]:
    """Plain autograd, the whole batch, as many intra-op threads as there are devices."""
    yield timed(eager_step(model, model.rows), threads=num_devices)


@contextlib.contextmanager
def ideal(model: Model, num_devices: int) -> Iterator[Run]:
    """Plain autograd, one shard's rows, one thread, nothing else on the machine."""
    yield timed(eager_step(model, _shard_rows(model, num_devices)), threads=1)


@contextlib.contextmanager
def busy_ideal(model: Model, num_devices: int) -> Iterator[Run]:
    """The ideal in one process per device at the same time: cores share memory, cache and power."""
    context = multiprocessing.get_context("spawn")  # A forked child would inherit torch's threads.
    barrier = context.Barrier(num_devices)
    pipes, processes = [], []
    try:
        for _ in range(num_devices):
            pipe, theirs = context.Pipe()
            args = (theirs, barrier, model.name, _shard_rows(model, num_devices))
            processes.append(context.Process(target=_serve_ideal, args=args, daemon=True))
            processes[-1].start()
            pipes.append(pipe)

        def run(count: int) -> list[Cost]:
            for pipe in pipes:
                pipe.send(count)
            found = [_receive(pipe) for pipe in pipes]
            return [
                Cost(
                    statistics.fmean(each.seconds for each in step),
                    sum(each.work for each in step),
                    sum(each.faults for each in step),
                )
                for step in zip(*found, strict=True)
            ]

        yield run
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve_ideal(pipe: Connection, barrier: Barrier, name: str, rows: int) -> None:
    """Run the ideal on demand, together with the other processes."""
    torch.set_num_threads(1)
    run = timed(eager_step(MODELS[name], rows))
    with contextlib.suppress(EOFError):
        while True:
            count = pipe.recv()
            barrier.wait(LIMIT_S)
            pipe.send(run(count))


def _receive(pipe: Connection) -> list[Cost]:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a process of the busy ideal did not answer within {LIMIT_S} seconds")
    found: list[Cost] = pipe.recv()
    return found


@contextlib.contextmanager
def pmap_of_gradient(model: Model, num_devices: int) -> Iterator[Run]:
    """``pmap(value_and_grad(loss))``: each device runs forward and backward, and gradients are reduced."""
    yield timed(functional_step(model, num_devices, fp.pmap, fp.value_and_grad))


@contextlib.contextmanager
def gradient_of_pmap(model: Model, num_devices: int) -> Iterator[Run]:
    """``value_and_grad(pmap(loss))``: the forward and the backward are one parallel call each."""
    yield timed(functional_step(model, num_devices, fp.value_and_grad, fp.pmap))


def _shard_rows(model: Model, num_devices: int) -> int:
    return -(-model.rows // num_devices)  # The largest shard decides.


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the table: a name and what enters the measurement."""

    name: str
    enter: Callable[[Model, int], AbstractContextManager[Run]]


IDEAL = "ideal"
BUSY_IDEAL = "ideal, all cores busy"
EAGER = "eager"
CONTENDERS = (
    Contender(EAGER, eager),
    Contender(IDEAL, ideal),
    Contender(BUSY_IDEAL, busy_ideal),
    Contender("pmap(value_and_grad(loss))", pmap_of_gradient),
    Contender("value_and_grad(pmap(loss))", gradient_of_pmap),
)
