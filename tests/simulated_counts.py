"""What is asked of accelerators, in which order and how often, on the simulated one."""

from __future__ import annotations

import gc
import weakref

import torch
from simulated_common import batch, books, close, loss, recorder, registry, weights

import funcpar as fp
from funcpar import _copies

PROGRAMS, program = registry()


def broadcasts(fun, *args) -> int:
    """Count the broadcasts of a call."""
    books.log.clear()
    fun(*args)
    return sum(entry[0] == "broadcast" for entry in books.log)


def targets(devices, *held):
    """Count the devices that need a copy of what is on the devices ``held``."""
    return len(set(devices) - set(held))


def with_batch(count, devices):
    """Count broadcasts of a call: a single shard gets its batch, which is whole, as it gets parameters."""
    return max(count, 1) if len(devices) == 1 else count


@program
def plain_parameters_are_sent_in_one_broadcast_a_call(devices):
    p, (x, y) = weights(), batch()
    step = fp.pmap(fp.value_and_grad(loss), devices=devices)
    for _ in range(3):
        assert broadcasts(step, p, x, y) == with_batch(targets(devices), devices)
    there = fp.tree.map(lambda t: t.to("sim:0"), p)
    assert broadcasts(step, there, x, y) == with_batch(targets(devices, 0), devices)
    p["n"] = torch.tensor(1, dtype=torch.int64)
    both = fp.pmap(lambda p, x, y: loss(p, x, y) * p["n"], devices=devices)
    assert broadcasts(both, p, x, y) == 2 * targets(devices), "a bucket for each dtype"


@program
def large_leaves_go_alone(devices):
    p = {"w": torch.ones(3, 1 << 17, dtype=torch.float64), "b": torch.ones(4), "c": torch.ones(5)}
    step = fp.pmap(lambda p, x: (x @ p["w"]).sum(1) + p["b"].sum() + p["c"].sum(), devices=devices)
    x = torch.ones(6, 3, dtype=torch.float64)
    assert broadcasts(step, p, x) == 2 * targets(devices) + (len(devices) == 1)
    close(step(p, x), torch.full((6,), 3.0 * (1 << 17) + 9, dtype=torch.float64))


@program
def staged_parameters_are_not_sent_again(devices):
    p, (x, y) = weights(), batch()
    step = fp.pmap(fp.value_and_grad(loss), devices=devices)
    assert broadcasts(fp.stage, p, devices) == targets(devices)
    staged = fp.stage(p, devices)
    assert all(staged[name] is p[name] for name in p)
    for _ in range(2):
        assert broadcasts(step, staged, x, y) == with_batch(0, devices)
        close(step(staged, x, y), fp.value_and_grad(loss)(p, x, y))


@program
def an_optimizer_step_makes_staged_parameters_be_sent_once(devices):
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ):
        p, (x, y) = fp.stage(weights(), devices), batch()
        step = fp.pmap(fp.value_and_grad(loss), devices=devices)
        optimizer = make(p.values())
        for _ in range(2):
            _, grads = step(p, x, y)
            for name, grad in grads.items():
                p[name].grad = grad
            before = p["w"].clone()
            optimizer.step()
            assert not torch.equal(before, p["w"])
            assert broadcasts(step, p, x, y) == with_batch(targets(devices), devices)
            assert broadcasts(step, p, x, y) == with_batch(0, devices)
            close(step(p, x, y), fp.value_and_grad(loss)(p, x, y))


@program
def a_write_makes_staged_parameters_be_sent_once(devices):
    p, (x, y) = fp.stage(weights(), devices), batch()
    step = fp.pmap(loss, devices=devices)
    with torch.no_grad():
        p["w"].mul_(2)
    assert broadcasts(step, p, x, y) == with_batch(targets(devices), devices)
    assert broadcasts(step, p, x, y) == with_batch(0, devices)
    p["w"].data = p["w"].data + 1  # Other memory, the same version.
    assert broadcasts(step, p, x, y) == with_batch(targets(devices), devices)
    close(step(p, x, y), loss(p, x, y))


@program
def parameters_that_the_shards_update_are_never_sent(devices):
    def step(p, x, y):
        grads = fp.psum(fp.grad(loss)(p, x, y))
        return {name: p[name] - 0.1 * grads[name] for name in p}

    p, (x, y) = weights(), batch()
    mapped = fp.pmap(step, out_axes=None, devices=devices)
    assert broadcasts(mapped, p, x, y) == with_batch(targets(devices), devices)
    p = mapped(p, x, y)
    waits = len(books.waits)
    for _ in range(3):
        books.log.clear()
        p = mapped(p, x, y)
        sent = sum(entry[0] == "broadcast" for entry in books.log)
        assert sent == with_batch(0, devices)
    assert len(books.waits) == waits, "values were compared again"


@program
def copies_die_with_their_tensors(devices):
    p = weights()
    gc.collect()
    gc.disable()
    try:
        fp.stage(p, devices)
        copies = [
            weakref.ref(copy) for entry in _copies._entries.values() for copy, *_ in entry.copies.values()
        ]
        assert len(copies) == 2 * targets(devices)
        fp.pmap(lambda p, x: x @ p["w"], devices=devices)(p, torch.ones(4, 3, dtype=torch.float64))
        del p
        assert not any(ref() is not None for ref in copies)
        assert not _copies._entries
    finally:
        gc.enable()


@program
def prefetched_rows_are_sent_before_the_call(devices):
    batches = [batch() for _ in range(4)]
    step = fp.pmap(lambda x, y: x.sum(1) * y.sum(1), in_axes=0, devices=devices)
    for k, (x, y) in enumerate(fp.prefetch(batches, devices=devices)):
        books.log.clear()
        close(step(x, y), x.sum(1) * y.sum(1))
        mine = threads_that("send") | threads_that("broadcast")
        # The first batch is made by the caller, so nothing of it is there yet.
        assert (mine - {"funcpar-prefetch"} == set()) == (k > 0), mine


def threads_that(what: str) -> set[str]:
    return {entry[1] for entry in books.log if entry[0] == what}


@program
def a_steady_step_never_makes_the_host_wait(devices):
    p, (x, y) = weights(), batch()
    p = fp.tree.map(lambda t: t.to("sim:0") * 1, p)
    step = fp.pmap(fp.value_and_grad(loss), devices=devices)
    joint = fp.pmap(loss, devices=devices)
    moved = fp.pmap(lambda x: x - fp.pmean(x.mean(0)), in_axes=0, devices=devices)
    for _ in range(3):
        books.waits.clear()
        value, grads = step(p, x, y)
        p = {name: p[name] - 0.1 * grads[name] for name in p}
        leaf = fp.tree.map(lambda t: t.requires_grad_(), fp.tree.map(lambda t: t * 1, p))
        joint(leaf, x, y).backward()
        moved(x)
        assert value.device.type == "sim"
        assert not books.waits, books.waits


@program
def a_call_waits_for_its_caller_and_its_caller_for_it(devices):
    x = torch.randn(6, 3).to("sim:0")
    fun = fp.pmap(lambda x: x * 2, in_axes=0, devices=devices)
    fun(x)
    books.log.clear()
    fun(x)
    asked = [(what, *map(str, details)) for what, _, *details in books.log if what in ("record", "wait")]
    if len(devices) == 1:
        assert not asked, "one shard runs on the caller's own stream"
        return
    callers = {f"sim:{k}/default" for k in {*devices, 0}}
    workers = {stream for what, stream, *_ in asked if what == "record"} - callers
    assert len(workers) == len(devices), "a stream for each shard, also of one device"
    first = [asked.index(("wait", worker, caller)) for worker in workers for caller in callers]
    last = [asked.index(("wait", caller, worker)) for worker in workers for caller in callers]
    assert max(asked.index(("record", caller)) for caller in callers) < min(first)
    ends = [asked.index(("record", worker)) for worker in workers]
    assert max(ends) < min(last)
    for worker in workers:
        starts = [k for k, entry in enumerate(asked) if entry[:2] == ("wait", worker)]
        assert max(starts) < asked.index(("record", worker))
    assert len(asked) == len(callers) + 2 * len(workers) * len(callers) + len(workers)


@program
def shards_that_meet_wait_for_each_other(devices):
    fun = fp.pmap(lambda x: fp.psum(x.sum()), in_axes=0, out_axes=None, devices=devices)
    x = torch.randn(6, 3)
    fun(x)
    books.log.clear()
    fun(x)
    pairs = {(str(e[2]), str(e[3])) for e in books.log if e[0] == "wait"}
    workers = {stream for pair in pairs for stream in pair if "funcpar" in stream}
    assert {(a, b) for a in workers for b in workers if a != b} <= pairs


@program
def rows_of_the_host_are_pinned_and_sent_by_their_worker(devices):
    x = torch.randn(6, 3)
    fun = fp.pmap(lambda x: x * 2, in_axes=0, devices=devices)
    books.log.clear()
    close(fun(x), x * 2)
    sends = [entry for entry in books.log if entry[0] in ("pin", "send")]
    if len(devices) == 1:  # The whole, which is sent as parameters are.
        assert not sends
        return
    assert [entry[0] for entry in sends].count("pin") == len(devices)
    assert all(entry[1].startswith("funcpar-sim") for entry in sends)
    assert len({entry[1] for entry in sends}) == len(devices)


@program
def gradients_are_summed_without_loading_the_first_device(devices):
    p = {"w": torch.randn(3, 1 << 16, dtype=torch.float64)}
    x = torch.randn(6, 3, dtype=torch.float64)
    step = fp.pmap(fp.grad(lambda p, x: (x @ p["w"]).tanh().mean()), devices=devices)
    step(p, x)
    books.log.clear()
    step(p, x)
    if len(set(devices)) < 2:
        return
    sent = [
        entry[-1] for entry in books.log if entry[0] == "send" and entry[2].type == entry[3].type == "sim"
    ]
    size = p["w"].numel()
    # Each worker brings its part of every other gradient, and the first collects the parts.
    assert sum(sent) <= size * (len(devices) - 1)
    assert max(sent) <= -(-size // len(devices))
    assert sum(entry[-1] for entry in books.log if entry[0] == "fill") == size


@program
def the_vendors_library_sums_where_there_is_one(devices):
    recorder.library = True
    try:
        p, (x, y) = weights(), batch()
        books.log.clear()
        close(fp.pmap(fp.grad(loss), devices=devices)(p, x, y), fp.grad(loss)(p, x, y))
        asked = sum(entry[0] == "library sum" for entry in books.log)
        assert asked == (len(set(devices)) == len(devices) > 1)
    finally:
        recorder.library = False


@program
def results_kept_in_shards_never_touch_another_device(devices):
    x = torch.randn(6, 3)
    kept = fp.pmap(lambda x: x * 2, in_axes=0, out_axes="shards", devices=devices)(x)
    books.log.clear()
    again = fp.pmap(lambda x: x * 2, in_axes=0, out_axes="shards", devices=devices)(kept)
    assert [part.device.index for part in again.parts] == devices
    assert not [entry for entry in books.log if entry[0] in ("send", "broadcast", "fill")]


@program
def what_shards_write_to_shared_copies_is_refused(devices):
    fun = fp.pmap(lambda p, x: p["w"].mul_(2).sum() * x, devices=devices)
    p, (x, _) = weights(), batch()
    fp.stage(p, devices)
    books.is_closed = True
    try:
        fun(p, x)
    except ValueError as error:
        books.races.clear()  # They were about to be refused.
        assert "p['w'], which the shards share, was written to in place" in str(error)
    else:
        raise AssertionError("no error")
