"""What went wrong with DataParallel on the way in: no such fault when rows are split."""

import threading
import warnings
from collections import OrderedDict, defaultdict
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


@pytest.mark.parametrize("rows", ROWS)
def test_plain_keyword_arguments_never_make_a_shard_without_rows(devices, rows):  # DP-01
    def fun(w, x, delta=0, *, scale=1.0, names=(), mask=None):
        assert names == ("a", "b")
        return (x @ w + delta) * scale * (1 if mask is None else mask)

    w, x, mask = rand(3), rand(rows, 3), rand(rows)
    for kwargs in ({}, {"delta": 3}, {"delta": 3, "scale": 0.5}, {"scale": torch.tensor(2.0), "mask": mask}):
        given = {"names": ("a", "b"), **kwargs}
        assert_close(fp.pmap(fun)(w, x, **given), fun(w, x, **given))


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
    with pytest.raises(RuntimeError, match=r"of size|length") as caught:
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
