"""Hypothesis strategies that the tests share."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    x: Any
    y: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


def _nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.sampled_from("abcdef"), st.integers(0, 3))
    mappings = st.dictionaries(keys, children, max_size=3)
    lists = st.lists(children, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        mappings,
        mappings.map(OrderedDict),
        mappings.map(lambda items: defaultdict(list, items)),
        st.builds(Pair, children, children),
        st.builds(Record, children, children),
        st.builds(Frozen, children),
        st.tuples(children, children).map(torch.return_types.max),
    )


def trees(leaves: st.SearchStrategy[Any], max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Trees of every kind of node over `leaves`, None and empty containers among them."""
    return st.recursive(st.one_of(leaves, leaves, st.none()), _nodes, max_leaves=max_leaves)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of values near 1, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-4, 5, shape, dtype=dtype, generator=generator)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)


def parameters(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Trees of parameters: mostly tensors of a dtype, some complex, integer or Python numbers."""
    shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    seeds = st.integers(0, 1_000)
    floats = st.builds(random_tensor, shapes, st.just(dtype), seeds)
    others = st.builds(random_tensor, shapes, st.sampled_from([dtype.to_complex(), torch.int64]), seeds)
    leaves = floats if dtype is torch.bfloat16 else st.one_of(floats, floats, floats, others, st.just(0.5))
    return trees(leaves, max_leaves=5)


@dataclass
class Case:
    """One call of a pmapped function: its arguments and how they are split."""

    dtype: torch.dtype
    params: Any
    batch: dict[str, Any]
    dims: dict[str, int]
    extra: Any
    by_keyword: bool
    in_axes: Any
    devices: Any

    @property
    def args(self) -> tuple[Any, ...]:
        return (self.params, self.batch) if self.by_keyword else (self.params, self.batch, self.extra)

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"extra": self.extra} if self.by_keyword else {}


device_lists = st.one_of(
    st.integers(1, 4), st.sampled_from([[3, 1, 0, 2], [2, 0], [1, 1, 0], [0, 0, 0, 0, 0], ["cpu:3", "cpu"]])
)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], min_rows: int = 0) -> Case:
    """Calls of ``fun(params, batch, extra)`` with every spelling of ``in_axes``."""
    dtype = draw(st.sampled_from(dtypes))
    rows = draw(st.integers(min_rows, 17))
    batch, dims = {}, {}
    for name in draw(st.lists(st.sampled_from(["x", "y", "count", "flat"]), min_size=1, unique=True)):
        other = [] if name == "flat" else draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        dim = draw(st.integers(0, len(other)))
        kind = torch.int64 if name == "count" else dtype
        batch[name] = random_tensor((*other[:dim], rows, *other[dim:]), kind, draw(st.integers(0, 99)))
        dims[name] = draw(st.sampled_from([dim, dim - len(other) - 1]))
    extra = draw(st.one_of(st.none(), st.just(0.5), st.just(random_tensor((), dtype, 1)), st.just([1, 2.0])))
    spellings: list[Any] = [(None, dims, None), [None, dims, "auto"], {"batch": dims}]
    if set(dims.values()) == {0}:
        spellings += ["auto", (None, 0, 0), {"params": None, "batch": 0}, {"extra": None}]
    if len(set(dims.values())) == 1:
        spellings.append({"batch": next(iter(dims.values()))})
    return Case(
        dtype, draw(parameters(dtype)), batch, dims, extra, draw(st.booleans()),
        draw(st.sampled_from(spellings)), draw(device_lists),
    )  # fmt: skip
