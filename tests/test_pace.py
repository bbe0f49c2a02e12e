"""Shards of tiny calls run one after another where that was faster, and nobody can tell but by the clock."""

import itertools
import random
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import funcpar as fp
from funcpar import _intraop
from funcpar._pace import Pace, Paces

LIMIT = 60.0
X = torch.arange(39.0, dtype=torch.float64).reshape(13, 3) / 39
W = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what makes all calls run their shards one after another, or all at the same time."""

    def setting(is_apart: bool) -> None:
        monkeypatch.setattr(Pace, "is_together", lambda self: not is_apart)

    setting(True)
    return setting


def loss_fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x @ w) ** 2).mean()


def paced(together: float, apart: float, calls: int) -> list[bool]:
    """Return which of so many calls ran together, where each kind takes so many seconds."""
    pace, ways = Pace(), []
    for _ in range(calls):
        way = pace.is_together()
        pace.took(way, together if way else apart)
        ways.append(way)
    return ways


def test_a_pace_tries_both_ways_and_keeps_the_faster_one():
    for together, apart in ((0.001, 0.002), (0.002, 0.001)):
        ways = paced(together, apart, 640)
        assert ways[:16] == [True] * 8 + [False] * 8
        faster = together < apart
        assert ways[16:].count(not faster) == 16  # Eight in a row, to notice that things have changed.


def test_a_pace_follows_what_changes():
    pace = Pace()
    for call in range(2_000):
        way = pace.is_together()
        pace.took(way, 0.001 if way is (call > 500) else 0.002)
    assert pace.is_together()


def test_long_calls_are_never_made_one_after_another():
    assert all(paced(0.005, 0.0001, 200))


def test_paces_of_many_kinds_do_not_pile_up():
    paces = Paces()
    assert paces[3] is paces[3] and paces[3] is not paces[4]
    for kind in range(1_000):
        paces[kind].is_together()
    assert len(paces._paces) <= 64


def test_shards_one_after_another_run_in_the_callers_thread(apart):
    def name(x: torch.Tensor) -> torch.Tensor:
        seen.append(threading.current_thread())
        return x

    for is_apart, count in ((True, 1), (False, 4)):
        apart(is_apart)
        seen: list[threading.Thread] = []
        fp.pmap(name, in_axes=0)(X)
        assert len(seen) == 4 and len(set(seen)) == count
        assert (threading.current_thread() in seen) is is_apart


def test_they_have_their_devices_number_of_threads_and_no_other_thread_has(apart):
    def numbers() -> list[int]:
        started: list[int] = []
        thread = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
        thread.start()
        thread.join(LIMIT)
        return [torch.get_num_threads(), *started]

    before = numbers()
    for count in (1, 2, 5):
        fp.set_cpu_devices(4, threads_per_device=count)
        seen: list[list[int]] = []
        fp.pmap(lambda x: (seen.append(numbers()), x)[1], in_axes=0)(X)
        assert seen == [[count, before[1]]] * 4
        assert numbers() == before


def test_where_the_number_of_threads_cannot_be_set_they_run_in_workers(apart, monkeypatch):
    monkeypatch.setattr(_intraop, "_setters", lambda: None)
    fp.set_cpu_devices(3, threads_per_device=torch.get_num_threads() + 1)
    seen: list[threading.Thread] = []
    fp.pmap(lambda x: (seen.append(threading.current_thread()), x)[1], in_axes=0)(X)
    assert threading.current_thread() not in seen and len(set(seen)) == 3


def test_what_a_shard_sets_for_its_thread_ends_with_it(apart):
    variable: ContextVar[int] = ContextVar("variable", default=0)

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), variable.get()))
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        variable.set(1)
        return x

    for is_apart in (True, False):
        apart(is_apart)
        seen: list[Any] = []
        fp.pmap(body, in_axes=0)(X)
        assert seen == [(True, False, 0)] * 4
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and variable.get() == 0
        assert torch.is_autocast_cache_enabled()


def test_under_a_checkpoint_the_function_runs_once_again_and_no_more(apart):
    runs: list[int] = []

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return ((x @ w).sin() ** 2).mean()

    step = fp.pmap(body, devices=3)
    found = []
    for is_apart in (True, False):
        apart(is_apart)
        w = W.clone().requires_grad_()
        checkpoint(step, w, X, use_reentrant=False).backward()
        found.append((w.grad, len(runs)))
        runs.clear()
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_backward_of_one_call_within_that_of_another(apart):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return fp.pmap(fp.grad(lambda w, x: (w * x.sum(0)).sin().sum()), out_axes="sum")(W, X) * grad

    results = []
    for is_apart in (True, False):
        apart(is_apart)
        w = W.clone().requires_grad_()
        fp.pmap(loss_fn)(Again.apply(w), X).backward()
        results.append(w.grad)
    assert torch.equal(*results)


def test_numbers_are_the_same_to_the_bit(apart):
    step = fp.pmap(fp.value_and_grad(lambda w, x: F.dropout(x @ w, 0.5).square().mean()))
    found = []
    for is_apart in (True, False):
        apart(is_apart)
        torch.manual_seed(3)
        found.append(step(W, X))
        w = W.clone().requires_grad_()
        fp.pmap(loss_fn)(w, X).backward()
        found[-1] += (w.grad, fp.grad(fp.pmap(loss_fn))(W, X))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[0][2], fp.grad(loss_fn)(W, X), rtol=1e-12, atol=0)


def test_shards_that_wait_for_each_other_in_a_collective_all_begin(apart):
    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fp.psum((x @ w).sum()) ** 2

    w = W.clone().requires_grad_()
    out = fp.pmap(body, devices=3)(w, X)
    out.backward()
    expected = W.clone().requires_grad_()
    ((X @ expected).sum() ** 2).backward()
    torch.testing.assert_close(out.item(), ((X @ W).sum() ** 2).item())
    torch.testing.assert_close(w.grad, expected.grad)


def test_shards_that_wait_for_each_other_out_of_sight_all_begin(apart):
    barrier = threading.Barrier(4)

    def body(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(timeout=LIMIT)
        return x

    assert torch.equal(fp.pmap(body, in_axes=0)(X), X)


def test_shards_handed_on_have_their_devices_number_of_threads(apart):
    for count in (1, 2, 1):  # What was set for devices before must not stay with threads that wait for work.
        fp.set_cpu_devices(4, threads_per_device=count)
        out = fp.pmap(lambda x: (fp.psum(x.sum()), torch.get_num_threads())[1:], in_axes=0, out_axes="stack")
        assert out(X)[0].tolist() == [count] * 4


def test_callers_with_collectives_at_once_do_not_wait_for_each_other(monkeypatch):
    # One after another in one worker, a shard that waits is ahead of other calls in that worker, and would
    # be behind them in another's queue.
    monkeypatch.setattr(Pace, "is_together", lambda self: random.random() < 0.5)
    step = fp.pmap(lambda x: fp.psum(x.sum()) + fp.psum(x.max()) * 0, in_axes=0, out_axes=None, devices=3)
    failed: list[Any] = []

    def caller() -> None:
        for _ in range(60):
            if not torch.allclose(step(X), X.sum()):
                failed.append("wrong")

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads) and not failed


def test_a_shard_that_raises_is_told_as_ever_and_the_others_run(apart):
    ran: list[int] = []
    count = itertools.count()

    def body(x: torch.Tensor) -> torch.Tensor:
        ran.append(next(count))
        if len(ran) == 1:
            raise KeyError("first")
        return x

    with pytest.raises(KeyError, match="first") as raised:
        fp.pmap(body, in_axes=0)(X)
    assert raised.value.__notes__ == ["raised in shard 0 of 4 on cpu[0], in pmap(body)"]
    assert len(ran) == 4
    assert torch.equal(fp.pmap(body, in_axes=0)(X), X)


def test_calls_within_shards_work_one_after_another(apart):
    inner = fp.pmap(lambda x: x * 2, in_axes=0)
    assert torch.equal(fp.pmap(lambda x: inner(x) + 1, in_axes=0)(X), X * 2 + 1)


def test_tiny_steps_are_right_whatever_the_clock_says():
    step = fp.pmap(fp.value_and_grad(loss_fn))
    value, grad = fp.value_and_grad(loss_fn)(W, X)
    for _ in range(150):
        found = step(W, X)
        torch.testing.assert_close(found[0], value)
        torch.testing.assert_close(found[1], grad)
