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
