"""Sums of gradients across the simulated accelerators: what is summed while backward runs, and what after."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import torch.distributed as dist
from simulated import Stream
from simulated_common import aside, batch, books, close, loss, recorder, registry, weights

import funcpar as fp
from funcpar import _streams, distributed
from funcpar._ahead import Ahead
from funcpar._link import Link

PROGRAMS, program = registry()
F64 = torch.float64


def deep_weights(dtype: torch.dtype = F64) -> dict[str, Any]:
    """Return the parameters of three layers: the first and the last travel alone, the rest together."""
    wide = 1 << 16
    shapes = {"first": (3, wide), "scale": (3,), "shift": (2,), "last": (wide, 3)}
    return {name: 0.01 * torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


class Passed(torch.autograd.Function):
    """The same; its backward says that it was passed."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        recorder.note("the first layer's backward")
        return cotangent


def deep_loss(p: Any, x: Any) -> Any:
    hidden = (Passed.apply(x @ p["first"]) @ p["last"]).tanh()
    return (hidden * p["scale"]).mean() + p["shift"].square().mean() * hidden.mean()


def at_the_end(fun: Any, devices: list[int], *args: Any) -> Any:
    """Return what a gradient function gives where nothing is summed before all have ended."""
    usual = Ahead.of
    Ahead.of = staticmethod(lambda devices: None)  # type: ignore[method-assign, assignment]
    try:
        return fp.pmap(fun, devices=devices)(*args)
    finally:
        Ahead.of = usual  # type: ignore[method-assign]


def same_bits(found: Any, wanted: Any) -> None:
    pairs = zip(fp.tree.leaves(found), fp.tree.leaves(wanted), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


@program
def sums_of_layers_have_the_bits_of_sums_at_the_end(devices):
    for dtype in (F64, torch.float32, torch.bfloat16):
        p, x = deep_weights(dtype), torch.randn(11, 3, dtype=dtype)
        fun = fp.value_and_grad(deep_loss)
        step = fp.pmap(fun, devices=devices)
        first = step(p, x)
        if dtype is F64:
            close(first, fun(p, x))
        same_bits(first, at_the_end(fun, devices, p, x))
        for _ in range(3):
            same_bits(step(p, x), first)


@program
def sums_of_every_kind_of_leaf(devices):
    p = {
        "plain": torch.randn(3, dtype=F64), "unused": torch.randn(4, dtype=F64), "count": torch.tensor(3),
        "complex": torch.randn(3, dtype=torch.complex128), "expanded": torch.randn(3, 5, dtype=F64),
        "one": torch.randn(3, dtype=F64), "other": torch.randn(3, dtype=F64), "empty": torch.empty(0, 2),
        "half": torch.ones(3, dtype=torch.bfloat16), "large": torch.randn(1 << 18, dtype=F64),
        "conv": torch.randn(4, 3, 2, 2, dtype=F64).contiguous(memory_format=torch.channels_last),
    }  # fmt: skip
    p["tied"] = p["plain"]

    def fun(p: Any, x: Any) -> Any:
        image = x[:, :, None, None].expand(-1, 3, 4, 4)
        total = (x * p["plain"] * p["complex"].abs()).sum(1) + (x @ (p["one"] + p["other"])).tanh()
        total = total + torch.nn.functional.conv2d(image, p["conv"]).square().sum((1, 2, 3)) + p["tied"][0]
        total = total + (x * p["half"]).sum(1) + p["large"].sum() + p["empty"].sum()
        return total.mean() + p["expanded"].sum() * p["count"]

    x, both = torch.randn(13, 3, dtype=F64), fp.value_and_grad(fun)
    found = fp.pmap(both, devices=devices)(p, x)
    close(found, both(p, x))
    same_bits(found, at_the_end(both, devices, p, x))
    leaves = [grad for grad in found[1].values() if grad is not None]
    assert len({grad.untyped_storage()._cdata for grad in leaves}) == len(leaves)


@program
def sums_of_several_evaluations_in_one_call(devices):
    fun = fp.grad(deep_loss)

    def step(p: Any, x: Any) -> Any:
        once, twice = fun(p, x), fun(p, x * x)
        return {name: once[name] + twice[name] for name in once}

    step.__wrapped__ = fun  # type: ignore[attr-defined]
    p, x = deep_weights(), torch.randn(7, 3, dtype=F64)
    close(fp.pmap(step, devices=devices)(p, x), step(p, x))


@program
def sums_beside_exchanges_between_shards(devices):
    def fun(p: Any, x: Any) -> Any:
        hidden = x @ p["first"]
        hidden = hidden - fp.pmean(hidden.mean(0))
        return ((hidden @ p["last"]).tanh() * p["scale"]).mean() + fp.psum(p["shift"].sum()) * 0

    def whole(p: Any, x: Any) -> Any:
        hidden = x @ p["first"]
        return (((hidden - hidden.mean(0)) @ p["last"]).tanh() * p["scale"]).mean() + p["shift"].sum() * 0

    p, x = deep_weights(), torch.randn(13, 3, dtype=F64)
    close(fp.pmap(fp.grad(fun), devices=devices)(p, x), fp.grad(whole)(p, x))


@program
def sums_without_a_shard_that_weighs_nothing(devices):
    def fun(p: Any, x: Any, counts: Any) -> Any:
        return (deep_rows(p, x) * counts).sum() / counts.sum()

    p, x = deep_weights(), torch.randn(6, 3, dtype=F64)
    counts = torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=F64)
    weighed = fp.pmap(fp.value_and_grad(fun), devices=devices, weight=lambda p, x, counts: counts.sum())
    close(weighed(p, x, counts), fp.value_and_grad(fun)(p, x, counts))


def deep_rows(p: Any, x: Any) -> Any:
    return ((x @ p["first"]) @ p["last"] * p["scale"]).sum(1) + p["shift"].sum()


@program
def gradients_that_the_user_keeps_are_not_written_to(devices):
    kept: dict[int, list[Any]] = {}

    def fun(p: Any, x: Any) -> Any:
        mine = kept.setdefault(fp.axis_index(), [])
        p["last"].register_hook(lambda grad: mine.extend([grad, grad.clone()]))
        return deep_loss(p, x)

    p, x = deep_weights(), torch.randn(9, 3, dtype=F64)
    close(fp.pmap(fp.grad(fun), devices=devices)(p, x), fp.grad(deep_loss)(p, x))
    assert len(kept) == len(devices)
    for pair in kept.values():
        for tensor in pair:
            recorder.keep(tensor, books.current(tensor.device))
        same_bits(pair[:1], pair[1:])


class Fails(Passed):
    """The same; its backward fails in the last shard."""

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        if fp.axis_index() == fp.axis_size() - 1:
            raise KeyError("in backward")
        return cotangent


@program
def a_backward_that_fails_and_the_call_after_it(devices):
    p, x = deep_weights(), torch.randn(9, 3, dtype=F64)
    there = fp.tree.map(lambda leaf: leaf.to("sim:0"), p)
    failing = fp.pmap(
        fp.grad(lambda p, x: ((Fails.apply(x @ p["first"])) @ p["last"]).mean()), devices=devices
    )
    for _ in range(2):
        try:
            failing(there, x)
        except KeyError:
            pass
        else:
            raise AssertionError("no error")
        there = fp.tree.map(lambda leaf: leaf.add_(0), there)
        close(fp.pmap(fp.grad(deep_loss), devices=devices)(there, x), fp.grad(deep_loss)(p, x))


@program
def sums_in_the_backward_of_a_joined_call(devices):
    p, x = fp.tree.map(lambda leaf: leaf.requires_grad_(), deep_weights()), torch.randn(9, 3, dtype=F64)
    p["half"] = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    fun = lambda p, x: deep_loss(p, x) + (x.square() * p["half"]).mean()
    fp.pmap(fun, devices=devices)(p, x).backward()
    close([leaf.grad for leaf in p.values()], list(torch.autograd.grad(fun(p, x), list(p.values()))))


@program
def the_first_sum_is_asked_for_before_the_last_backward_ends(devices):
    p, x = deep_weights(), torch.randn(9, 3, dtype=F64)
    there = fp.tree.map(lambda leaf: leaf.to("sim:0"), p)
    for recorder.library in (False, True):
        step = fp.pmap(fp.value_and_grad(deep_loss), devices=devices)
        step(there, x)
        books.log.clear()
        books.waits.clear()
        step(there, x)
        assert not books.waits, "the host waited"
        events = [entry[0] for entry in books.log]
        ends = [k for k, what in enumerate(events) if what == "the first layer's backward"]
        assert len(ends) == len(devices)
        sums = [k for k, what in enumerate(events) if what in ("fill", "library sum")]
        if len(set(devices)) == 1:
            assert not sums  # There is nothing between devices that could be used meanwhile.
            continue
        assert sums[0] < ends[-1], events
        asked = {entry[1] for entry in books.log if entry[0] in ("fill", "library sum")}
        assert all(name.startswith("funcpar-sim") for name in asked)
        waits = [entry for entry in books.log if entry[0] == "wait" and aside(entry[2])]
        assert len(waits) >= 3 * len(devices), "each bucket comes after the marks of all shards"
    recorder.library = False


@contextlib.contextmanager
def joined(monkey: Any = Link) -> Any:
    """Be one of several processes, of which there is one: all but the numbers goes the way of several."""
    usual, there = monkey.start_sum, distributed.link

    def start_sum(self: Link, tensor: Any) -> Any:
        if tensor.is_cpu:
            return usual(self, tensor)
        tensor.mul_(1)
        return Work(recorder.record(books.current(tensor.device)), tensor.device)

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fp.distributed.initialize()
    monkey.start_sum, distributed.link = start_sum, lambda: distributed._link
    try:
        yield
    finally:
        monkey.start_sum, distributed.link = usual, there
        fp.distributed.shutdown()


class Work:
    """A sum over processes that has begun."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> None:
        recorder.wait(books.current(self.device), self.event)


@program
def sums_over_processes_of_several_devices(devices):
    p, x = deep_weights(), torch.randn(9, 3, dtype=F64)
    p |= {"unused": torch.randn(2, dtype=F64), "half": torch.ones(3, dtype=torch.bfloat16)}
    p |= {"expanded": torch.randn(3, 5, dtype=F64)}
    there = fp.tree.map(lambda leaf: leaf.to("sim:0"), p)

    def fun(p: Any, x: Any) -> Any:
        return deep_loss(p, x) + (x.square() * p["half"]).mean() + p["expanded"].sum()

    both = fp.value_and_grad(fun)
    with joined():
        for given in (p, there):
            step = fp.pmap(both, devices=devices)
            for _ in range(3):
                close(step(given, x), both(p, x))


@program
def a_stream_that_the_user_chose_is_not_the_workers(devices):
    def fun(p: Any, x: Any) -> Any:
        mine = books.current(x.device)
        seen.append(_streams.is_at_home())
        books.use(Stream(x.device, "the user's"))
        seen.append(_streams.is_at_home())
        books.use(mine)
        return deep_loss(p, x)

    seen: list[bool] = []
    p, x = deep_weights(), torch.randn(9, 3, dtype=F64)
    close(fp.pmap(fp.grad(fun), devices=devices)(p, x), fp.grad(deep_loss)(p, x))
    # One shard runs in its caller's thread, where nothing is summed.
    assert sorted(seen) == [False] * len(devices) + [len(devices) > 1] * len(devices)


@program
def few_bytes_are_summed_by_one_device(devices):
    p, (x, y) = weights(), batch()
    step = fp.pmap(fp.grad(loss), devices=devices)
    step(p, x, y)
    books.log.clear()
    step(p, x, y)
    fills = [entry[-1] for entry in books.log if entry[0] == "fill"]
    assert fills == ([p["w"].numel() + p["b"].numel()] if len(set(devices)) > 1 else [])
    assert threading.current_thread().name not in {entry[1] for entry in books.log if entry[0] == "fill"}
