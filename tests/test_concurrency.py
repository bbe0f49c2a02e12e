"""Shards run at the same time, several threads may call, calls nest, and modules are not shared state."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call as bound_before
from torch.nn.utils import stateless

import funcpar as fp

LIMIT = 60.0
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"
ROWS = torch.linspace(-1.0, 1.0, 39, dtype=torch.float64).reshape(13, 3)


def at_once(*funs: Callable[[], None]) -> None:
    """Run functions in threads of their own; raise what the first failing one raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(funs))

    def guarded(fun: Callable[[], None]) -> None:
        try:
            start.wait(LIMIT)
            fun()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(fun,), daemon=True) for fun in funs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * LIMIT
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def loss_fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().square().mean()


def test_user_threads_that_call_at_once_get_their_own_numbers(devices, hurried) -> None:
    weights = [torch.randn(3, dtype=torch.float64) for _ in range(8)]
    want = [fp.value_and_grad(loss_fn)(w, ROWS) for w in weights]
    step, plain = fp.pmap(fp.value_and_grad(loss_fn)), fp.pmap(loss_fn)

    def caller(k: int) -> None:
        leaf = weights[k].clone().requires_grad_()
        for turn in range(30):
            if (turn + k) % 2:
                value, grad = step(weights[k], ROWS)
            else:
                value = plain(leaf, ROWS)
                value.backward()
                grad, leaf.grad = leaf.grad, None
            torch.testing.assert_close((value.detach(), grad), want[k], rtol=1e-12, atol=1e-12)

    at_once(*[lambda k=k: caller(k) for k in range(8)])


def test_callers_that_name_devices_in_different_orders_do_not_wait_for_each_other() -> None:
    want = fp.grad(loss_fn)(torch.ones(3, dtype=torch.float64), ROWS)

    def caller(order: list[int]) -> None:
        step = fp.pmap(fp.grad(loss_fn), devices=order)  # Its shards meet, to sum the gradients.
        for _ in range(40):
            got = step(torch.ones(3, dtype=torch.float64), ROWS)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 0], [2, 0], [0, 3, 0]]
    at_once(*[lambda order=order: caller(order) for order in orders])


def test_backward_of_one_graph_from_several_threads_is_right(devices) -> None:
    leaves = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    losses = [fp.pmap(loss_fn)(leaf, ROWS) for leaf in leaves]
    want = [torch.autograd.grad(loss_fn(leaf, ROWS), leaf)[0] for leaf in leaves]
    got: dict[int, torch.Tensor] = {}

    def caller(k: int) -> None:
        (got[k],) = torch.autograd.grad(losses[k], leaves[k])

    at_once(*[lambda k=k: caller(k) for k in range(4)])
    torch.testing.assert_close([got[k] for k in range(4)], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner_devices", [None, 1, 3, [2, 0], ["cpu:1"]], ids=str)
def test_nested_calls_equal_plain_code(inner_devices: Any, devices) -> None:
    fp_devices = None if len(devices) < 3 else inner_devices
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    inner = fp.pmap(lambda w, x: (x @ w).sin(), devices=fp_devices)
    inner_step = fp.pmap(fp.grad(loss_fn), devices=fp_devices)

    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return inner(w, x).square().mean() + (inner_step(w.detach(), x) * w).sum()

    def plain(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().square().mean() + (fp.grad(loss_fn)(w.detach(), x) * w).sum()

    values = [plain(weight, ROWS), fp.pmap(outer)(weight, ROWS)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(value, weight, create_graph=True)[0] for value in values]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)
    second = [torch.autograd.grad(grad.sum(), weight)[0] for grad in grads]
    torch.testing.assert_close(second[1], second[0], rtol=1e-12, atol=1e-12)
    fused = fp.pmap(fp.grad(outer))(weight.detach(), ROWS)
    torch.testing.assert_close(fused, grads[0].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_shard", [False, True])
def test_pmap_in_a_backward_hook_is_right(in_shard: bool, devices) -> None:
    scale = fp.pmap(lambda g: 3 * g, in_axes=0)
    leaf = ROWS.clone().requires_grad_()

    def body(x: torch.Tensor) -> torch.Tensor:
        out = x.sin()
        if out.requires_grad:
            out.register_hook(scale)
        return out

    out = (fp.pmap(body, in_axes=0) if in_shard else body)(leaf)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(grad, 3 * ROWS.cos())


def test_parallel_call_in_a_shard_is_right(devices) -> None:
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sine, cosine = fp.parallel_call(
            [lambda w, x: (x @ w).sin(), lambda w, x: (x @ w).cos()], [(w, x)] * 2
        )
        return (sine * cosine).mean()

    def plain(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ w).sin() * (x @ w).cos()).mean()

    values = [plain(weight, ROWS), fp.pmap(outer)(weight, ROWS)]
    grads = [torch.autograd.grad(value, weight, create_graph=True)[0] for value in values]
    second = [torch.autograd.grad(grad.sum(), weight)[0] for grad in grads]
    torch.testing.assert_close((values[1], grads[1], second[1]), (values[0], grads[0], second[0]))
    torch.testing.assert_close(fp.pmap(fp.grad(outer))(weight.detach(), ROWS), grads[0].detach())


SPELLINGS: dict[str, Callable[..., Any]] = {
    "bound before funcpar was imported": bound_before,
    "looked up late": lambda module, params, args: torch.func.functional_call(module, params, args=args),
    "stateless": stateless.functional_call,
}


@pytest.mark.filterwarnings("ignore:.*stateless.functional_call.*:FutureWarning")
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_functional_call_of_one_module_from_four_threads_is_never_wrong(
    spelling: str, size: int, hurried
) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Tanh(), nn.Linear(4, 1)).double()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: (tensor, tensor.clone()) for name, tensor in tensors.items()}
    functional_call = SPELLINGS[spelling]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, params, (x,)).square().mean()

    params = [{name: torch.randn_like(p) for name, p in module.named_parameters()} for _ in range(4)]
    want = [fp.value_and_grad(loss)(each, ROWS) for each in params]
    step = fp.pmap(fp.value_and_grad(loss), devices=size)
    calls = 5_000 // 9 // 4 + 1 if THOROUGH else 20
    wrong: list[int] = []

    def caller(k: int) -> None:
        for call in range(calls):
            value, grads = step(params[k], ROWS)
            right = torch.allclose(value, want[k][0], rtol=1e-12, atol=1e-12)
            right &= all(torch.allclose(g, want[k][1][n], rtol=1e-9, atol=1e-12) for n, g in grads.items())
            if not right:
                wrong.append(call)

    at_once(*[lambda k=k: caller(k) for k in range(4)])
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert wrong == []
    assert all(after[name] is tensor for name, (tensor, _) in before.items())
    assert all(torch.equal(after[name], copy) for name, (_, copy) in before.items())


def test_shards_that_wait_for_each_other_get_through_in_forward_and_backward() -> None:
    forward, backward = threading.Barrier(2), threading.Barrier(2)
    threads: list[int] = []

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            forward.wait(LIMIT)
            threads.append(threading.get_ident())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            backward.wait(LIMIT)
            threads.append(threading.get_ident())
            return grad

    fp.set_cpu_devices(2, threads_per_device=1)
    leaf = ROWS.clone().requires_grad_()
    fp.pmap(Meeting.apply, in_axes=0)(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(ROWS))
    fp.pmap(fp.grad(lambda w, x: Meeting.apply(x * w).mean()))(ROWS[0, 0], ROWS)
    assert len(threads) == 8
    assert len(set(threads)) == 2
    assert threading.get_ident() not in threads


def test_shards_on_one_device_named_twice_run_at_once() -> None:
    met = threading.Barrier(3)

    def body(x: torch.Tensor) -> torch.Tensor:
        met.wait(LIMIT)
        return x

    assert torch.equal(fp.pmap(body, in_axes=0, devices=[0, 0, 0])(ROWS), ROWS)


def test_three_devices_that_sleep_do_so_at_the_same_time() -> None:
    fp.set_cpu_devices(3, threads_per_device=1)
    sleep = fp.pmap(lambda x: time.sleep(0.3) or x, in_axes=0)
    start = time.monotonic()
    sleep(ROWS)
    assert 0.3 <= time.monotonic() - start < 0.75
