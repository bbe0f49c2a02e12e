"""Contenders: ways to take one training step. A new one is a function here and a line in the table.

A step is zero gradients, forward, backward: the loss of the batch and its gradients, and no optimizer. A
contender lives in a process of its own, or in one per device, and keeps what it sets there to itself: see
``processes``. Its function takes a model and its place, and returns a step.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import compat
import funcpar as fp
from benchmarks.models import Model, loss_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a contender is: the rank of its process, and how many devices there are in all of them."""

    devices: int
    rank: int = 0


# Returns the loss and the gradients, in the order of the module's parameters.
Step: TypeAlias = Callable[[], tuple[Any, Sequence[Any]]]


def eager(model: Model, place: Place) -> Step:
    """Plain autograd, the whole batch, as many intra-op threads as there are devices."""
    torch.set_num_threads(place.devices)
    return _module_step(model.module(), model, slice(None))


def ideal(model: Model, place: Place) -> Step:
    """Plain autograd, one shard's rows, one thread; the largest shard, since it decides."""
    torch.set_num_threads(1)
    return _module_step(model.module(), model, _shard(model, Place(place.devices)))


def compiled_eager(model: Model, place: Place) -> Step:
    """``torch.compile`` of module and loss, the whole batch, as many intra-op threads as devices."""
    torch.set_num_threads(place.devices)
    return _module_step(model.module(), model, slice(None), torch.compile)


def functional(outer: Callable[[Any], Any], inner: Callable[[Any], Any], model: Model, place: Place) -> Step:
    """Two transforms of a functional loss, on the whole batch; one thread per device."""
    fp.set_cpu_devices(place.devices, threads_per_device=1)
    return _functional_step(outer, inner, model, slice(None))


def functional_over_processes(model: Model, place: Place) -> Step:
    """``pmap(value_and_grad(loss))`` over processes of one device each, which pass their own rows."""
    torch.set_num_threads(1)
    fp.set_cpu_devices(1, threads_per_device=1)
    fp.distributed.initialize()
    return _functional_step(fp.pmap, fp.value_and_grad, model, _shard(model, place))


def data_parallel(model: Model, place: Place) -> Step:
    """``compat.DataParallel``, the whole batch; one thread per device."""
    fp.set_cpu_devices(place.devices, threads_per_device=1)
    return _module_step(compat.DataParallel(model.module()), model, slice(None))


def distributed(wrap: Callable[[nn.Module], nn.Module], model: Model, place: Place) -> Step:
    """A wrapper that sums gradients over processes of one thread each, which pass their own rows."""
    torch.set_num_threads(1)
    fp.set_cpu_devices(1, threads_per_device=1)
    dist.init_process_group("gloo", rank=place.rank, world_size=place.devices)
    return _module_step(wrap(model.module()), model, _shard(model, place))


def jax_pmap(model: Model, place: Place) -> Step:
    """``jax.pmap`` of the same network in float32 on as many virtual CPU devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={place.devices}"
    make: Callable[[Model, Place], Step] = pkgutil.resolve_name("benchmarks.in_jax:pmap_step")
    return make(model, place)


def _module_step(
    module: nn.Module, model: Model, rows: slice, transform: Callable[[Any], Any] = lambda fun: fun
) -> Step:
    """Return a step as users of modules write it; ``.grad`` is None before and set after."""
    params = list(module.parameters())
    inputs, labels = (each[rows] for each in model.batch(model.rows))
    loss_fn = transform(lambda inputs, labels: loss_of(module(inputs), labels))

    def step() -> tuple[Tensor, list[Any]]:
        for param in params:
            param.grad = None
        loss = loss_fn(inputs, labels)
        loss.backward()
        return loss.detach(), [param.grad for param in params]

    return step


def _functional_step(
    outer: Callable[[Any], Any], inner: Callable[[Any], Any], model: Model, rows: slice
) -> Step:
    """Return a step of two transforms of a functional loss."""
    apply, params = fp.functionalize(model.module())
    inputs, labels = (each[rows] for each in model.batch(model.rows))

    def loss_fn(params: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return loss_of(apply(params, inputs), labels)

    gradient = outer(inner(loss_fn))

    def step() -> tuple[Tensor, list[Tensor]]:
        loss, grads = gradient(params, inputs, labels)
        return loss, list(grads.values())

    return step


def _shard(model: Model, place: Place) -> slice:
    """Return the rows of one shard, as ``torch.tensor_split`` cuts them: sizes differ by at most one."""
    size, larger = divmod(model.rows, place.devices)
    start = place.rank * size + min(place.rank, larger)
    return slice(start, start + size + (place.rank < larger))


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the table.

    Attributes:
        name: What tables call it, and ``--contender``.
        make: Makes its step. Pickled, and called in the contender's own process.
        per_device: Whether it has one process per device instead of one.
        shard_only: Whether its loss and gradients are those of one shard, so that it does part of the work.
        even_rows: Whether it cannot have shards of different sizes.
        is_there: Whether this installation has what it needs.
        compiles: Whether its first step takes seconds, so that ``--quick`` leaves it out.
    """

    name: str
    make: Callable[[Model, Place], Step]
    per_device: bool = False
    shard_only: bool = False
    even_rows: bool = False
    is_there: bool = True
    compiles: bool = False

    def takes(self, model: Model, devices: int) -> bool:
        """Return whether it can make a step of this model on so many devices."""
        return not self.even_rows or model.rows % devices == 0


IDEAL = "ideal"
BUSY_IDEAL = "ideal, all cores busy"
EAGER = "eager"
COMPILED_EAGER = "torch.compile(eager)"
PMAP = "pmap(value_and_grad(loss))"
COMPILED_PMAP = "pmap(..., compile=True)"
DATA_PARALLEL = "compat.DataParallel"
DDP = "torch DDP, gloo"
JAX = "JAX pmap"

_HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None
_HAS_GLOO = dist.is_available() and dist.is_gloo_available()

CONTENDERS = {
    each.name: each
    for each in (
        Contender(EAGER, eager),
        Contender(IDEAL, ideal, shard_only=True),
        Contender(BUSY_IDEAL, ideal, per_device=True, shard_only=True),
        Contender(PMAP, functools.partial(functional, fp.pmap, fp.value_and_grad)),
        Contender("value_and_grad(pmap(loss))", functools.partial(functional, fp.value_and_grad, fp.pmap)),
        Contender(DATA_PARALLEL, data_parallel),
        Contender(
            "pmap, 1 device per process",
            functional_over_processes,
            per_device=True,
            is_there=_HAS_GLOO,
        ),
        Contender(
            "compat DDP, gloo",
            functools.partial(distributed, compat.DistributedDataParallel),
            per_device=True,
            is_there=_HAS_GLOO,
        ),
        Contender(
            DDP,
            functools.partial(distributed, nn.parallel.DistributedDataParallel),
            per_device=True,
            is_there=_HAS_GLOO,
        ),
        Contender(JAX, jax_pmap, even_rows=True, is_there=importlib.util.find_spec("jax") is not None),
        Contender(
            COMPILED_PMAP,
            functools.partial(functional, functools.partial(fp.pmap, compile=True), fp.value_and_grad),
            is_there=_HAS_COMPILER,
            compiles=True,
        ),
        Contender(COMPILED_EAGER, compiled_eager, is_there=_HAS_COMPILER, compiles=True),
    )
    if each.is_there
}
