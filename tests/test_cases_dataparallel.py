"""What went wrong with DataParallel on the way in and out: no such fault when rows are split and results merged."""

import pickle
import threading
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
ROWS = [0, 1, 2, 3, 4, 5, 9, 13]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sizes_of(*given: Tensor, devices: Any = None) -> tuple[int | None, ...]:
    kept = fp.pmap(lambda x, *rest: x.clone(), in_axes=0, out_axes="shards", devices=devices)(*given)
    return kept.rows


# Splitting.


@pytest.mark.parametrize("rows", ROWS)
def test_plain_keyword_arguments_never_make_a_shard_without_rows(devices, rows):  # DP-01
    def fun(w, x, delta=0, *, scale=1.0, names=(), mask=None):
        assert names == ("a", "b")
        return (x @ w + delta) * scale * (1 if mask is None else mask)

    w, x, mask = rand(3), rand(rows, 3), rand(rows)
    for kwargs in ({}, {"delta": 3}, {"delta": 3, "scale": 0.5}, {"scale": torch.tensor(2.0), "mask": mask}):
        kwargs = {"names": ("a", "b"), **kwargs}
        assert_close(fp.pmap(fun)(w, x, **kwargs), fun(w, x, **kwargs))


@pytest.mark.parametrize("rows", range(1, 41))
def test_shards_are_balanced_in_order_and_leave_no_device_idle(devices, rows):  # DP-02
    x = torch.arange(rows)
    kept = fp.pmap(torch.clone, in_axes=0, out_axes="shards")(x)
    assert kept.devices == devices[: min(rows, len(devices))]
    assert max(kept.rows) - min(kept.rows) <= 1
    assert torch.equal(kept.gather(), x)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_no_row_is_dropped_when_inputs_differ_in_length(first, second, count):  # DP-03
    x, y = rand(first, 2), rand(second)
    mapped = fp.pmap(lambda x, y: (x, y), in_axes=0, devices=count)
    if first == second:
        assert_close(mapped(x, y), (x, y))
        return
    rows = [f"{n} row{'s' * (n != 1)}" for n in (first, second)]
    with pytest.raises(ValueError, match=rf"\n  x  in_axes=0  {rows[0]}\n  y  in_axes=0  {rows[1]}\n"):
        mapped(x, y)


@pytest.mark.parametrize("rows", ROWS)
def test_0d_tensors_are_replicated_wherever_they_are(devices, rows):  # DP-04
    def fun(w, batch, *, count):
        return (batch["x"] * w["a"] + batch["items"][0]).sum(1) / count

    batch = {"x": rand(rows, 3), "items": [torch.tensor(5.0, dtype=torch.float64)]}
    w, count = {"a": torch.tensor(2.0, dtype=torch.float64)}, torch.tensor(7)
    assert_close(fp.pmap(fun)(w, batch, count=count), fun(w, batch, count=count))
    assert_close(fp.pmap(fun, in_axes=0)(w, batch, count=count), fun(w, batch, count=count))


def test_fewer_rows_than_devices_is_silent_and_can_be_seen():  # DP-06
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizes_of(rand(2, 1)) == (1, 1)
        assert sizes_of(rand(5, 1)) == (2, 1, 1, 1)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_one_shard_goes_the_way_of_several(devices, rows):  # DP-07
    def fun(w, batch):
        assert torch.is_grad_enabled()
        return {"out": batch["x"] @ w, "loss": (batch["x"] @ w).square().mean(), "kind": 1}

    w, batch = rand(3).requires_grad_(), {"x": rand(rows, 3)}
    got, expected = fp.pmap(fun)(w, batch), fun(w, batch)
    assert_close(got, expected)
    assert_close(torch.autograd.grad(got["loss"], w), torch.autograd.grad(expected["loss"], w))
    with pytest.raises(ValueError, match="boom") as caught:
        fp.pmap(lambda w, x: fail())(w, batch["x"])
    assert "raised in shard 0 of" in caught.value.__notes__[0]


def fail():
    raise ValueError("boom")


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_an_output_can_be_written_to_whatever_the_number_of_shards(devices, rows):  # DP-07
    x = rand(rows, 3)
    before = x.clone()
    for fun in (lambda x: x, lambda x: x[:], lambda x: (x, x)[0]):
        out = fp.pmap(fun, in_axes=0)(x)
        out += 1
        assert torch.equal(x, before)


def test_packed_and_ragged_sequences_are_refused_not_torn_apart():  # DP-08
    packed = pack_sequence([rand(3, 2), rand(2, 2)])
    with pytest.raises(
        TypeError, match=r"batch\['seq'\]  a torch.*PackedSequence: .* padded tensor and the len"
    ):
        fp.pmap(lambda w, batch: w)(rand(2), {"seq": packed})
    ragged = [rand(3, 2), rand(2, 2)]
    with pytest.raises(ValueError, match=r"\n  xs\[0\]  in_axes=0  3 rows\n  xs\[1\]  in_axes=0  2 rows\n"):
        fp.pmap(lambda xs: xs, in_axes=0)(ragged)
    with pytest.raises(TypeError, match="x  a nested tensor"):
        fp.pmap(lambda x: x, in_axes=0)(torch.nested.nested_tensor(ragged, layout=torch.jagged))
    whole = fp.pmap(lambda seq, x: x + seq.data.sum(), in_axes=(None, 0))(packed, rand(5))
    assert whole.shape == (5,)
    assert isinstance(packed, PackedSequence)


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_lengths_in_a_tensor_are_split_with_the_padded_rows(devices, rows):  # DP-09, DP-08
    lstm = nn.LSTM(2, 3, batch_first=True).double()
    apply, params = fp.functionalize(lstm)

    def fun(params, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(apply(params, packed)[0], batch_first=True, total_length=5)[0]

    x, lengths = rand(rows, 5, 2), torch.arange(rows) % 5 + 1
    assert_close(fp.pmap(fun)(params, x, lengths), fun(params, x, lengths).detach())


def test_lengths_in_a_list_are_whole_in_every_shard_and_the_mistake_is_located():  # DP-09
    fun = lambda w, x, lengths: pack_padded_sequence(x, lengths, batch_first=True).data
    with pytest.raises(RuntimeError, match="of size|length") as caught:
        fp.pmap(fun)(None, rand(2, 3, 1), [3, 2])
    assert "raised in shard 0 of 2" in "".join(caught.value.__notes__)


class Batch(dict):
    def __init__(self, owner: str, **items: Any) -> None:
        super().__init__(**items)
        self.owner = owner


class Pair(NamedTuple):
    first: Any
    second: Any


def test_containers_are_rebuilt_as_what_they_are_or_refused_by_name(devices):  # DP-11, FN-20
    batches = [
        defaultdict(list, a=rand(5), b=rand(5)),
        OrderedDict(b=rand(5), a=rand(5)),
        Pair(rand(5), [rand(5), None]),
    ]
    for batch in batches:
        out = fp.pmap(lambda batch: batch, in_axes=0)(batch)
        assert type(out) is type(batch)
        assert_close(fp.tree.leaves(out), fp.tree.leaves(batch))
    assert fp.pmap(lambda d: d, in_axes=0)(batches[0]).default_factory is list
    both = fp.pmap(lambda pair, x: x * pair.first.sum(), in_axes=(None, 0))(Pair(torch.ones(7), 0), rand(5))
    assert both.shape == (5,)
    with pytest.raises(TypeError, match=r"batch\[1\]  a .*\.Batch\nPass tensors, or give them in_axes=None"):
        fp.pmap(lambda batch: batch, in_axes=0)([rand(5), Batch("me", x=rand(5))])


def test_the_rows_may_be_anywhere_in_the_call(devices):  # DP-14
    x, w = rand(5, 3), rand(3)
    assert_close(fp.pmap(lambda batch: batch["img"] * 2, in_axes=0)({"img": x}), x * 2)
    assert_close(fp.pmap(lambda *, img: img * 2, in_axes=0)(img=x), x * 2)
    assert_close(fp.pmap(lambda **batch: batch["img"] * 2, in_axes=0)(img=x), x * 2)
    assert_close(fp.pmap(lambda w, x: x @ w)(x=x, w=w), x @ w)
    assert_close(fp.pmap(lambda w, a=None, x=None: x @ w)(w, x=x), x @ w)


@pytest.mark.parametrize("order", [[1, 2, 3, 0], [3, 1], [2, 2, 0]])
def test_shard_i_of_every_argument_is_on_the_ith_device_named(order):  # DP-15
    def fun(x, *, y):
        seen.append((threading.current_thread().name, x[0].item(), y[0].item()))
        return x + y

    seen: list[tuple[str, int, int]] = []
    x = torch.arange(5)
    kept = fp.pmap(fun, in_axes=0, out_axes="shards", devices=order)(x, y=x)
    assert [device.rank for device in kept.devices] == order
    assert torch.equal(kept.gather(), 2 * x)
    starts = [sum(kept.rows[:k]) for k in range(len(order))]
    assert {(name.split(".")[0], a, b) for name, a, b in seen} == {
        (f"funcpar-cpu-{rank}", start, start) for rank, start in zip(order, starts, strict=True)
    }


def test_parallel_call_takes_a_tensor_whole_and_unpacks_only_tuples():  # DP-16
    shards = [rand(3, 2), rand(2, 2)]
    fun = lambda *args: [arg.shape for arg in args]
    assert fp.parallel_call(fun, shards) == [[(3, 2)], [(2, 2)]]
    assert fp.parallel_call(fun, [(x,) for x in shards]) == [[(3, 2)], [(2, 2)]]
    assert fp.parallel_call(fun, [(x, x) for x in shards]) == [[(3, 2)] * 2, [(2, 2)] * 2]


# Merging.


@pytest.mark.parametrize("rows", ROWS[1:])
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


@pytest.mark.parametrize("rows", ROWS[1:])
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
    with pytest.raises(ValueError, match=r"output\['name'\]\[0\] differs between shards"):
        fp.pmap(text, in_axes=0)(x)
    kept = fp.pmap(text, in_axes=0, out_axes={"data": 0, "name": "shards"})(x)["name"]
    assert [part for shards in kept for part in shards.parts] == text(x)["name"]


def test_ragged_lists_are_refused_by_place_and_come_whole_from_parallel_call():  # DP-21
    ragged = lambda x: {"boxes": [list(range(int(v))) for v in x]}
    x = torch.tensor([1, 2, 0, 3])
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"shard 1 returned another.*\n  output\['boxes'\]\[0\]: exp"
    ):
        fp.pmap(ragged, in_axes=0)(x)
    with pytest.raises(fp.ReplicaMismatchError, match=r"output: expected a list of 2, got a list of 1"):
        fp.pmap(lambda x: [str(v) for v in x], in_axes=0, out_axes="shards")(torch.arange(6))
    parts = fp.parallel_call(ragged, list(x.split(1)))
    assert [row for part in parts for row in part["boxes"]] == ragged(x)["boxes"]


@pytest.mark.parametrize("kind", ["numpy", "mapping"])
def test_rows_that_happen_to_be_equal_on_all_shards_are_not_dropped(kind):  # DP-20, DP-21, DP-22
    make = {"numpy": Tensor.numpy, "mapping": lambda x: Batch("me", x=x)}[kind]
    for values in ([1, 1, 1, 1], [1, 2, 3, 4]):  # Refused or whole, whatever the values are.
        x = torch.tensor(values)
        with pytest.raises(ValueError, match="out_axes"):
            fp.pmap(lambda x: make(x), in_axes=0)(x)


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
    kept = fp.pmap(lambda x: {"a": x}, in_axes=0, out_axes="shards")(rand(5))["a"]
    loaded = pickle.loads(pickle.dumps(kept))
    assert loaded.devices == kept.devices and torch.equal(loaded.gather(), kept.gather())
    model = nn.Linear(3, 2)
    apply, params = fp.functionalize(model)
    fp.pmap(apply)(params, torch.ones(5, 3))
    assert pickle.loads(pickle.dumps(model)).weight.equal(model.weight)
    assert pickle.loads(pickle.dumps(params)).keys() == params.keys()
    assert pickle.loads(pickle.dumps(doubled))(torch.ones(5)).equal(2 * torch.ones(5))


@partial(fp.pmap, in_axes=0)
def doubled(x):
    return 2 * x
