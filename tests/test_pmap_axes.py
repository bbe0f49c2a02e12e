"""in_axes, devices, min_rows and static arguments: what each shard gets, and what is refused."""

from __future__ import annotations

import enum
import functools
import re

import numpy as np
import pytest
import torch

import funcpar as fp
from tests import reference
from tests.strategies import Pair, Record, random_tensor

F64 = torch.float64


class Color(enum.Enum):
    RED = 1


def shapes_seen(in_axes, *args, devices=None, **options):
    """Return what every shard sees of its arguments: the shapes of tensors, other leaves as they are."""
    seen = fp.pmap(
        lambda *given: describe(given), in_axes=in_axes, out_axes="shards", devices=devices, **options
    )
    return list(seen(*args).parts)


def describe(given):
    return str(fp.tree.map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, given))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("min_rows", [1, 2, 5])
def test_shards_are_balanced_in_order_and_of_at_least_min_rows(devices, rows, min_rows):
    kept = fp.pmap(lambda x: x, in_axes=0, out_axes="shards", min_rows=min_rows)(torch.arange(rows))
    assert list(kept.rows) == reference.balanced(rows, len(devices), min_rows)
    assert torch.equal(torch.cat(kept.parts), torch.arange(rows))
    assert kept.devices == devices[: len(kept.rows)]


def test_zero_rows_run_the_function_once():
    calls = []
    out = fp.pmap(lambda w, x: (calls.append(x.shape), x @ w)[1])(torch.ones(2), torch.empty(0, 2))
    assert calls == [(0, 2)]
    assert out.shape == (0,)


def test_a_negative_axis_counts_from_the_last_dimension():
    assert shapes_seen(-1, torch.empty(3, 5), devices=2) == ["((3, 3),)", "((3, 2),)"]
    assert shapes_seen(-2, torch.empty(3, 5), devices=2) == ["((2, 5),)", "((1, 5),)"]


SPELLINGS = [
    (None, {"a": 0, "b": [1, None]}),
    [None, {"b": (1, None), "a": 0}],
    {"batch": {"a": 0, "b": [1, None]}},
    {"params": None, "batch": {"a": -2, "b": [-1, None]}},
]


@pytest.mark.parametrize("in_axes", SPELLINGS)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_every_spelling_of_in_axes_means_the_same_by_position_and_by_name(in_axes, by_keyword):
    batch = {"a": torch.empty(4, 3), "b": [torch.empty(2, 4), torch.empty(9)]}
    out = lambda params, batch: describe((params, batch))
    mapped = fp.pmap(out, in_axes=in_axes, out_axes="shards", devices=2)
    params = torch.empty(4)
    kept = mapped(batch=batch, params=params) if by_keyword else mapped(params, batch)
    assert kept.parts == ("((4,), {'a': (2, 3), 'b': [(2, 2), (9,)]})",) * 2


def test_prefixes_fit_namedtuples_dataclasses_and_mappings():
    x = torch.empty(4, 2)
    assert shapes_seen((Pair(0, None),), Pair(x, x), devices=2)[0] == "(Pair(first=(2, 2), second=(4, 2)),)"
    assert shapes_seen((Record(1, 0),), Record(x.T, x), devices=2)[0] == "(Record(x=(2, 2), y=(2, 2)),)"
    assert (
        shapes_seen(({"a": 0, "b": None},), {"b": x, "a": x}, devices=2)[0] == "({'b': (4, 2), 'a': (2, 2)},)"
    )


def test_auto_replicates_the_first_parameter_and_splits_the_others():
    mapped = fp.pmap(lambda w, x, y=None, *, z: describe((w, x, y, z)), out_axes="shards", devices=2)
    w, x = torch.empty(4, 1), torch.empty(4)
    assert mapped(w, x, z={"z": x}).parts[0] == "((4, 1), (2,), None, {'z': (2,)})"
    assert mapped(x=x, w=w, z=x, y=x).parts[0] == "((4, 1), (2,), (2,), (2,))"


def test_auto_as_one_entry_of_a_sequence_or_below_it_means_the_same():
    x = torch.empty(4)
    assert shapes_seen(("auto", "auto"), x, x, devices=2)[0] == "((4,), (2,))"
    seen = fp.pmap(lambda w, b: torch.tensor([len(b["a"])]), in_axes=(None, {"a": "auto"}), out_axes="stack")
    assert seen(x, {"a": x}).flatten().tolist() == [1, 1, 1, 1]


SCALARS = [1, 2.5, True, 3j, "text", b"bytes", Color.RED, torch.float32, torch.device("cpu"), np.float32(2)]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_scalars_are_replicated_under_a_split(scalar):
    mapped = fp.pmap(lambda x, s: (x, s), in_axes=0, devices=2)
    assert mapped(torch.arange(3), scalar)[1] is scalar


def test_none_and_0d_tensors_are_replicated_under_a_split():
    assert shapes_seen(0, torch.empty(3), None, torch.tensor(1), devices=2)[1] == "((1,), None, ())"


class Opaque:
    pass


REFUSED = [
    (np.ones(4), r"batch\['bad'\]  a numpy.ndarray: torch.from_numpy makes it a tensor"),
    (Opaque(), r"batch\['bad'\]  a \S*test_pmap_axes\.Opaque"),
    (
        torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)]),
        r"batch\['bad'\]  a torch.nn.utils.rnn.PackedSequence: its fields do not split row by row",
    ),
    ({1, 2}, r"batch\['bad'\]  a builtins.set"),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED, ids=lambda case: type(case).__name__)
def test_what_has_no_rows_is_refused_by_name(bad, message):
    mapped = fp.pmap(lambda w, batch: batch["x"])
    with pytest.raises(
        TypeError, match=r"pmap\(<lambda>\): these arguments cannot be split into rows:\n  " + message
    ):
        mapped(torch.ones(1), {"x": torch.ones(4), "bad": bad})
    replicated = fp.pmap(lambda w, batch: batch["x"], in_axes=(None, {"x": 0, "bad": None}))
    assert replicated(torch.ones(1), {"x": torch.ones(4), "bad": bad}).shape == (4,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_nested_and_compressed_tensors_are_refused_by_name():
    mapped = fp.pmap(lambda w, x: x)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match=r"  x  a nested tensor"):
        mapped(torch.ones(1), nested)
    with pytest.raises(TypeError, match=r"  x  a tensor of layout torch\.sparse_csr"):
        mapped(torch.ones(1), torch.eye(4).to_sparse_csr())


def test_a_sparse_batch_is_split_or_refused_by_name():
    x, w = random_tensor((6, 4), F64, 0), random_tensor((4,), F64, 1)
    try:
        out = fp.pmap(lambda w, x: torch.mv(x, w), devices=3)(w, x.to_sparse())
    except TypeError as error:
        assert re.search(r"x  a tensor of layout torch\.sparse_coo", str(error))
    else:
        torch.testing.assert_close(out, x @ w, rtol=0, atol=1e-12)


def test_all_offenders_are_listed_at_once():
    with pytest.raises(
        TypeError, match=r"b\['o'\]  a \S*test_pmap_axes\.Opaque\n  b\['n'\]  a numpy\.ndarray"
    ):
        fp.pmap(lambda w, b: w)(torch.ones(1), {"x": torch.ones(2), "o": Opaque(), "n": np.ones(2)})


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_disagreement_on_rows_lists_every_mapped_leaf_aligned(by_keyword):
    def train_step(params, batch, lr):
        return params

    batch = {"image": torch.empty(8, 2), "label": torch.empty(6), "deep": [torch.empty(3, 1)]}
    mapped = fp.pmap(train_step, in_axes=(None, {"image": 0, "label": 0, "deep": 1}, 0))
    expected = (
        "pmap(train_step): mapped arguments disagree on the number of rows:\n"
        "  batch['image']    in_axes=0  8 rows\n"
        "  batch['label']    in_axes=0  6 rows\n"
        "  batch['deep'][0]  in_axes=1  1 row\n"
        "Give every mapped leaf the same size there, or replicate it with in_axes=None."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        mapped(torch.empty(1), batch=batch, lr=0.1) if by_keyword else mapped(torch.empty(1), batch, 0.1)


def test_arguments_of_variadic_functions_are_named_as_the_user_reaches_them():
    mapped = fp.pmap(lambda *xs, **named: xs[0], in_axes=0)
    with pytest.raises(
        ValueError, match=r"  xs\[0\]  in_axes=0  2 rows\n  xs\[1\]  in_axes=0  3 rows\n  z +in_axes"
    ):
        mapped(torch.empty(2), torch.empty(3), z=torch.empty(4))


def test_nothing_mapped_is_refused_unless_devices_are_given():
    w = torch.ones(3)
    with pytest.raises(
        ValueError, match=r"nothing is mapped in this call \(w, x\): the first parameter is repl"
    ):
        fp.pmap(lambda w, x: w)(w, 3.0)
    with pytest.raises(ValueError, match=r"in_axes=None splits none of its tensors"):
        fp.pmap(lambda w: w, in_axes=None)(w)
    calls = []
    assert fp.pmap(lambda w: (calls.append(1), w.sum())[1], in_axes=None, devices=3)(w) == 3
    assert len(calls) == 3


BAD_IN_AXES = [
    ("rows", ValueError, r'in_axes=\'rows\' is unknown\.\nGive "auto", an int, None'),
    (
        {"weights": 0},
        ValueError,
        r"in_axes names 'weights', which is no parameter.*\nIts parameters are w, x",
    ),
    ((0, 0, 0), ValueError, r"in_axes has 3 entries, and the function has 2 parameters"),
    ((0, True), TypeError, r"in_axes\[1\]=True is not an axis"),
    ((None, {"a": 0.5}), TypeError, r"in_axes\[1\]\['a'\]=0\.5 is not an axis"),
]


@pytest.mark.parametrize(("in_axes", "error", "message"), BAD_IN_AXES)
def test_in_axes_that_can_never_fit_are_refused_before_any_call(in_axes, error, message):
    with pytest.raises(error, match=r"pmap\(<lambda>\): " + message):
        fp.pmap(lambda w, x: w, in_axes=in_axes)


def test_in_axes_that_do_not_fit_the_call_are_refused():
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"in_axes of b does not fit the tree:\n.*\['y'\] is missing"):
        fp.pmap(lambda w, b: w, in_axes=(None, {"x": 0}))(x, {"x": x, "y": x})
    with pytest.raises(ValueError, match=r"x has 1 dimensions, and in_axes splits it along dimension 1"):
        fp.pmap(lambda x: x, in_axes=1)(x)
    with pytest.raises(ValueError, match=r"in_axes has 1 entries, and the call gives xs\[1\]"):
        fp.pmap(lambda *xs: xs, in_axes=(0,))(x, x)
    with pytest.raises(TypeError, match=r"missing a required argument: 'x'"):
        fp.pmap(lambda w, x: w)(x)


def test_static_arguments_are_passed_whole_and_as_they_are():
    options = {"sizes": [torch.ones(3), object()]}
    x = torch.ones(4)
    mapped = fp.pmap(lambda w, x, o: x * (o is options), static_broadcasted_argnums=2, devices=2)
    assert torch.equal(mapped(x, x, options), x)
    assert torch.equal(mapped(x, x, o=options), x)
    both = fp.pmap(lambda s, x, o: x * (s is Opaque and o is options), static_broadcasted_argnums=(0, 2))
    assert torch.equal(both(Opaque, x, options), x)


@pytest.mark.parametrize("number", [-3, 3, True, "x"])
def test_static_argument_numbers_that_name_no_parameter_are_refused(number):
    with pytest.raises((TypeError, ValueError), match=r"static_broadcasted_argnums"):
        fp.pmap(lambda w, x: x, static_broadcasted_argnums=number)


@pytest.mark.parametrize("min_rows", [0, -1, 1.5, True])
def test_min_rows_that_is_no_positive_integer_is_refused(min_rows):
    with pytest.raises(ValueError, match=r"min_rows=.* is not a positive integer"):
        fp.pmap(lambda x: x, min_rows=min_rows)


def test_what_is_not_callable_is_refused():
    with pytest.raises(TypeError, match=r"pmap: 3 is not callable"):
        fp.pmap(3)
    with pytest.raises(TypeError, match=r"weight=3 is not callable"):
        fp.pmap(lambda x: x, weight=3)


def test_partial_functions_methods_modules_and_builtins_are_mapped(devices):
    w, x = random_tensor((3,), F64, 0), random_tensor((7, 3), F64, 1)
    scaled = functools.partial(lambda w, x, scale: x @ w * scale, scale=2.0)
    torch.testing.assert_close(fp.pmap(scaled)(w, x), x @ w * 2, rtol=0, atol=1e-12)
    linear = torch.nn.Linear(3, 2, dtype=F64)
    torch.testing.assert_close(fp.pmap(linear, in_axes=0)(x), linear(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(fp.pmap(linear.forward, in_axes=0)(x), linear(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(fp.pmap(torch.sin, in_axes=0)(x), x.sin(), rtol=0, atol=1e-12)


def test_a_device_named_several_times_takes_several_shards():
    kept = fp.pmap(lambda x: x, in_axes=0, out_axes="shards", devices=[1, 1, 0])(torch.arange(5))
    assert kept.rows == (2, 2, 1)
    assert [device.rank for device in kept.devices] == [1, 1, 0]


BAD_DEVICES = [
    (0, r"asks for 0 devices"),
    (9, r"asks for 9 devices, and there are 4"),
    ([], r"devices is empty"),
]


@pytest.mark.parametrize(("devices", "message"), [*BAD_DEVICES, (["cpu:7"], r"no device 'cpu:7'")])
def test_devices_that_are_not_there_are_refused(devices, message):
    with pytest.raises(ValueError, match=message):
        fp.pmap(lambda x: x, in_axes=0, devices=devices)(torch.ones(4))


@pytest.mark.parametrize("devices", [True, [True], 1.5, [None]])
def test_what_is_no_device_is_refused(devices):
    with pytest.raises(TypeError, match=r"is not a device|is no count"):
        fp.pmap(lambda x: x, in_axes=0, devices=devices)(torch.ones(4))
