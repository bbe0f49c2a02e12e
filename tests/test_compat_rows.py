"""What goes into a DataParallel and what comes out: every row once, every container as its own kind."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from compat_models import Calling, Named, Point, Result, assert_close, classifier, pair, rand
from torch import nn

import compat
import funcpar as fp


def through(fun, *args, **kwargs):
    return compat.DataParallel(Calling(lambda layer, *a, **k: fun(*a, **k)))(*args, **kwargs)


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 13])
def test_plain_keywords_never_call_a_replica_without_rows(devices, rows):  # DP-01, DP-02
    x, sizes = rand(rows, 3), []
    out = through(lambda x, delta, *, flag: sizes.append(len(x)) or x + delta, x, 3, flag="a")
    assert_close(out, x + 3)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, len(devices))
    assert max(sizes) - min(sizes) <= 1


def test_a_row_is_never_dropped():  # DP-03
    with pytest.raises(
        ValueError, match=r"inputs\[0\]    5 rows\n  kwargs\['y'\]  1 row\nGive them all the same"
    ):
        through(lambda x, y: x, rand(5, 3), y=rand(1))


def test_one_device_takes_whatever_the_plain_module_takes():  # DP-03
    module = Calling(lambda layer, x, y: layer(x) + y)
    assert_close(compat.DataParallel(module, [1])(x := rand(5, 3), y := rand(1)), module(x, y))


def test_0d_tensors_go_to_every_replica(devices):  # DP-04
    x, n = rand(5, 3), torch.tensor(2.0)
    assert_close(through(lambda x, batch: x * batch["n"], x, {"n": n}), 2 * x)


def test_a_batch_of_one_and_of_none_goes_the_same_way(devices):  # DP-06, DP-07
    module = classifier().eval()
    for rows in (0, 1):
        x = rand(rows, 3, 8, 8)
        assert_close(compat.DataParallel(module)(x), module(x))


def test_packed_sequences_are_split_by_sequence(devices):  # DP-08
    module, plain = pair(lambda: nn.GRU(2, 3).double())
    packed = nn.utils.rnn.pack_sequence([rand(n, 2) for n in (2, 5, 1, 3, 3)], enforce_sorted=False)
    unpacked = nn.utils.rnn.unpack_sequence(
        compat.DataParallel(Calling(lambda layer, p: module(p)[0]))(packed)
    )
    assert_close(unpacked, nn.utils.rnn.unpack_sequence(plain(packed)[0]))


def test_lengths_in_a_list_are_whole_and_the_mistake_is_located():  # DP-09
    with pytest.raises(RuntimeError, match=r"lengths") as caught:
        through(
            lambda x, n: nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True),
            rand(4, 5, 1),
            [5, 3, 2, 1],
        )
    assert any("in shard" in note or "raised in" in note for note in caught.value.__notes__)


def test_inputs_in_any_container_by_any_name_are_split(devices):  # DP-11, DP-14
    x = rand(5, 3)
    for batch in ({"x": x}, OrderedDict(x=x), defaultdict(int, x=x), Named("n", {"x": x})):
        assert_close(through(lambda batch: batch["x"] * 2, batch), 2 * x)
        assert_close(through(lambda *, batch: batch["x"] * 2, batch=batch), 2 * x)
    assert_close(through(lambda p: p.x + p.y, Point(x, 1.0)), x + 1)
    assert_close(through(lambda r: r.logits, Result(x)), x)


def test_outputs_of_every_kind_keep_their_kind(devices):  # DP-18, DP-19, DP-20, DP-22
    x = rand(9, 3)

    def fun(x):
        rest = {"n": 4, "lr": 0.1, "flag": True, "none": None, "text": "abc", "where": (7, 7)}
        return Result(x * 2, "b", {"d": defaultdict(int, x=x), **rest}), Point(x, "p"), Named("m", {"x": x})

    result, point, named = through(fun, x)
    assert (result.name, point.y, named.name) == ("b", "p", "m")
    assert_close((result.logits, point.x, named["x"], result.extra["d"]["x"]), (2 * x, x, x, x))
    kept = {key: value for key, value in result.extra.items() if key != "d"}
    assert kept == {"n": 4, "lr": 0.1, "flag": True, "none": None, "text": "abc", "where": (7, 7)}
    assert type(result.extra["d"]) is defaultdict


def test_lists_of_strings_are_in_row_order_and_other_values_that_differ_are_listed():  # DP-20, DP-21, DP-22
    x = torch.arange(9)
    names, nested, number = through(
        lambda x: ([f"row {i}" for i in x], [["a"] * int(i) for i in x], len(x)), x
    )
    assert names == [f"row {i}" for i in range(9)]
    assert nested == [["a"] * i for i in range(9)]
    assert number == [3, 2, 2, 2]


def test_ragged_lists_of_tensors_and_other_keys_are_refused_by_place():  # DP-21, DP-23
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"disagree on output\['boxes'\]:\n  replica 0  a list of 3\n"
    ):
        through(lambda x: {"boxes": list(x)}, rand(9, 3))
    with pytest.raises(fp.ReplicaMismatchError, match=r"replica 1  a dict with the keys '1'"):
        through(lambda x: {f"{int(x[0])}": x}, torch.arange(4))


def test_an_object_that_would_lose_a_gradient_is_refused():
    module = Calling(lambda layer, x: torch.distributions.Normal(layer(x), 1.0))
    with pytest.raises(
        TypeError, match=r"returned a Normal, whose tensor \.loc would lose its gradient\.\nReturn its"
    ):
        compat.DataParallel(module)(rand(4, 3))


def test_arrays_of_rows_are_joined_also_where_all_are_equal(devices):
    x = torch.ones(4, 1)
    out, numbers = through(lambda x: (x, x.numpy()), x)
    assert_close(out, x)
    assert numbers.tolist() == x.tolist()
