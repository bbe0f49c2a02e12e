"""Sums of gradients over shards: exact, and never written into memory that someone else can see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import funcpar as fp
from funcpar._graph import owned
from funcpar._reduce import add_up, reduce_share
from tests.strategies import random_tensor

F64 = torch.float64
BIG = 1 << 16  # Entries: large enough that the workers share the sum of one leaf.


def gradients(fun, params, x):
    """Return the gradients by each way through pmap, after plain backward's."""
    with torch.no_grad():
        yield fp.grad(fun)(params, x)
        yield fp.pmap(fp.grad(fun))(params, x)
        yield fp.grad(fp.pmap(fun))(params, x)
    stands = fp.tree.map(lambda p: p.detach().clone().requires_grad_(), params)
    fp.pmap(fun)(stands, x).backward()
    yield fp.tree.map(lambda p: p.grad, stands)


def assert_gradients(fun, params, x, expected):
    for found in gradients(fun, params, x):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [3, BIG, BIG + 1])
def test_leaves_of_any_size_are_summed(devices, size):
    w, x = random_tensor((size,), F64, 1), random_tensor((7, 1), F64, 2)
    expected = x.mean() * w.cos()
    assert_gradients(lambda p, x: (x * p["w"].sin()).sum(1).mean(), {"w": w}, x, {"w": expected})


@pytest.mark.parametrize("size", [3, BIG])
def test_expanded_and_aliased_gradients_are_not_corrupted(devices, size):
    params = {name: random_tensor((size,), F64, k) for k, name in enumerate("abc")}
    x = random_tensor((7, 1), F64, 2)
    fun = lambda p, x: (p["a"] + p["b"]).sum() * x.mean() + p["c"].sum()
    ones = torch.ones(size, dtype=F64)
    assert_gradients(fun, params, x, {"a": ones * x.mean(), "b": ones * x.mean(), "c": ones})


def test_gradients_that_are_parts_of_one_tensor_are_not_corrupted(devices):
    params = [random_tensor((4,), F64, k) for k in range(3)]
    x = random_tensor((7, 12), F64, 2)
    assert_gradients(lambda p, x: (x @ torch.cat(p)).mean(), params, x, list(x.mean(0).split(4)))


def test_transposed_and_channels_last_gradients_are_summed(devices):
    params = {"t": random_tensor((3, 4), F64, 1), "c": random_tensor((2, 3, 4, 5), F64, 2)}
    params["c"] = params["c"].contiguous(memory_format=torch.channels_last)
    x = random_tensor((7, 1), F64, 2)
    fun = lambda p, x: ((p["t"].T.sin().sum() + p["c"].sin().sum()) * x).mean()
    assert_gradients(fun, params, x, {name: p.cos() * x.mean() for name, p in params.items()})


def owner_of(make_gradient):
    """Return an operation that is linear in its input and whose backward returns the user's own memory."""

    class Owner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, s):
            return w.sum() * 0 + s

        @staticmethod
        def backward(ctx, g):
            return make_gradient(), g

    return Owner.apply


KEPT = torch.ones(3, dtype=F64)
ARRAY = np.ones(3)
BUFFER = bytearray(np.ones(3).tobytes())
OWNERS = {
    "a tensor": lambda: KEPT,
    "a view": lambda: KEPT.view(3),
    "a numpy array": lambda: torch.from_numpy(ARRAY),
    "a buffer": lambda: torch.frombuffer(BUFFER, dtype=F64),
}


@pytest.mark.parametrize("make", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("transform", [fp.grad, lambda f: fp.pmap(fp.grad(f)), lambda f: fp.grad(fp.pmap(f))])
def test_memory_that_a_custom_function_returns_stays_the_users(devices, make, transform):
    apply = owner_of(make)
    found = transform(lambda w, x: apply(w, x.mean()))(torch.ones(3, dtype=F64), torch.ones(7, 1, dtype=F64))
    found += 1
    assert torch.equal(make(), torch.ones(3, dtype=F64))


def test_sparse_embedding_gradients_stay_sparse(devices):
    weight, index = random_tensor((5, 2), F64, 1), torch.tensor([0, 1, 1, 4, 0, 1, 3])
    fun = lambda w, index: torch.nn.functional.embedding(index, w, sparse=True).sin().mean()
    expected = fp.grad(lambda w, index: w[index].sin().mean())(weight, index)
    for found in gradients(fun, weight, index):
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), expected, rtol=0, atol=1e-12)


def test_a_gradient_that_is_sparse_in_some_shards_only_is_summed(devices):
    weight, index = random_tensor((5, 2), F64, 1), torch.tensor([0, 1, 1, 4, 0, 1, 3])

    def fun(w, index):
        sparse = bool(index[0] == 0)
        return torch.nn.functional.embedding(index, w, sparse=sparse).sin().mean()

    expected = fp.grad(lambda w, index: w[index].sin().mean())(weight, index)
    for found in gradients(fun, weight, index):
        dense = found.to_dense() if found.is_sparse else found
        torch.testing.assert_close(dense, expected, rtol=0, atol=1e-12)


def test_a_leaf_that_only_some_shards_use_is_summed_over_those(devices):
    w, x = random_tensor((3,), F64, 1), torch.arange(8.0, dtype=F64)
    fun = lambda p, x: (x * p["a"].sum() if x[0] == 0 else x * p["b"].sum()).mean()
    found = fp.pmap(fp.grad(fun))({"a": w, "b": w.clone(), "c": w.clone()}, x)
    first = x[: -(-8 // len(devices))].sum() / 8
    for name, entry in {"a": first, "b": x.mean() - first, "c": 0.0}.items():
        torch.testing.assert_close(found[name], torch.full((3,), float(entry), dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [3, BIG])
def test_gradients_of_a_vectorized_backward_are_summed(devices, size):
    w = torch.ones(size, dtype=F64, requires_grad=True)
    out = fp.pmap(lambda p, x: x * p.sum() + p[0] ** 2)(w, random_tensor((7,), F64, 1))
    rows = torch.eye(7, dtype=F64)
    batched = torch.autograd.grad(out, w, rows, is_grads_batched=True, retain_graph=True)[0]
    one_by_one = torch.stack([torch.autograd.grad(out, w, row, retain_graph=True)[0] for row in rows])
    torch.testing.assert_close(batched, one_by_one, rtol=0, atol=1e-12)


def test_the_sum_has_the_order_of_the_ranks(devices):
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])[: len(devices)]
    expected = x[0].clone()
    for entry in x[1:]:
        expected = expected + entry
    fun = lambda w, x: (w * x).sum()
    for _ in range(5):
        assert fp.pmap(fp.grad(fun), out_axes="sum")(torch.tensor(1.0), x) == expected


def test_only_memory_that_a_list_alone_sees_is_owned():
    kept = torch.ones(4)
    assert owned([torch.ones(4), kept, torch.ones(1).expand(4), None]) == [True, False, False, False]
    assert owned([kept.view(2, 2)]) == [False]
    assert owned([torch.from_numpy(ARRAY)]) == [False]


def test_a_gradient_that_a_pmapped_step_made_itself_is_summed_in_place():
    fp.set_cpu_devices(2)
    w, x = torch.ones(BIG), torch.ones(2, 1)
    pointers = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.view_as(w)

        @staticmethod
        def backward(ctx, g):
            out = g * 2
            pointers.append(out.data_ptr())
            return out

    found = fp.pmap(fp.grad(lambda w, x: (Watch.apply(w).sin() * x).sum(1).mean()))(w, x)
    assert found.data_ptr() in pointers


def test_sums_fill_what_there_is():
    rows = [[torch.ones(2), None, torch.ones(1)], [None, None, torch.ones(1)], [torch.ones(2), None, None]]
    totals = {}
    for rank in range(3):
        reduce_share(rows, [True, False, False], rank, totals)
    assert [total if total is None else total.tolist() for _, total in sorted(totals.items())] == [
        [2, 2],
        None,
        [2],
    ]
    assert add_up([None]) is None
    one = torch.ones(1)
    assert add_up([None, one]) is not one
