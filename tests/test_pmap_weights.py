"""weight, and values that stay in shards."""

from __future__ import annotations

import pytest
import torch

import funcpar as fp
from tests import reference
from tests.strategies import random_tensor

F64 = torch.float64
W, X = random_tensor((3,), F64, 1), random_tensor((13, 3), F64, 2)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, equal_nan=True)


def loss(w, x):
    return ((x @ w) ** 2).mean()


def tokens(w, batch):
    return ((batch["x"] @ w) ** 2 * batch["mask"]).sum() / batch["mask"].sum()


def num_tokens(w, batch):
    return batch["mask"].sum()


MASK = torch.tensor([0.0] * 4 + [1, 0, 1] + [1] * 6, dtype=F64)  # The first shard of four is 0/0.


def test_a_weighted_mean_is_that_of_the_whole_though_a_shard_is_0_by_0(devices):
    batch = {"x": X, "mask": MASK}
    value, grads = fp.value_and_grad(tokens)(W, batch)
    found = fp.pmap(fp.value_and_grad(tokens), weight=num_tokens)(W, batch)
    close(found, (value, grads))
    close(fp.pmap(tokens, weight=num_tokens)(W, batch), value)
    close(fp.grad(fp.pmap(tokens, weight=num_tokens))(W, batch), grads)
    close(torch.func.grad(fp.pmap(tokens, weight=num_tokens))(W, batch), grads)
    w = W.clone().requires_grad_()
    fp.pmap(tokens, weight=num_tokens)(w, batch).backward()
    close(w.grad, grads)


def test_a_shard_of_weight_0_has_gradients_of_exactly_0():
    step = fp.pmap(fp.grad(tokens, (0, 1)), weight=num_tokens, devices=4)
    by_params, by_batch = step(W, {"x": X, "mask": MASK})
    assert by_params.isfinite().all()
    assert torch.equal(by_batch["x"][:4], torch.zeros(4, 3, dtype=F64))


def test_a_mean_under_weights_is_that_of_a_loop(devices):
    weight = lambda w, x: x.abs().sum()
    expected = reference.pmap(loss, (W, X), (None, 0), "mean", len(devices), weight)
    close(fp.pmap(loss, weight=weight)(W, X), expected)
    close(fp.pmap(fp.value_and_grad(loss), weight=weight)(W, X)[0], expected)


@pytest.mark.parametrize("kept", [False, True], ids=["tensor", "Shards"])
def test_weights_that_are_all_0_give_the_functions_own_value_undivided(devices, kept):
    calls = []
    fun = lambda x: (calls.append(len(x)), x.mean() / 0)[1]
    x = fp.pmap(lambda x: x, in_axes=0, out_axes="shards")(X) if kept else X
    out = fp.pmap(fun, in_axes=0, weight=lambda x: 0)(x)
    assert calls == [13]
    assert not out.isfinite()


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), torch.tensor(-2.0)], ids=str)
def test_weights_that_are_negative_or_not_finite_are_refused(devices, bad):
    with pytest.raises(
        ValueError, match=r"pmap\(loss\): weight returned .* for shard 0\.\nReturn a finite number"
    ):
        fp.pmap(loss, weight=lambda w, x: bad)(W, X)


def test_a_weight_that_is_no_number_is_refused(devices):
    with pytest.raises(TypeError, match=r"weight returned a Tensor for shard 0\.\nReturn one number"):
        fp.pmap(loss, weight=lambda w, x: x)(W, X)


def test_shards_go_out_and_in_and_keep_their_gradients(devices):
    w = W.clone().requires_grad_()
    kept = fp.pmap(lambda w, x: {"h": x * w, "n": len(x)}, out_axes={"h": "shards", "n": "shards"})(w, X)
    assert kept["n"].parts == tuple(reference.balanced(13, len(devices)))
    close(kept["h"].gather(), X * w)
    out = fp.pmap(lambda h, y: (h.sum(1) * y).mean(), in_axes=0)(kept["h"], X[:, 0])
    close(out, ((X * w).sum(1) * X[:, 0]).mean())
    out.backward()
    close(w.grad, fp.grad(lambda w: ((X * w).sum(1) * X[:, 0]).mean())(W))


def test_shards_that_do_not_fit_the_call_are_refused():
    keep = lambda x, n: fp.pmap(lambda x: x, in_axes=0, out_axes="shards", devices=n)(x)
    add = lambda a, b, **options: fp.pmap(lambda a, b: a, **{"in_axes": 0} | options)(a, b)
    with pytest.raises(ValueError, match=r"a is kept in shards, and in_axes=None replicates it"):
        add(keep(X, 2), X, in_axes=(None, 0))
    with pytest.raises(ValueError, match=r"arguments that are kept in shards disagree:\n  Shards\("):
        add(keep(X, 2), keep(X, 3))
    with pytest.raises(ValueError, match=r"an argument is kept in shards, .* and others have 5 rows"):
        add(keep(X, 2), X[:5])
    with pytest.raises(
        ValueError, match=r"kept in shards on cpu\[0\], cpu\[1\], and the call runs on cpu\[3\]"
    ):
        add(keep(X, 2), X, devices=[3])
