"""Tensors that a function closes over get their gradients, or the call is refused; never a silent zero."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

import funcpar as fp
from funcpar import _closure
from tests.strategies import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
F64 = torch.float64
W, V = random_tensor((3,), F64, 1), random_tensor((3,), F64, 2)
X = random_tensor((7, 3), F64, 3)


def loss(w, x):
    return ((x @ w).tanh() ** 2).mean()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def split(fun):
    return fp.pmap(fun, in_axes=0)


def plain(fun):
    return fun


def right_or_refused(compute):
    """Run ``compute`` with pmap and without; whoever is refused must be told to pass an argument."""
    expected = compute(plain)
    try:
        found = compute(split)
    except ValueError as error:
        assert "as an argument" in str(error)
    else:
        close(found, expected)


def test_a_module_called_directly_gets_its_gradients(devices):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4, dtype=F64), torch.nn.Tanh())

    def grads(transform):
        module.zero_grad()
        transform(lambda x: module(x).square().mean())(X).backward()
        return [p.grad.clone() for p in module.parameters()]

    close(grads(split), grads(plain))


def test_a_leaf_that_is_an_argument_and_closed_over_gets_the_sum(devices):
    w = W.clone().requires_grad_()
    close(
        torch.autograd.grad(fp.pmap(lambda u, x: loss(u * w, x))(w, X), w),
        torch.autograd.grad(loss(w * w, X), w),
    )


def test_a_leaf_behind_a_tensor_that_is_closed_over_gets_its_gradient(devices):
    def grads(transform):
        w = W.clone().requires_grad_()
        h = w.exp()
        (transform(lambda x: loss(h, x))(X) + h.sum()).backward()
        return w.grad

    close(grads(split), grads(plain))


def test_the_same_leaf_in_two_calls_of_one_backward_gets_both(devices):
    def grads(transform):
        w = W.clone().requires_grad_()
        h = w.exp()
        fun = transform(lambda x: loss(h, x))
        (fun(X) * fun(2 * X)).backward()
        return w.grad

    close(grads(split), grads(plain))


def by_grad(transform, w):
    return fp.grad(lambda w: transform(lambda x: loss(w, x))(X))(w).detach()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_fp_grad_around_a_function_that_closes_over_its_argument_is_no_silent_zero(devices, requires_grad):
    w = W.clone().requires_grad_(requires_grad)
    right_or_refused(lambda transform: by_grad(transform, w))


def test_nested_fp_grad_around_a_closed_over_argument_is_no_silent_zero(devices):
    inner = lambda transform: lambda w: (fp.grad(lambda w: transform(lambda x: loss(w, x))(X))(w) * V).sum()
    right_or_refused(lambda transform: fp.grad(inner(transform))(W))


@pytest.mark.parametrize("name", ["hessian", "jacobian", "vjp"])
def test_torch_autograd_functional_of_a_closed_over_argument_is_no_silent_zero(devices, name):
    options = {"create_graph": True} if name == "jacobian" else {}
    fun = lambda transform: lambda w: transform(lambda x: loss(w, x))(X)
    right_or_refused(lambda transform: getattr(functional, name)(fun(transform), W, **options))


def test_the_gradient_of_a_closed_over_tensor_that_is_no_leaf_is_no_silent_none(devices):
    def grads(transform):
        h = W.clone().requires_grad_() * 2
        return torch.autograd.grad(transform(lambda x: loss(h, x))(X) + h.sum(), h)[0]

    right_or_refused(grads)


def test_a_tensor_that_is_an_argument_and_closed_over_and_no_leaf_gets_the_sum(devices):
    def grads(mapped):
        h = W.clone().requires_grad_() * 2
        transform = fp.pmap if mapped is split else plain
        return torch.autograd.grad(transform(lambda u, x: loss(u * h, x))(h, X), h)[0]

    right_or_refused(grads)


class Clip(torch.autograd.Function):
    """The identity, whose backward is not linear: clipping the parts is not clipping their sum."""

    @staticmethod
    def forward(ctx, w):
        return w.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.01, 0.01)


def with_tensor_hook(w):
    h = w * 2
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return h


def with_node_hook(w):
    h = w * 2
    h.grad_fn.register_prehook(lambda grads: (grads[0].clamp(-0.01, 0.01),))
    return h


@pytest.mark.parametrize("upstream", [Clip.apply, with_tensor_hook, with_node_hook])
def test_what_is_upstream_of_a_closed_over_tensor_runs_once_on_the_whole_gradient(devices, upstream):
    def grads(transform):
        w = W.clone().requires_grad_()
        h = upstream(w)
        transform(lambda x: loss(h, x))(X).backward()
        return w.grad

    right_or_refused(grads)


def test_a_retained_gradient_of_a_closed_over_tensor_is_that_of_the_whole(devices):
    def grads(transform):
        h = W.clone().requires_grad_() * 2
        h.retain_grad()
        transform(lambda x: loss(h, x))(X).backward()
        return h.grad

    right_or_refused(grads)


def test_a_hook_on_a_closed_over_leaf_is_refused():
    w = W.clone().requires_grad_()
    w.register_hook(lambda g: g * 2)
    with pytest.raises(
        ValueError, match=r"closes over a tensor of shape \(3,\).* and has a hook.*\nPass it as an arg"
    ):
        split(lambda x: loss(w, x))(X)


def test_a_hook_that_runs_after_accumulation_runs_once(devices):
    calls, w = [], W.clone().requires_grad_()
    w.register_post_accumulate_grad_hook(lambda w: calls.append(w.grad.clone()))
    split(lambda x: loss(w, x))(X).backward()
    close(calls, [fp.grad(loss)(W, X)])


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(W),
    "hessian": lambda f: torch.func.hessian(f)(W),
    "jvp": lambda f: torch.func.jvp(f, (W,), (V,)),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([W, V])),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("mapped", [split, lambda f: fp.grad(split(f)), lambda f: split(fp.grad(f))])
def test_a_tensor_of_an_outer_torch_func_level_is_followed(devices, transform, mapped):
    of = lambda way: lambda w: way(lambda x: loss(w, x))(X).sum()
    close(transform(of(mapped)), transform(of(plain if mapped is split else fp.grad)))


def test_second_derivatives_reach_closed_over_leaves(devices):
    def grads(transform):
        w, u = W.clone().requires_grad_(), V.clone().requires_grad_()
        first = torch.autograd.grad(transform(lambda x: loss(w * u, x))(X), w, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (w, u))

    close(grads(split), grads(plain))


def test_a_gradient_that_closes_over_a_leaf_is_part_of_its_graph(devices):
    u = V.clone().requires_grad_()
    fun = lambda w, x: loss(w * u, x)
    found = torch.autograd.grad(fp.pmap(fp.grad(fun))(W, X).square().sum(), u)
    close(found, torch.autograd.grad(fp.grad(fun)(W, X).square().sum(), u))


@pytest.mark.parametrize("repeat", range(10))
def test_a_closed_over_module_is_cast_by_each_shard_for_itself_under_autocast(repeat):
    module = torch.nn.Linear(3, 3)
    x = torch.randn(8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = fp.pmap(lambda x: module(module(x).relu()), in_axes=0)(x)
        expected = module(module(x).relu())
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert module.weight.grad.isfinite().all()


def test_what_torch_pytest_and_funcpar_name_in_their_own_modules_is_not_searched():
    h = W.clone().requires_grad_().exp()

    def fun(x):
        assert x is not None
        return fp.psum(checkpoint(loss, h, x, use_reentrant=False))

    found = list(_closure._reached([fun]))
    assert any(item is h for item in found)
    assert len(found) < 100


@pytest.mark.parametrize("recorded", [True, False])
def test_a_tensor_that_another_shard_has_computed_is_refused(recorded):
    # Its graph ends at what stands for that shard's arguments, and nobody would hand its gradient on.
    def body(w, x):
        kept["h"] = h = (x @ w).sum()
        fp.psum(torch.zeros(()))  # Now all shards have left theirs.
        return h + kept["h"]

    kept: dict[str, torch.Tensor] = {}
    w, x = torch.ones(3), torch.arange(12.0).reshape(4, 3)
    message = r"another shard has computed, and left in an attribute .*\nReturn it, exchange it"
    with torch.set_grad_enabled(recorded), pytest.raises(ValueError, match=message):
        fp.pmap(fp.grad(body), devices=2)(w, x)
    with pytest.raises(ValueError, match=message):
        fp.pmap(body, devices=2)(w.requires_grad_(), x)
    with torch.no_grad():
        fp.pmap(body, devices=2)(w, x)  # No gradient is lost.
