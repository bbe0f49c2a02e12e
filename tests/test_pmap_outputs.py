"""out_axes: how results leave, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

import funcpar as fp
from tests import reference
from tests.strategies import random_tensor

F64 = torch.float64
W, X = random_tensor((3,), F64, 1), random_tensor((13, 3), F64, 2)
EVEN = random_tensor((6, 6), F64, 3)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("spec", ["sum", "stack", "mean", 0, 1, -1, None])
def test_every_spec_merges_as_a_loop_over_the_shards(devices, spec):
    fun = {"sum": lambda w, x: x.T @ x, "stack": lambda w, x: x.T @ x, "mean": lambda w, x: x.mean(0)}.get(
        spec,
        (lambda w, x: w * 2)
        if spec is None
        else (lambda w, x: x * w)
        if spec == 0
        else lambda w, x: (x * w).T,
    )
    found = fp.pmap(fun, out_axes=spec)(W, X)
    close(found, reference.pmap(fun, (W, X), (None, 0), spec, len(devices)))


def test_a_prefix_gives_each_output_its_own_spec(devices):
    fun = lambda w, x: {"gram": x.T @ x, "rows": [x @ w, (x @ w) ** 2], "counts": x.new_tensor(len(x))}
    found = fp.pmap(fun, out_axes={"gram": "sum", "rows": "auto", "counts": "stack"})(W, X)
    close(found["gram"], X.T @ X)
    close(found["rows"], fun(W, X)["rows"])
    assert found["counts"].tolist() == reference.balanced(13, len(devices))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_auto_concatenates_what_has_k_rows_for_every_row(devices, k):
    fun = lambda w, x: (x @ w).repeat_interleave(k)
    close(fp.pmap(fun)(W, X), fun(W, X))


def test_auto_takes_the_weighted_mean_of_0d_floats_and_complex_numbers(devices):
    fun = lambda w, x: {"f": (x @ w).mean(), "c": torch.complex(x.mean(), x.sum() / len(x))}
    close(fp.pmap(fun)(W, X), fun(W, X))


def test_auto_returns_what_is_equal_on_all_shards(devices):
    fun = lambda w, x: (w * 2, 3, "name", None, torch.tensor(True), torch.arange(5), float("nan"))
    found = fp.pmap(fun)(W, X)
    assert found[1:5] == (3, "name", None, torch.tensor(True))
    close(found[0], W * 2)
    assert torch.equal(found[5], torch.arange(5))
    assert math.isnan(found[6])


AMBIGUOUS = {
    "a covariance": lambda w, x: x.T @ x,
    "a count": lambda w, x: (x @ w > 0).sum(),
    "a Python number": lambda w, x: float(x.sum()),
    "a filtered batch": lambda w, x: x[x[:, 0] > 0],
    "a string": lambda w, x: str(x[0, 0].item()),
}


@pytest.mark.parametrize("fun", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_auto_refuses_what_differs_and_does_not_follow_the_rows(fun):
    message = (
        r"pmap\(<lambda>\): output\['it'\] differs between shards and does not follow the rows: .*\nSay how"
    )
    with pytest.raises(ValueError, match=message):
        fp.pmap(lambda w, x: {"it": fun(w, x)})(W, X)


@pytest.mark.parametrize(
    "fun", [AMBIGUOUS["a covariance"], lambda w, x: x.T @ x @ w], ids=["matrix", "product"]
)
def test_auto_refuses_the_same_under_torch_func(fun):
    with pytest.raises(ValueError, match=r"differs between shards|promised equal|not supported"):
        torch.func.grad(lambda w: fp.pmap(fun)(w, X * w).sum())(W)
    with pytest.raises(ValueError, match=r"differs between shards|promised equal|not supported"):
        torch.func.jvp(lambda w: fp.pmap(fun)(w, X * w), (W,), (W,))


def test_none_refuses_what_differs_under_torch_func():
    with pytest.raises(ValueError, match=r"promised equal"):
        torch.func.grad(lambda w: fp.pmap(lambda w, x: x.T @ x @ w, out_axes=None)(w, X).sum())(W)


def loss(w, x):
    return ((x @ w) ** 2).mean()


def grad_inside(w, x):
    return fp.grad(loss)(w, x)


def value_and_grad_inside(w, x):
    return {"step": fp.value_and_grad(loss)(w, x)}


GRADIENTS = {"fp": grad_inside, "value": value_and_grad_inside, "torch.func": torch.func.grad(loss)}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("rows", [13, 6])
@pytest.mark.parametrize("fun", GRADIENTS.values(), ids=GRADIENTS)
def test_auto_refuses_gradients_and_points_at_the_mapped_gradient(fun, rows, requires_grad):
    # With 6 rows on 2 devices a gradient of 6 entries has the shape of what follows the rows.
    x = EVEN if rows == 6 else random_tensor((13, 6), F64, 3)
    w = random_tensor((6,), F64, 4).requires_grad_(requires_grad)
    with pytest.raises(ValueError, match=r"pmap\(fp\.grad\(f\)\)"):
        fp.pmap(fun, devices=2)(w, x)


INSIDE = [lambda w, x: 1 * torch.func.grad(loss)(w, x), lambda w, x: torch.autograd.grad(loss(w, x), w)[0]]


@pytest.mark.parametrize("fun", INSIDE, ids=["torch.func.grad", "torch.autograd.grad"])
def test_auto_refuses_gradients_that_torch_took_inside(fun):
    with pytest.raises(ValueError, match=r"differs between shards and does not follow the rows"):
        fp.pmap(fun)(W.clone().requires_grad_(), X)


def test_a_replicated_parameter_comes_out_as_it_went_in(devices):
    w = torch.nn.Parameter(random_tensor((6,), F64, 4))
    assert fp.pmap(lambda w, x: (w, x))(w, EVEN)[0] is w
    nested = fp.pmap(lambda p, x: {"params": p, "loss": loss(p["w"], x)})({"w": w}, EVEN)
    assert nested["params"]["w"] is w


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_replicated_parameter_in_aux_or_closed_over_is_not_concatenated(devices, requires_grad):
    w = random_tensor((6,), F64, 4).requires_grad_(requires_grad)
    step = fp.value_and_grad(lambda w, x: (loss(w, x), {"w": w}), has_aux=True)
    close(fp.pmap(step)(w, EVEN)[0][1]["w"], w)
    close(fp.pmap(lambda x: (x, w), in_axes=0)(EVEN)[1], w)


def test_integers_under_mean_must_be_equal():
    assert fp.pmap(lambda x: torch.tensor(7), in_axes=0, out_axes="mean")(X) == 7
    with pytest.raises(fp.ReplicaMismatchError, match=r"output was promised equal on all shards and is not"):
        fp.pmap(lambda x: torch.tensor(len(x)), in_axes=0, out_axes="mean")(X)


def test_sums_count_booleans_and_add_numbers(devices):
    x = torch.arange(13)
    assert fp.pmap(lambda x: (x > 3).any(), in_axes=0, out_axes="sum")(x).dtype == torch.int64
    assert fp.pmap(lambda x: int(x.sum()), in_axes=0, out_axes="sum")(x) == 78


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_accumulated_wide(devices, dtype):
    # 256 + 1 + 1 + 1 rounded after every addition would stay 256 in bfloat16.
    x = torch.tensor([256.0] + [1.0] * (len(devices) - 1), dtype=dtype)
    expected = x.double().sum().to(dtype)
    assert fp.pmap(lambda x: x.sum(), in_axes=0, out_axes="sum")(x) == expected
    grads = fp.pmap(fp.grad(lambda w, x: (w * x).sum()), out_axes="sum")(torch.ones((), dtype=dtype), x)
    assert grads == expected
    mean = fp.pmap(lambda x: x.mean(), in_axes=0)(torch.ones(13, dtype=dtype))
    assert abs(mean.item() - 1) <= torch.finfo(dtype).eps


def test_none_checks_structure_shape_dtype_and_values():
    mapped = lambda fun: fp.pmap(fun, in_axes=0, out_axes=None, devices=2)(torch.arange(3.0))
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"output was promised equal .*\(shard 1 from shard 0\)"
    ):
        mapped(lambda x: x.sum())
    with pytest.raises(fp.ReplicaMismatchError, match=r"promised equal .* float32\[2\], float32\[1\]"):
        mapped(lambda x: x)
    with pytest.raises(fp.ReplicaMismatchError, match=r"promised equal .* float64\[1\], float32\[1\]"):
        mapped(lambda x: torch.ones(1, dtype=F64 if len(x) == 2 else None))
    with pytest.raises(fp.ReplicaMismatchError, match=r"shard 1 returned another structure than shard 0:"):
        mapped(lambda x: {"a": 1} if len(x) == 2 else {"b": 1})


def test_what_a_spec_cannot_merge_is_refused():
    x = torch.arange(3.0)
    run = lambda spec, fun: fp.pmap(fun, in_axes=0, out_axes=spec, devices=2)(x)
    with pytest.raises(ValueError, match=r"output has 0 dimensions and cannot be joined along dimension 0"):
        run(0, lambda x: x.sum())
    with pytest.raises(fp.ReplicaMismatchError, match=r"output cannot be joined along dimension 0"):
        run(0, lambda x: torch.ones(2, len(x)))
    with pytest.raises(
        fp.ReplicaMismatchError, match=r'output differs in shape or dtype .* out_axes="stack" needs'
    ):
        run("stack", lambda x: x)
    with pytest.raises(TypeError, match=r'output is .*, and out_axes="sum" needs tensors'):
        run("sum", lambda x: "text")
    with pytest.raises(ValueError, match=r"out_axes does not fit the tree"):
        run({"a": 0}, lambda x: [x])


BAD_SPECS = [
    ("median", ValueError, r"out_axes='median' is unknown"),
    (True, TypeError, r"=True is not a spec"),
]


@pytest.mark.parametrize(
    ("spec", "error", "message"), [*BAD_SPECS, ([1.5], TypeError, r"out_axes\[0\]=1\.5 is not")]
)
def test_out_axes_that_can_never_be_are_refused_before_any_call(spec, error, message):
    with pytest.raises(error, match=r"pmap\(<lambda>\): .*" + message):
        fp.pmap(lambda x: x, out_axes=spec)


IN_PLACE = {
    "joined": ("auto", lambda w, x: x * w),
    "an input": ("auto", lambda w, x: x),
    "a view of an input": ("auto", lambda w, x: x[:, 1:]),
    "a mean": ("auto", lambda w, x: (x * w).mean()),
    "equal": (None, lambda w, x: w * 2),
    "a view": (None, lambda w, x: (w * 2)[1:]),
    "stacked": ("stack", lambda w, x: (x * w).mean()),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("spec", "fun"), IN_PLACE.values(), ids=IN_PLACE)
def test_results_own_their_storage(devices, spec, fun, requires_grad):
    w, x = W.clone().requires_grad_(requires_grad), X.clone()
    out = fp.pmap(fun, out_axes=spec)(w, x)
    expected = out.detach().clone() + 1
    out += 1
    close(out.detach(), expected)
    assert torch.equal(x, X)
    if out.requires_grad:
        out.sum().backward()
        assert w.grad.abs().sum() > 0


def test_rows_that_may_be_along_two_dimensions_are_refused_also_where_shards_agree():
    # Eight rows along dimension 1, two per shard: each shard's own 2 x 2 zeros look like a promise kept.
    call = fp.pmap(lambda w, x: torch.zeros(x.shape[1], 2), in_axes=(None, 1), devices=4)
    message = (
        r"may have its rows along dimension 0 or along dimension 1.*\nSay which with out_axes=0 or out_axes=1"
    )
    with pytest.raises(ValueError, match=message):
        call(torch.ones(1), torch.ones(1, 8))
    joined = fp.pmap(lambda w, x: torch.zeros(x.shape[1], 2), in_axes=(None, 1), out_axes=0, devices=4)
    assert joined(torch.ones(1), torch.ones(1, 8)).shape == (8, 2)
