"""What processes of one axis compute together: each function here runs in every process."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import funcpar as fp

ROWS = 13
_ENTRY_BYTES = {"double": 8, "float": 4, "unsigned char": 1, "long int": 8}


def joined(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run with processes joined, on so many devices each."""

    @functools.wraps(fun)
    def run(num_devices: int, *args: Any) -> Any:
        fp.set_cpu_devices(num_devices)
        fp.distributed.initialize(timeout=20)
        try:
            return fun(*args)
        finally:
            fp.distributed.shutdown()

    return run


def own(tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return this process's rows."""
    return tensor.split(list(rows))[fp.distributed.process_index()] if len(rows) > 1 else tensor


def data() -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True)


def model() -> tuple[Any, dict[str, Tensor]]:
    """Return a network as a function, and its parameters, the same everywhere."""
    torch.manual_seed(0)
    return fp.functionalize(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double())


def train(rows: tuple[int, ...], num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train; return the losses and the parameters."""
    apply, params = model()
    x, y = (own(t, rows) for t in data())
    step = fp.pmap(fp.value_and_grad(lambda params, x, y: (apply(params, x) - y).square().mean()))
    optimizer = torch.optim.AdamW(params.values(), lr=0.01)
    losses = []
    for _ in range(num_steps):
        loss, grads = step(params, x, y)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        losses.append(loss.item())
    return losses, params


def _loss(apply: Any) -> Any:
    return lambda params, x, y: (apply(params, x) - y).square().mean()


def results(rows: tuple[int, ...]) -> dict[str, Any]:
    """Return outputs and derivatives of every kind."""
    apply, params = model()
    x, y = (own(t, rows) for t in data())
    loss_fn = _loss(apply)
    leaf = {name: param.clone().requires_grad_() for name, param in params.items()}
    found: dict[str, Any] = {}
    found["value"] = fp.pmap(loss_fn)(params, x, y)
    found["rows"] = fp.pmap(apply)(params, x)
    found["several"] = fp.pmap(
        lambda p, x: {"b": x * 2, "mean": x.mean(), "sum": x.sum(0), "count": 3, "same": p["0.bias"] + 1},
        out_axes={"b": 0, "mean": "mean", "sum": "sum", "count": None, "same": None},
    )(params, x)
    found["python sum"] = fp.pmap(lambda p, x: float(x.sum()), out_axes="sum")(params, x)
    fp.pmap(loss_fn)(leaf, x, y).backward()
    found["backward"] = {name: param.grad for name, param in leaf.items()}
    same = fp.pmap(lambda p, x: p["0.bias"].sum() * fp.psum(x.sum()), out_axes=None)(leaf, x)
    found["same, differentiated"] = torch.autograd.grad(same, leaf["0.bias"])
    rowwise = fp.pmap(apply)(leaf, x)
    found["rows, differentiated"] = torch.autograd.grad(rowwise.square().sum(), list(leaf.values()))
    found["fused, aux"] = fp.pmap(
        fp.value_and_grad(lambda p, x, y: (loss_fn(p, x, y), x.sum(1)), has_aux=True), out_axes=("mean", 0)
    )(params, x, y)
    found["grad of rows"] = fp.pmap(fp.grad(loss_fn, argnums=(0, 1)))(params, x, y)[1]
    found["torch.func"] = torch.func.grad(lambda p: fp.pmap(loss_fn)(p, x, y))(params)
    found["fp"] = fp.grad(lambda p: fp.pmap(loss_fn)(p, x, y))(params)
    bias = params["2.bias"]
    with_bias = lambda b: fp.pmap(loss_fn)({**params, "2.bias": b}, x, y)
    found["hessian"] = torch.func.hessian(with_bias)(bias)
    found["jvp"] = torch.func.jvp(with_bias, (bias,), (torch.ones_like(bias),))
    first = torch.autograd.grad(fp.pmap(loss_fn)(leaf, x, y), list(leaf.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), list(leaf.values()))
    found["penalty"] = second
    inner = fp.pmap(fp.grad(loss_fn))(leaf, x, y)
    found["penalty, fused"] = torch.autograd.grad(
        sum(g.square().sum() for g in inner.values()), list(leaf.values())
    )
    closed = leaf["0.weight"]
    loss = fp.pmap(lambda x, y: loss_fn({**params, "0.weight": closed}, x, y), in_axes=0)(x, y)
    found["closed over"] = torch.autograd.grad(loss, closed)
    same = lambda p, x, y: ((p["a"] + p["b"]).sin() * (x.sum(1) - y[:, 0]).mean()).sum()
    for size in (3, 400):  # Two leaves get one gradient tensor, small and large.
        both = {name: torch.full((size, size), 0.5, dtype=torch.float64) for name in "ab"}
        found[f"two leaves of {size}, one gradient"] = fp.pmap(fp.grad(same))(both, x, y + 1)
    embed = lambda table, rows: (
        F.embedding(rows[:, 0].abs().long(), table, sparse=True).square().sum(1).mean()
    )
    found["sparse"] = fp.pmap(fp.grad(embed))(torch.ones(9, 2, dtype=torch.float64), x).to_dense()
    norm = fp.SyncBatchNorm(3).double()
    apply_norm, scale, buffers = fp.functionalize_with_buffers(norm)
    normed = lambda scale, x: apply_norm(scale, buffers, x)[0].pow(3).mean()
    found["batch norm, gradient"] = fp.pmap(fp.grad(normed))(scale, x)
    tokens = lambda p, x, y: x.square().sum()
    weighted = lambda p, x, y: ((apply(p, x) - y).square() * x.square().sum(1, True)).sum() / x.square().sum()
    found["weights"] = fp.pmap(fp.value_and_grad(weighted), weight=tokens)(params, x, y)
    return found


def shards(rows: tuple[int, ...]) -> dict[str, Any]:
    """Return what shards know of their axis."""
    x, _ = (own(t, rows) for t in data())
    found = {
        "index": fp.pmap(lambda x: torch.full((len(x),), fp.axis_index()), in_axes=0)(x),
        "size": fp.pmap(lambda x: fp.axis_size(), in_axes=0)(x),
        "pmean": fp.pmap(lambda x: fp.pmean(x.mean(0)), in_axes=0, out_axes=None)(x),
        "psum, local": fp.pmap(lambda x: fp.psum(len(x)), in_axes=0, processes="local")(x),
        "gathered": fp.pmap(lambda x: fp.all_gather(float(len(x))), in_axes=0, out_axes=None)(x),
    }
    torch.manual_seed(3)
    found["dropout"] = fp.pmap(lambda x: F.dropout(torch.ones(len(x), 64)), in_axes=0)(x)
    found["dropout, fused"] = fp.pmap(fp.grad(lambda p, x: F.dropout(p * torch.ones(len(x), 64)).mean()))(
        torch.ones(64), x
    )
    large = torch.arange(40_000.0)
    found["large"] = fp.pmap(lambda p, x: fp.psum(p * len(x)), out_axes=None)(large, x)
    norm = fp.SyncBatchNorm(3).double()
    apply, params, buffers = fp.functionalize_with_buffers(norm)
    found["batch norm"] = fp.pmap(apply, in_axes=(None, None, 0), out_axes=(0, None))(params, buffers, x)
    return found


@joined
def everything(rows: tuple[int, ...], num_steps: int) -> dict[str, Any]:
    """Return what training, results and shards give, and shards again."""
    return {
        "training": train(rows, num_steps),
        "results": results(rows),
        "shards": shards(rows),
        "shards again": shards(rows),
    }


@joined
def bytes_of_a_step() -> tuple[int, int]:
    """Return how many bytes one of many equal steps sends, and the size of its gradients."""
    apply, params = model()
    params = {**params, "large": torch.ones(300, 300, dtype=torch.float64)}
    x, y = data()
    names = [name for name in params if name != "large"]

    def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = apply({name: params[name] for name in names}, x)
        return (out - y).mean() + params["large"].mean()

    step = fp.pmap(fp.value_and_grad(loss_fn))
    step(params, x, y)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step(params, x, y)
    sent = [
        math.prod(shape) * _ENTRY_BYTES[kind]
        for event in profiled.events()
        if event.name.startswith("gloo:")
        for shape, kind in zip(event.input_shapes, event.input_dtypes, strict=True)
    ]
    return sum(sent), sum(param.nbytes for param in params.values())


@joined
def calls_that_look_alike(rows: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Return what calls give whose arguments have the same shapes, and what it is of all rows."""
    x, _ = data()
    w, scale = torch.ones(3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    step = fp.value_and_grad(lambda w, a, b: ((a * b) @ w).square().mean(), argnums=(0, 1, 2))
    held = {"w": w}
    loss = fp.value_and_grad(lambda held, x: (x @ sum(held.values())).square().mean())
    mapped, partial = fp.pmap(step), fp.pmap(functools.partial(loss, held), in_axes=0)
    found = []
    for _ in range(2):
        (value, grads), (whole, of_whole) = mapped(w, scale, own(x, rows)), step(w, scale, x)
        found.append(((value, grads), (whole, (*of_whole[:2], own(of_whole[2], rows)))))
        (value, grads), (whole, of_whole) = mapped(w, own(x, rows), scale), step(w, x, scale)
        found.append(((value, grads), (whole, (of_whole[0], own(of_whole[1], rows), of_whole[2]))))
        found.append((partial(own(x, rows)), loss(held, x)))
        held["another"] = torch.full((3,), 0.5, dtype=torch.float64)
    return found


@joined
def orders_of_keys(rows: tuple[int, ...]) -> list[Any]:
    """Return gradients of a dict whose keys come in another order in the second call of one process."""
    x, _ = data()
    loss = lambda p, x: ((x @ p["a"]) * (x @ p["b"]).sin() + (x @ p["c"]) ** 2).mean()
    step, forward, found = fp.pmap(fp.grad(loss)), fp.pmap(loss), []
    for call in range(3):
        keys = "cba" if call == 1 and fp.distributed.process_index() else "abc"
        params = {key: torch.full((3,), 1.0 + ord(key) % 7, dtype=torch.float64) for key in keys}
        found.append(step(params, own(x, rows)))
        stands = {key: param.clone().requires_grad_() for key, param in params.items()}
        forward(stands, own(x, rows)).backward()
        found += [{key: stand.grad for key, stand in stands.items()}, fp.grad(loss)(params, x)]
    return found


@joined
def complex_gradients() -> Any:
    """Return the gradients of complex leaves that leave in one message, some of them infinite."""
    params = {name: torch.ones(2, dtype=torch.complex64) for name in "ab"}
    loss = lambda params, x: x.mean() * (params["a"].real * math.inf + params["b"].abs()).sum()
    return fp.pmap(fp.grad(loss))(params, torch.ones(2))


@joined
def broadcast() -> tuple[dict[str, Any], Tensor]:
    """Return what process 1 had, and what this one had."""
    index = fp.distributed.process_index()
    given = torch.full((2,), float(index))
    found = fp.distributed.broadcast({"w": given, "steps": index}, source=1)
    found["w"] += 0  # Its own memory.
    return found, given[0]


def policies(_: int) -> dict[str, list[int]]:
    """Return the scheduling policies of threads from before processes are joined, and of new ones."""

    def found() -> dict[str, int]:
        names = [task.name for task in Path("/proc/self/task").iterdir()]
        return {name: os.sched_getscheduler(int(name)) for name in names}

    dist.init_process_group("gloo")
    before = found()
    fp.distributed.initialize(timeout=20)
    after = found()
    fp.distributed.shutdown()
    return {
        "before": [after[name] for name in before if name in after],
        "new": [policy for name, policy in after.items() if name not in before],
    }


@joined
def extreme_weights() -> list[dict[str, Any]]:
    """Return what weights give that float32 cannot hold, in two calls each, and what plain torch gives."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return ((x @ w) ** 2).mean()

    x, w = data()[0].float(), torch.tensor([1.0, -2.0, 0.5])
    value, grad = fp.value_and_grad(loss_fn)(w, x)
    found = []
    for scale in (1e39, 1e-40, 1e-46, 1e-300):
        step = fp.pmap(fp.value_and_grad(loss_fn), weight=lambda w, x, scale=scale: len(x) * scale)
        for _ in range(2):
            theirs = step(w, own(x, (6, 7)))
            found.append({"value": theirs[0] / value - 1, "grad": (theirs[1] - grad) / grad.abs().max()})
    for fun in (loss_fn, fp.grad(loss_fn)):
        try:
            fp.pmap(fun, weight=lambda w, x: 1e308)(w, own(x, (6, 7)))
        except ValueError as error:
            found.append({"error": str(error)})
    return found
