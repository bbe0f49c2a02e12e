"""The law: pmap(f) == f, and every way to the gradient gives that of f."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

import funcpar as fp
from funcpar import tree
from tests.strategies import cases, device_lists, random_tensor
from tests.test_tree import random_trees

WIDE = (torch.float32, torch.float64)
# Ten laws share the cases of the profile: 30 each, or 500 under thorough.
share = settings(max_examples=min(500, settings().max_examples))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}


def differentiable(leaf):
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def assert_close(found, expected, dtype):
    """Compare trees: structure, and every leaf to the tolerance of the dtype times its largest entry."""
    found, spec = tree.flatten(found)
    wanted, wanted_spec = tree.flatten(expected)
    assert spec == wanted_spec
    for one, other, path in zip(found, wanted, spec.paths("leaf"), strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other, path
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        if not differentiable(other):
            assert torch.equal(one, other), path
            continue
        finite = other.detach().abs()[other.detach().isfinite()]
        scale = max(finite.max().item() if finite.numel() else 0.0, 1e-2)
        torch.testing.assert_close(
            one, other, rtol=0, atol=TOLERANCE[dtype] * scale, equal_nan=True, msg=path
        )


def assert_bitwise(found, expected):
    for one, other in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def scores(params, batch, extra, dims):
    """Return one number per row that depends on every leaf: a linear map and a tanh for each parameter."""
    features = 0.5
    for k, (name, leaf) in enumerate(sorted(batch.items())):
        flat = leaf.movedim(dims[name], 0)[..., None].flatten(1)
        real = flat if flat.is_floating_point() else flat.double().sin()
        features = features + real.mean(1) * (k + 1) / 3
    out = features * sum(float(leaf) for leaf in tree.leaves(extra))
    for k, leaf in enumerate(map(torch.as_tensor, tree.leaves(params))):
        flat = (leaf * (1 + 2j)).real + leaf.abs() if leaf.is_complex() else leaf
        out = out + torch.tanh(features[:, None] * flat.reshape(-1).to(features.dtype) - k).sum(1)
    return out


def mean_loss(dims):
    return lambda params, batch, extra=None: (scores(params, batch, extra, dims) ** 2).mean()


def per_row(dims):
    return lambda params, batch, extra=None: scores(params, batch, extra, dims)


def per_row_and_more(dims):
    def fun(params, batch, extra=None):
        out = scores(params, batch, extra, dims)
        # More columns than a shard has rows: if those were split along dimension 1, they are not here.
        return out[:, None] * torch.arange(1, 102, dtype=out.dtype)

    return fun


def nested(dims):
    def fun(params, batch, extra=None):
        out = scores(params, batch, extra, dims)
        twice = out.repeat_interleave(2, 0)
        return {"loss": out.mean(), "parts": [out, (out > 0, twice)], "none": None, "given": extra}

    return fun


FUNCTIONS = st.sampled_from([mean_loss, per_row, per_row_and_more, nested])


def mapped(fun, case):
    return fp.pmap(fun, in_axes=case.in_axes, devices=case.devices)


@share
@given(cases(WIDE), FUNCTIONS)
def test_a_pmapped_function_is_the_function(case, fun):
    fun = fun(case.dims)
    found = mapped(fun, case)(*case.args, **case.kwargs)
    assert_close(found, fun(*case.args, **case.kwargs), case.dtype)
    assert_bitwise(mapped(fun, case)(*case.args, **case.kwargs), found)


@share
@given(cases((torch.bfloat16,), min_rows=1), st.sampled_from([mean_loss, per_row, per_row_and_more]))
def test_a_pmapped_function_is_the_function_loosely_in_bfloat16(case, fun):
    fun = fun(case.dims)
    found = mapped(fun, case)(*case.args, **case.kwargs)
    assert_close(found, fun(*case.args, **case.kwargs), case.dtype)
    assert_bitwise(mapped(fun, case)(*case.args, **case.kwargs), found)


@share
@given(cases(WIDE))
def test_mapping_the_gradient_is_the_gradient(case):
    fun = mean_loss(case.dims)
    expected = fp.value_and_grad(fun)(*case.args, **case.kwargs)
    found = mapped(fp.value_and_grad(fun), case)(*case.args, **case.kwargs)
    assert_close(found, expected, case.dtype)
    assert_close(mapped(fp.grad(fun), case)(*case.args, **case.kwargs), expected[1], case.dtype)
    assert_bitwise(mapped(fp.value_and_grad(fun), case)(*case.args, **case.kwargs), found)


@share
@given(cases(WIDE))
def test_the_gradient_of_a_mapped_function_is_the_gradient(case):
    fun = mean_loss(case.dims)
    expected = fp.value_and_grad(fun)(*case.args, **case.kwargs)
    found = fp.value_and_grad(mapped(fun, case))(*case.args, **case.kwargs)
    assert_close(found, expected, case.dtype)
    assert_bitwise(fp.value_and_grad(mapped(fun, case))(*case.args, **case.kwargs), found)


def by_backward(fun, case):
    """Gradients of all differentiable leaves of params and batch, through plain autograd."""
    stand = lambda leaf: leaf.clone().requires_grad_() if differentiable(leaf) else leaf
    params, batch = tree.map(stand, case.params), tree.map(stand, case.batch)
    fun(params, batch, *case.args[2:], **case.kwargs).backward()
    return [leaf.grad for leaf in tree.leaves((params, batch)) if differentiable(leaf)]


@share
@given(cases(WIDE))
def test_backward_through_a_mapped_function_is_backward(case):
    assume(any(map(differentiable, tree.leaves((case.params, case.batch)))))
    fun = mean_loss(case.dims)
    assert_close(by_backward(mapped(fun, case), case), by_backward(fun, case), case.dtype)


def by_torch_func(fun, case):
    leaves, spec = tree.flatten(case.params)
    chosen = [k for k, leaf in enumerate(leaves) if differentiable(leaf)]

    def flat(*given):
        new = dict(enumerate(leaves)) | dict(zip(chosen, given, strict=True))
        return fun(tree.unflatten(spec, new.values()), *case.args[1:], **case.kwargs)

    inputs = [leaves[k] for k in chosen]
    return torch.func.grad(flat, tuple(range(len(inputs))))(*inputs) if inputs else ()


@share
@given(cases(WIDE))
def test_torch_func_around_a_mapped_function_gives_the_gradient(case):
    fun = mean_loss(case.dims)
    expected = by_torch_func(fun, case)
    assert_close(by_torch_func(mapped(fun, case), case), expected, case.dtype)
    inside = [grad for grad in tree.leaves(fp.grad(fun)(*case.args, **case.kwargs)) if grad is not None]
    assert_close(inside, list(expected), case.dtype)


@share
@given(cases(WIDE))
def test_gradients_of_split_arguments_are_joined(case):
    fun = mean_loss(case.dims)
    expected = fp.grad(fun, (1, 0))(*case.args, **case.kwargs)
    assert_close(mapped(fp.grad(fun, (1, 0)), case)(*case.args, **case.kwargs), expected, case.dtype)
    assert_close(fp.grad(mapped(fun, case), (1, 0))(*case.args, **case.kwargs), expected, case.dtype)


@share
@given(cases((torch.float64,)))
def test_closed_over_parameters_get_their_gradients(case):
    def grads(transform):
        params = tree.map(lambda p: p.clone().requires_grad_() if differentiable(p) else p, case.params)
        loss = functools.partial(mean_loss(case.dims), params)
        transform(loss)(case.batch).backward()
        return [leaf.grad for leaf in tree.leaves(params) if differentiable(leaf)]

    if any(map(differentiable, tree.leaves(case.params))):
        expected = grads(lambda loss: loss)
        found = grads(lambda loss: fp.pmap(loss, in_axes=(case.dims,), devices=case.devices))
        assert_close(found, expected, torch.float64)


@share
@given(st.integers(0, 9), st.integers(0, 2), device_lists, st.integers(0, 2), st.booleans())
def test_split_then_merge_is_the_identity(rows, dim, devices, num_other, negative):
    shape = [2] * max(num_other, dim)
    shape.insert(dim, rows)
    x = random_tensor(tuple(shape), torch.float32, 0)
    dim = dim - len(shape) if negative else dim
    assert_bitwise(fp.pmap(lambda x: x, in_axes=dim, out_axes=dim, devices=devices)(x), x)


@share
@given(random_trees, st.integers(1, 9), device_lists)
def test_split_then_merge_is_the_identity_on_trees(shape, rows, devices):
    batch = [torch.zeros(rows), tree.map(lambda k: torch.arange(rows * 2).view(rows, 2) + k, shape)]
    found = fp.pmap(lambda batch: batch, in_axes=0, devices=devices)(batch)
    assert tree.flatten(found)[1] == tree.flatten(batch)[1]
    assert_bitwise(found, batch)


@pytest.mark.parametrize("rows", range(18))
def test_the_gradients_agree_for_any_number_of_rows(devices, rows):
    w, x = random_tensor((5,), torch.float64, 1), random_tensor((rows, 5), torch.float64, 2)
    loss = lambda w, x: ((x @ w) ** 2).mean()
    expected = fp.grad(loss)(w, x)
    assert_close(fp.pmap(fp.grad(loss), devices=devices)(w, x), expected, torch.float64)
    assert_close(fp.grad(fp.pmap(loss, devices=devices))(w, x), expected, torch.float64)
