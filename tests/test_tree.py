from __future__ import annotations

import copy
import dataclasses
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from functools import cached_property
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils import _pytree as registry

from funcpar import tree
from tests.strategies import Frozen, Pair, Record, trees

random_trees = trees(st.integers(0, 9))
few = settings(max_examples=60, deadline=None, derandomize=True)
MAPPINGS = (dict, OrderedDict, defaultdict)


def reorder(node: Any) -> Any:
    """The same tree with the keys of every mapping in the opposite order."""
    if type(node) in MAPPINGS:
        new = copy.copy(node)
        new.clear()
        new.update((key, reorder(node[key])) for key in reversed(list(node)))
        return new
    if type(node) in (list, tuple, deque):
        return type(node)(reorder(child) for child in node)
    if isinstance(node, torch.return_types.max):
        return torch.return_types.max([reorder(child) for child in node])
    if type(node) is Pair:
        return Pair(*(reorder(child) for child in node))
    if isinstance(node, Record):
        return Record(reorder(node.x), reorder(node.y))
    return Frozen(reorder(node.x)) if isinstance(node, Frozen) else node


@few
@given(random_trees)
def test_flatten_round_trips_and_keeps_order(value):
    leaves, spec = tree.flatten(value)
    assert spec.num_leaves == len(leaves) == len(spec.paths())
    again = tree.unflatten(spec, leaves)
    assert repr(again) == repr(value)
    assert tree.leaves(again) == leaves
    assert tree.flatten(again)[1] == spec


@few
@given(random_trees)
def test_specs_are_equal_whatever_the_order_of_keys(value):
    leaves, spec = tree.flatten(value)
    other_leaves, other = tree.flatten(reorder(value))
    assert spec == other
    assert hash(spec) == hash(other)
    assert tree.flatten_like(spec, reorder(value)) == leaves
    assert tree.flatten_like(other, value) == other_leaves
    assert tree.map(lambda *xs: xs, value, reorder(value)) == tree.map(lambda x: (x, x), value)


@few
@given(random_trees, random_trees)
def test_differing_specs_have_a_message(first, second):
    spec, other = tree.flatten(first)[1], tree.flatten(second)[1]
    assert bool(list(tree.differences(spec, other, "tree"))) == (spec != other)
    if spec != other:
        with pytest.raises(ValueError, match="tree has not the expected structure"):
            tree.flatten_like(spec, second)


@few
@given(random_trees)
def test_paths_evaluate_to_their_leaf(value):
    for path, leaf in tree.leaves_with_path(value, "batch"):
        assert eval(path, {"batch": value}) is leaf


def oracle(prefix: Any, node: Any) -> list[Any]:
    if type(prefix) is int or prefix is None:
        return [prefix] * len(tree.leaves(node))
    if type(node) in MAPPINGS:
        return [value for key in node for value in oracle(prefix[key], node[key])]
    if isinstance(node, (Record, Frozen)):
        names = [field.name for field in dataclasses.fields(node)]
        return [value for name in names for value in oracle(getattr(prefix, name), getattr(node, name))]
    return [value for part, child in zip(prefix, node, strict=True) for value in oracle(part, child)]


@st.composite
def prefixed(draw: Any) -> tuple[Any, Any]:
    value = draw(random_trees)

    def cut(node: Any) -> Any:
        if node is None or type(node) is int or draw(st.integers(0, 3)) == 0:
            return draw(st.one_of(st.none(), st.integers(0, 3)))
        if type(node) in MAPPINGS:
            return {key: cut(node[key]) for key in reversed(list(node))}
        if isinstance(node, Record):
            return Record(cut(node.x), cut(node.y))
        if isinstance(node, Frozen):
            return Frozen(cut(node.x))
        parts = [cut(child) for child in node]
        return deque(parts) if isinstance(node, deque) else draw(st.sampled_from([list, tuple]))(parts)

    return cut(value), value


@few
@given(prefixed())
def test_prefix_gives_every_leaf_its_value(case):
    prefix, value = case
    assert tree.broadcast_prefix(prefix, tree.flatten(value)[1]) == oracle(prefix, value)
    assert tree.prefix_errors(prefix, value) == []


def test_prefix_is_leaf_stops_at_containers():
    spec = tree.flatten((1, {"a": 2, "b": 3}))[1]
    assert tree.broadcast_prefix((0, [1, 2]), spec, is_leaf=lambda x: x == [1, 2]) == [0, [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("prefix", "value", "message"),
    [
        ((0, {"w": [0, 0]}), (1, {"w": (2, 3, 4)}),
         "axes[1]['w']: the prefix has a list of 2, the tree has a tuple of 3"),
        ((0, [0]), (1, 2), "axes[1]: the prefix has a list of 1, the tree has a leaf"),
        ({"a": 0}, [1], "axes: the prefix has a dict of 1, the tree has a list of 1"),
        ((0,), None, "axes: the prefix has a tuple of 1, the tree has None"),
        ({"image": 0, "lable": 0}, {"image": 1, "label": 2},
         "axes: the prefix has the key 'lable', the tree has 'image', 'label'; did you mean 'label'?"),
        ({"a": 0}, {"a": 1, "b": 2}, "axes['b'] is missing: the prefix has 'a', the tree has 'a', 'b'"),
        (Pair(0, [0]), Pair(1, 2), "axes.second: the prefix has a list of 1, the tree has a leaf"),
        (Record(0), Pair(1, 2), "axes: the prefix has a Record, the tree has a Pair"),
    ],
)  # fmt: skip
def test_prefix_mismatch_names_the_place_and_the_fix(prefix, value, message):
    assert message in tree.prefix_errors(prefix, value, "axes")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        tree.broadcast_prefix(prefix, tree.flatten(value)[1], "axes")
    assert str(caught.value).startswith("axes does not fit the tree:\n")
    assert str(caught.value).endswith("or the containers and keys of the tree itself.")


@pytest.mark.parametrize(
    ("expected", "value", "message"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, "root['b'] is missing"),
        ({"a": 1}, {"a": 1, "c": 2}, "root: unexpected key 'c'"),
        ([0, {"a": 1}], [0, [1]], "root[1]: expected a dict, got a list"),
        ([0, 1], [0], "root: expected a list of 2, got a list of 1"),
        ({"a": 1}, OrderedDict(a=1), "root: expected a dict, got an OrderedDict"),
        ({"a": 1}, {"a": None}, "root['a']: expected a leaf, got None"),
        (Record(1, (2,)), Record(1, 2), "root.y: expected a tuple, got a leaf"),
    ],
)
def test_flatten_like_says_where_structures_differ(expected, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tree.flatten_like(tree.flatten(expected)[1], value, "root")


def test_flatten_like_lists_the_first_offenders():
    with pytest.raises(ValueError, match=r"tree\['k7'\] is missing\n  \.\.\. and 12 more\nGive it") as caught:
        tree.flatten_like(tree.flatten({f"k{i}": i for i in range(20)})[1], {})
    assert str(caught.value).count("is missing") == 8


def test_map_names_the_tree_that_differs():
    with pytest.raises(ValueError, match=r"rest\[1\]\['b'\] is missing"):
        tree.map(max, {"b": 1}, {"b": 2}, {})


def test_unflatten_counts_leaves():
    with pytest.raises(ValueError, match=r"1 leaves for a structure of 2:\n  \{'a': \*, 'b': \*\}\nGive"):
        tree.unflatten(tree.flatten({"a": 1, "b": 2})[1], [1])


def test_cyclic_tree_is_refused():
    value: list[Any] = []
    value.append({"self": value})
    with pytest.raises(ValueError, match="the list contains itself"):
        tree.flatten(value)


def test_repr_is_short():
    assert repr(tree.flatten({"w": 1, "b": (2, [3, None])})[1]) == "{'w': *, 'b': (*, [*, None])}"
    assert repr(tree.flatten((Pair(1, (2,)), OrderedDict(a=1)))[1]) == (
        "(Pair(first=*, second=(*,)), OrderedDict({'a': *}))"
    )
    assert repr(tree.flatten(list(range(100)))[1]) == "[*, *, *, *, *, *, *, *, ... 92 more]"


def test_structseq_is_rebuilt():
    result = torch.max(torch.tensor([[1.0, 2.0]]), 1)
    doubled = tree.map(lambda x: x * 2, result)
    assert type(doubled) is type(result)
    assert doubled.values.item() == 4.0


def test_defaultdict_keeps_its_factory():
    again = tree.map(lambda x: x, defaultdict(list, a=1))
    assert again["new"] == []


def test_subclass_of_a_namedtuple_keeps_its_type():
    class Point(namedtuple("Point", "x y")):
        def __new__(cls, total):
            return super().__new__(cls, total, total)

    again = tree.map(lambda x: x + 1, Point(1))
    assert type(again) is Point
    assert again == (2, 2)


class OwnDict(dict):
    pass


class Color(Record, Enum):
    RED = 1, 2


@dataclasses.dataclass
class Failure(Exception):
    x: int


@dataclasses.dataclass(eq=False)
class Net(torch.nn.Module):
    width: int

    def __post_init__(self):
        super().__init__()


@pytest.mark.parametrize(
    "leaf",
    [torch.Size([2, 3]), "text", b"bytes", OwnDict(a=1), Color.RED, Failure(1), Net(3), Record, {1, 2},
     torch.nn.utils.rnn.pack_sequence([torch.zeros(2)]), torch.zeros(2), torch.nn.Parameter(torch.zeros(1))],
    ids=lambda leaf: type(leaf).__name__,
)  # fmt: skip
def test_opaque_values_are_leaves(leaf):
    assert tree.leaves(leaf)[0] is leaf
    assert tree.map(lambda x: x, [leaf, (leaf,)])[1][0] is leaf


@dataclasses.dataclass
class Batch:
    image: Any
    count: int = dataclasses.field(init=False)

    def __init__(self, rows):
        self.image, self.count = rows, len(rows)
        self.note, self.scratch = "kept", torch.zeros(1)

    @cached_property
    def total(self):
        return sum(self.image)


def test_dataclass_is_rebuilt_without_init_and_without_stale_state():
    batch = Batch([1, 2])
    assert batch.total == 3
    again = tree.map(lambda x: x * 10, batch)
    assert (again.image, again.count, again.note, again.total) == ([10, 20], 20, "kept", 30)
    assert not hasattr(again, "scratch")


def test_unset_field_of_a_dataclass_stays_unset():
    value = Batch([1])
    del value.count
    again = tree.map(lambda x: x + 1, value)
    assert again.image == [2]
    assert not hasattr(again, "count")


def test_registered_dataclass_has_its_meta_fields_in_the_spec():
    @dataclasses.dataclass(frozen=True)
    class Masked:
        value: Any
        name: list[str]

    assert tree.register_dataclass(Masked, ["value"], ["name"]) is Masked
    leaves, spec = tree.flatten(Masked(1, ["a"]))
    assert leaves == [1]
    assert tree.unflatten(spec, [2]) == Masked(2, ["a"])
    assert hash(spec) == hash(tree.flatten(Masked(3, ["a"]))[1])
    with pytest.raises(ValueError, match=r"Masked with the meta data \(\['a'\],\), got \(\['b'\],\)"):
        tree.flatten_like(spec, Masked(1, ["b"]))


@pytest.mark.parametrize(
    ("data", "meta", "message"),
    [(["x"], [], "y is listed 0 times"), (["x", "y"], ["y"], "y is listed 2 times"), ("xyz", [], "z is not")],
)
def test_register_dataclass_wants_every_field_once(data, meta, message):
    with pytest.raises(ValueError, match=message):
        tree.register_dataclass(Record, data, meta)


def test_register_dataclass_wants_a_dataclass():
    with pytest.raises(TypeError, match=r"register_dataclass\(int\): not a dataclass"):
        tree.register_dataclass(int)


class Output(OrderedDict):
    """As transformers.ModelOutput: a subclass of OrderedDict, registered with torch."""


def test_types_registered_with_torch_are_nodes():
    value = Output(loss=1, logits=[2, 3])
    assert tree.leaves(value) == [value]
    registry.register_pytree_node(
        Output,
        lambda node: (list(node.values()), list(node)),
        lambda values, keys: Output(zip(keys, values, strict=True)),
        flatten_with_keys_fn=lambda node: ([(registry.MappingKey(k), node[k]) for k in node], list(node)),
    )
    try:
        leaves, spec = tree.flatten(value)
        assert leaves == [1, 2, 3]
        assert spec.paths("out") == ("out['loss']", "out['logits'][0]", "out['logits'][1]")
        assert type(tree.unflatten(spec, leaves)) is Output
        assert tree.broadcast_prefix({"logits": (0, 1), "loss": None}, spec) == [None, 0, 1]
        assert "out['loss'] is missing" in tree.prefix_errors({"logits": 0}, value, "out")[0]
    finally:
        registry._deregister_pytree_node(Output)
