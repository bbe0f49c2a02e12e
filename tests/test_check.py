"""check: what agrees passes, what differs is named."""

import pytest
import torch

import funcpar as fp

X = torch.arange(1.0, 14.0, dtype=torch.float64).reshape(13, 1)
W = torch.ones(1, dtype=torch.float64)


def test_check_returns_what_the_mapped_function_returns():
    mapped = fp.pmap(lambda w, x: {"rows": x * w, "mean": (x * w).mean(), "text": "a", "none": None})
    found = fp.check(mapped, W, x=X)
    assert found["text"] == "a"
    torch.testing.assert_close(found["rows"], X * W)
    fp.check(fp.pmap(fp.value_and_grad(lambda w, x: (x * w).square().mean())), W, X)


def test_check_names_every_leaf_that_differs_and_how_far():
    mapped = fp.pmap(lambda w, x: {"ok": x, "sum": (x * w).sum(), "root": [(x * w).square().mean().sqrt()]})
    with pytest.raises(
        ValueError, match=r"output\['sum'\]  mapped .* plain 91.*\n  output\['root'\]\[0\]  mapped"
    ) as caught:
        fp.check(mapped, W, X)
    assert "output['ok']" not in str(caught.value)


STRUCTURES = lambda x: {"a": x.sum() * 0} if len(x) > 4 else {"b": x.sum() * 0}
SHAPES = lambda x: torch.ones(1) if len(x) > 4 else torch.ones(())
INTEGERS = lambda x: torch.tensor([len(x) > 4])


@pytest.mark.parametrize(
    ("fun", "match"),
    [
        (STRUCTURES, r"check\(pmap\(<lambda>\)\): the results have different structures"),
        (SHAPES, r"output  mapped torch.float32 \[\]  plain torch.float32 \[1\]"),
        (INTEGERS, r"output  1 of 1 entries differ"),
    ],
)
def test_check_tells_apart_structures_shapes_and_integers(fun, match):
    with pytest.raises(ValueError, match=match):
        fp.check(fp.pmap(fun, in_axes=0, out_axes=None), torch.arange(13.0))


@pytest.mark.parametrize(
    "values", [(float("nan"), float("inf")), (float("inf"), -float("inf")), (1.0, float("nan"))]
)
def test_check_tells_nan_from_infinity_and_their_signs(values):
    mapped = fp.pmap(lambda x: torch.tensor([values[len(x) == 12]]), in_axes=0, out_axes=None)
    with pytest.raises(ValueError, match="NaN or infinity in different places"):
        fp.check(mapped, torch.ones(12))


def test_check_refuses_what_is_not_mapped():
    with pytest.raises(
        TypeError, match=r"check: .* is not a pmapped function\.\nGive what fp\.pmap returned"
    ):
        fp.check(fp.grad(fp.pmap(lambda x: x.sum(), in_axes=0)), X)
