"""Derivatives of every order, by every means, around pmap and inside it."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch.autograd import functional

import funcpar as fp
from tests.strategies import random_tensor

# Both are torch's own, when it first needs its rules of forward mode.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]
F64 = torch.float64
W, V = random_tensor((3,), F64, 1), random_tensor((3,), F64, 2)
X, DX = random_tensor((7, 3), F64, 3), random_tensor((7, 3), F64, 4)


def loss(w, x):
    return ((x @ w).tanh() ** 2).mean()


def rows(w, x):
    return (x @ w).tanh()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


PAIRS = {
    "pmap(loss)": (lambda: fp.pmap(loss), loss),
    "pmap(rows)": (lambda: fp.pmap(rows), rows),
    "pmap(grad)": (lambda: fp.pmap(fp.grad(loss)), fp.grad(loss)),
    "pmap(value_and_grad)": (
        lambda: fp.pmap(fp.value_and_grad(loss, (0, 1))),
        fp.value_and_grad(loss, (0, 1)),
    ),
}
pairs = pytest.mark.parametrize(("make", "plain"), PAIRS.values(), ids=PAIRS)


def flat(fun):
    """Return the same function with a flat tuple of tensors as its result."""
    return lambda *args: tuple(fp.tree.leaves(fun(*args)))


@pairs
def test_gradcheck_and_gradgradcheck_pass(devices, make, plain):
    inputs = (W.clone().requires_grad_(), X[:5].clone().requires_grad_())
    torch.autograd.gradcheck(flat(make()), inputs)
    torch.autograd.gradgradcheck(flat(make()), inputs)


def pulled(out, pull):
    return pull(tuple(torch.ones_like(leaf) for leaf in out))


TRANSFORMS = {
    "jacrev": lambda f: torch.func.jacrev(f, (0, 1))(W, X),
    "jacfwd": lambda f: torch.func.jacfwd(f, (0, 1))(W, X),
    "hessian": lambda f: torch.func.hessian(f)(W, X),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f), 1)(W, X),
    "jacrev of hessian": lambda f: torch.func.jacrev(torch.func.hessian(f))(W, X),
    "jvp": lambda f: torch.func.jvp(f, (W, X), (V, DX)),
    "vjp": lambda f: pulled(*torch.func.vjp(f, W, X)),
    "vmap of params": lambda f: torch.func.vmap(f, (0, None))(torch.stack([W, V]), X),
    "vmap of batch": lambda f: torch.func.vmap(f, (None, 0))(W, torch.stack([X, DX])),
    "vmap of batch, last dimension": lambda f: torch.func.vmap(f, (None, 2))(W, torch.stack([X, DX], 2)),
    "vmap of jvp": lambda f: torch.func.vmap(lambda v: torch.func.jvp(f, (W, X), (v, DX)))(DX),
    "functional.jacobian": lambda f: functional.jacobian(f, (W, X)),
    "functional.jacobian, create_graph": lambda f: functional.jacobian(f, (W, X), create_graph=True),
    "functional.jacobian, forward": lambda f: functional.jacobian(
        f, (W, X), vectorize=True, strategy="forward-mode"
    ),
}  # fmt: skip


@pairs
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_around_give_what_they_give_of_the_function(make, plain, transform):
    close(transform(flat(make())), transform(flat(plain)))


@pairs
def test_a_vectorized_jacobian_is_right_or_refused(make, plain):
    expected = functional.jacobian(flat(plain), (W, X))
    for create_graph in (False, True):
        try:
            found = functional.jacobian(flat(make()), (W, X), vectorize=True, create_graph=create_graph)
        except (RuntimeError, ValueError) as error:
            assert "is_grads_batched" in str(error)
        else:
            close(found, expected)


@pytest.mark.parametrize("name", ["hessian", "hvp", "vhp", "jvp", "vjp"])
def test_torch_autograd_functional_gives_what_it_gives_of_the_function(devices, name):
    transform = getattr(functional, name)
    args = {"hessian": (), "vjp": ()}.get(name, ((V, DX),))
    close(transform(fp.pmap(loss), (W, X), *args), transform(loss, (W, X), *args))


@pairs
@pytest.mark.parametrize("closed", [False, True], ids=["argument", "closed over"])
def test_dual_numbers_pass_through(devices, make, plain, closed):
    def tangents(fun):
        with fwd.dual_level():
            w, x = fwd.make_dual(W, V), fwd.make_dual(X, DX)
            out = flat(fun)(w, x)
            return [tuple(fwd.unpack_dual(leaf)) for leaf in out]

    def closed_tangents(transform):
        with fwd.dual_level():
            w = fwd.make_dual(W, V)
            out = transform(lambda u, x: loss(u * w, x))(W, X)
            return [tuple(fwd.unpack_dual(leaf)) for leaf in fp.tree.leaves(out)]

    if closed:
        close(closed_tangents(lambda f: fp.pmap(fp.grad(f))), closed_tangents(fp.grad))
        close(closed_tangents(fp.pmap), closed_tangents(lambda f: f))
    else:
        close(tangents(make()), tangents(plain))


INSIDE = {
    "grad of rows": torch.func.vmap(torch.func.grad(lambda w, r: (r @ w).tanh()), (None, 0)),
    "jacrev": torch.func.jacrev(rows),
    "jacfwd": torch.func.jacfwd(rows),
    "jvp": lambda w, x: torch.func.jvp(lambda w: rows(w, x), (w,), (V,))[1],
    "vjp": lambda w, x: torch.func.vjp(rows, w, x)[1](x[:, 0])[1],
    "hessian": torch.func.vmap(torch.func.hessian(lambda w, r: (r @ w).tanh()), (None, 0)),
    "fp.grad of rows": lambda w, x: fp.grad(lambda x: rows(w, x).sum())(x),
    "fp.grad of fp.grad": lambda w, x: fp.grad(lambda x: fp.grad(lambda x: rows(w, x).sum())(x).sin().sum())(
        x
    ),
}


@pytest.mark.parametrize("fun", INSIDE.values(), ids=INSIDE)
def test_transforms_inside_give_what_they_give_outside(devices, fun):
    close(fp.pmap(fun, out_axes=0)(W, X), fun(W, X))
    scalar = lambda f: lambda w: f(w, X).sin().sum()
    close(fp.grad(scalar(fp.pmap(fun, out_axes=0)))(W), fp.grad(scalar(fun))(W))
    close(torch.func.grad(scalar(fp.pmap(fun, out_axes=0)))(W), torch.func.grad(scalar(fun))(W))


def along(grad):
    """Return a scalar function of what ``grad`` gives."""
    return lambda w, x: (grad(w, x) * V).sum()


@pytest.mark.parametrize("outer", [fp.grad, torch.func.grad], ids=["fp", "torch.func"])
@pytest.mark.parametrize("middle", [fp.grad, torch.func.grad], ids=["fp", "torch.func"])
@pytest.mark.parametrize("inner", [fp.grad, torch.func.grad, lambda f: fp.pmap(fp.grad(loss))])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_third_derivatives_of_any_mixture_are_right(outer, middle, inner, requires_grad):
    w = W.clone().requires_grad_(requires_grad)
    expected = torch.func.grad(along(torch.func.grad(along(torch.func.grad(loss)))))(W, X)
    close(outer(along(middle(along(inner(fp.pmap(loss))))))(w, X).detach(), expected)


def test_third_derivatives_by_create_graph_are_right(devices):
    def third(fun):
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        one = torch.autograd.grad(fun(w, x), w, create_graph=True)[0]
        two = torch.autograd.grad((one * V).sum(), x, create_graph=True)[0]
        return torch.autograd.grad((two**2).sum(), (w, x))

    close(third(fp.pmap(loss)), third(loss))


PENALISED = {
    "pmap(value_and_grad)": lambda: fp.pmap(fp.value_and_grad(loss)),
    "value_and_grad(pmap)": lambda: fp.value_and_grad(fp.pmap(loss)),
    "torch.autograd.grad": lambda: by_create_graph(fp.pmap(loss)),
}


def by_create_graph(fun):
    def value_and_grad(w, x):
        value = fun(w, x)
        return value, torch.autograd.grad(value, w, create_graph=True)[0]

    return value_and_grad


@pytest.mark.parametrize("make", PENALISED.values(), ids=PENALISED)
def test_a_gradient_penalty_runs_one_backward_through_value_and_gradient(devices, make):
    def penalty(step):
        w = W.clone().requires_grad_()
        value, grads = step(w, X)
        (value + grads.pow(2).sum()).backward()
        return w.grad

    close(penalty(make()), penalty(by_create_graph(loss)))


def test_a_gradient_penalty_inside_the_function_is_right(devices):
    inside = lambda w, x: (fp.grad(lambda x: rows(w, x).sum())(x) ** 2).mean()
    close(fp.pmap(fp.grad(inside))(W, X), fp.grad(inside)(W, X))
    close(fp.grad(fp.pmap(inside))(W, X), fp.grad(inside)(W, X))


def test_a_second_backward_needs_retain_graph_as_in_torch(devices):
    w = W.clone().requires_grad_()
    out = fp.pmap(loss)(w, X)
    out.backward(retain_graph=True)
    once = w.grad.clone()
    out.backward()
    close(w.grad, 2 * once)
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
        out.backward()


def test_two_losses_of_one_call_may_each_run_backward(devices):
    def grads(transform, **options):
        w = {"a": W.clone().requires_grad_(), "b": V.clone().requires_grad_()}
        one, other = transform(lambda w, x: (loss(w["a"], x), loss(w["b"], x)))(w, X)
        one.backward(**options)
        other.backward()
        return w["a"].grad, w["b"].grad

    close(grads(fp.pmap), grads(lambda f: f))
    close(grads(fp.pmap, retain_graph=True), grads(lambda f: f))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("transform", [torch.func.grad, fp.grad], ids=["torch.func", "fp"])
def test_no_hidden_shard_graph_outlives_a_plain_call(devices, transform, requires_grad):
    w = W.clone().requires_grad_(requires_grad)
    with torch.no_grad():
        assert not transform(fp.pmap(loss))(w, X).requires_grad
        close(transform(fp.pmap(loss))(w, X), fp.grad(loss)(W, X))


@pytest.mark.parametrize("spec", [0, "mean"])
def test_a_function_that_detaches_part_of_its_result_gives_the_gradient_of_the_rest(devices, spec):
    fun = lambda w, x: rows(w, x).detach() * (x @ w) if spec == 0 else (rows(w, x).detach() * (x @ w)).mean()
    scalar = lambda f: lambda w: f(w, X).sum()
    close(fp.grad(scalar(fp.pmap(fun, out_axes=spec)))(W), fp.grad(scalar(fun))(W))
    with pytest.raises(RuntimeError, match=r"does not require grad"):
        fp.pmap(lambda w, x: rows(w, x).detach())(W.clone().requires_grad_(), X).sum().backward()


def test_a_result_in_a_graph_does_not_keep_the_batch_alive(devices):
    w, x = torch.ones(3, requires_grad=True), torch.ones(6, 3)
    out = fp.pmap(lambda w, x: w.sum() * x.mean(), devices=devices)(w, x)
    alive = weakref.ref(x)
    del x
    assert alive() is None
    out.backward()
    assert torch.equal(w.grad, torch.ones(3))
