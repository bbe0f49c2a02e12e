"""What went wrong with DataParallel on the way out: no such fault when results are merged."""

import pickle
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Batch(dict):
    """A mapping that no pytree library knows."""


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 13])
def test_a_scalar_loss_stays_the_scalar_of_the_whole_batch(devices, rows):  # DP-17
    w, x = rand(3), rand(rows, 3)
    mean, total = lambda w, x: (x @ w).square().mean(), lambda w, x: (x @ w).square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(fp.pmap(mean)(w, x), mean(w, x))
        assert_close(fp.pmap(total, out_axes="sum")(w, x), total(w, x))
    assert fp.pmap(mean, out_axes="stack")(w, x).shape == (min(rows, len(devices)),)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    name: str = "out"
    hidden: Any = None


@dataclass
class ModelOutput(OrderedDict):
    """A dataclass that is also a mapping, as transformers' outputs are."""

    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Triple(NamedTuple):
    a: Tensor
    b: Tensor
    c: Tensor


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 13])
def test_dataclasses_and_namedtuples_come_back_merged_field_by_field(devices, rows):  # DP-18, DP-19
    x = rand(rows, 3)
    fun = lambda x: Output(x.mean(), 2 * x, hidden=Triple(x, x.sum(1), x.mean()))
    got, expected = fp.pmap(fun, in_axes=0)(x), fun(x)
    assert type(got) is Output and type(got.hidden) is Triple and got.name == "out"
    assert_close([got.loss, got.logits, *got.hidden], [expected.loss, expected.logits, *expected.hidden])


def test_a_dataclass_that_is_a_mapping_loses_no_row(devices):  # DP-18
    x = torch.ones(len(devices), 1)
    try:
        out = fp.pmap(lambda x: ModelOutput(2 * x), in_axes=0)(x)
    except (TypeError, ValueError) as error:
        assert "out_axes" in str(error)  # Refused, with the fix.
    else:
        assert_close(out.logits, 2 * x)
        assert_close(out["logits"], 2 * x)


def test_strings_are_kept_or_refused_never_altered():  # DP-20
    x = rand(4, 1)
    out = fp.pmap(lambda x: {"data": x, "name": ["a", "b"]}, in_axes=0)(x)
    assert out["name"] == ["a", "b"]
    assert_close(out["data"], x)
    text = lambda x: {"data": x, "name": [f"{v:.3f}" for v in x.flatten()]}
    with pytest.raises(ValueError, match=r"output\['name'\] is a list with one entry per row"):
        fp.pmap(text, in_axes=0)(x)
    kept = fp.pmap(text, in_axes=0, out_axes={"data": 0, "name": "shards"})(x)["name"]
    assert [name for part in kept.parts for name in part] == text(x)["name"]


def test_ragged_lists_are_refused_by_place_and_come_whole_from_parallel_call():  # DP-21
    ragged = lambda x: {"boxes": [list(range(int(v))) for v in x]}
    x = torch.tensor([1, 2, 0, 3])
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"shard 1 returned another.*\n  output\['boxes'\]\[0\]: exp"
    ):
        fp.pmap(ragged, in_axes=0)(x)
    kept = fp.pmap(lambda x: [str(v) for v in x], in_axes=0, out_axes="shards")(torch.arange(6))
    assert kept.parts == (
        ["tensor(0)", "tensor(1)"],
        ["tensor(2)", "tensor(3)"],
        ["tensor(4)"],
        ["tensor(5)"],
    )
    parts = fp.parallel_call(ragged, list(x.split(1)))
    assert [row for part in parts for row in part["boxes"]] == ragged(x)["boxes"]


@pytest.mark.parametrize("kind", ["numpy", "mapping"])
def test_rows_that_happen_to_be_equal_on_all_shards_are_not_dropped(kind):  # DP-20, DP-21, DP-22
    make = {"numpy": lambda x: x.numpy(), "mapping": lambda x: Batch(x=x)}[kind]
    for values in ([1, 1, 1, 1], [1, 2, 3, 4]):  # Refused or whole, whatever the values are.
        x = torch.tensor(values)
        with pytest.raises(TypeError, match="holds tensors or arrays"):
            fp.pmap(make, in_axes=0)(x)


def test_numbers_and_bools_in_the_output_are_kept_if_equal_and_reduced_if_asked():  # DP-22
    x = torch.arange(10.0)
    out = fp.pmap(lambda x: {"loss": x.mean(), "n": 4, "lr": 0.1, "ok": True, "none": None}, in_axes=0)(x)
    assert {**out, "loss": out["loss"].item()} == {"loss": 4.5, "n": 4, "lr": 0.1, "ok": True, "none": None}
    fun = lambda x: {"n": len(x), "mean": x.mean().item()}
    with pytest.raises(ValueError, match=r"output\['n'\] differs between shards.*3, 3, 2, 2"):
        fp.pmap(fun, in_axes=0)(x)
    assert fp.pmap(fun, in_axes=0, out_axes={"n": "sum", "mean": "mean"})(x) == {"n": 10, "mean": 4.5}
    assert fp.pmap(fun, in_axes=0, out_axes="stack")(x)["n"].tolist() == [3, 3, 2, 2]


def test_other_keys_in_one_shard_are_named():  # DP-23
    fun = lambda x: {"a": x} if x[0] < 3 else {"b": x}
    with pytest.raises(fp.ReplicaMismatchError, match=r"output\['a'\] is missing\n.*unexpected key 'b'\n"):
        fp.pmap(fun, in_axes=0, devices=2)(torch.arange(6))


def test_outputs_left_in_shards_are_what_the_shards_made_and_feed_the_next_call():  # DP-25, DP-68
    made: dict[int, int] = {}

    def model(w, x):
        out = x @ w
        made[out.data_ptr()] = len(x)
        return out

    w, x, y = rand(3, 2).requires_grad_(), rand(10, 3), rand(10, 2)
    kept = fp.pmap(model, out_axes="shards")(w, x)
    assert kept.rows == (3, 3, 2, 2) and [made[part.data_ptr()] for part in kept.parts] == [3, 3, 2, 2]
    criterion = lambda out, y: (out - y).square().mean()
    loss = fp.pmap(criterion, in_axes=0)(kept, y)
    expected = criterion(x @ w, y)
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, w), torch.autograd.grad(expected, w))


def test_what_a_call_returns_pickles():  # DP-36
    kept = fp.pmap(lambda x: {"a": x}, in_axes=0, out_axes="shards")(rand(5))
    loaded = pickle.loads(pickle.dumps(kept))
    assert loaded.devices == kept.devices and torch.equal(loaded.gather()["a"], kept.gather()["a"])
    model = nn.Linear(3, 2)
    apply, params = fp.functionalize(model)
    fp.pmap(apply)(params, torch.ones(5, 3))
    assert pickle.loads(pickle.dumps(model)).weight.equal(model.weight)
    assert pickle.loads(pickle.dumps(params)).keys() == params.keys()
    assert pickle.loads(pickle.dumps(doubled))(torch.ones(5)).equal(2 * torch.ones(5))


@partial(fp.pmap, in_axes=0)
def doubled(x):
    return 2 * x
