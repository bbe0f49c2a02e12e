"""Random programs of collectives with one random fault: an error where the calls differ, never a hang."""

import os
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import funcpar as fp
from funcpar import tree

SMALL, LARGE = 2, 1 << 15  # As large as what shards sum together.
STRUCTURES: dict[str, Any] = {
    "leaf": lambda x: x,
    "pair": lambda x: (x, 2 * x),
    "dict": lambda x: {"a": x, "b": [x + 1, None]},
    "number": lambda x: [x, 3],
}


@dataclass(frozen=True)
class Step:
    """One collective of a program."""

    name: str
    structure: str = "leaf"
    size: int = SMALL
    dtype: torch.dtype = torch.float64
    option: int = 0

    def run(self, x: Tensor) -> Tensor:
        """Call the collective on a tree made of a shard's vector; return a vector that depends on it."""
        n = fp.axis_size()
        dim = self.option % 2
        kwargs: dict[str, Any] = {
            "all_gather": {"axis": dim if self.structure != "number" else 0},
            "ppermute": {"perm": [(k, (k + 1 + self.option) % n) for k in range(n)]},
            "pshuffle": {"perm": [(k + 1 + self.option) % n for k in range(n)]},
            "pbroadcast": {"source": dim},
            "psum_scatter": {"tiled": bool(dim)},
            "all_to_all": {"split_axis": 0, "concat_axis": dim},
        }.get(self.name, {})
        square = self.name in ("psum_scatter", "all_to_all")
        leaf = x.to(self.dtype)[:1].expand(n, self.size) if square else x.to(self.dtype)[:1].expand(self.size)
        structure = "leaf" if square else self.structure
        out = getattr(fp, self.name)(STRUCTURES[structure](leaf.sin()), **kwargs)
        parts = [leaf.to(x.dtype).mean() for leaf in tree.leaves(out) if isinstance(leaf, Tensor)]
        return x + torch.stack(parts).sum()

    @property
    def key(self) -> tuple[Any, ...]:
        """What shards must agree on."""
        bound = self.name not in ("psum", "pmean") and (self.name, self.structure) != ("all_gather", "number")
        square = self.name in ("psum_scatter", "all_to_all")
        return (
            self.name,
            "leaf" if square else self.structure,
            self.size,
            self.dtype,
            bound and self.option % 2,
        )


NAMES = (
    "psum", "pmean", "all_gather", "ppermute", "pshuffle", "pbroadcast", "psum_scatter", "all_to_all",
)  # fmt: skip
random_steps = st.builds(
    Step,
    st.sampled_from(NAMES),
    st.sampled_from(list(STRUCTURES)),
    st.sampled_from([SMALL, SMALL, SMALL, LARGE]),
    st.sampled_from([torch.float64, torch.float64, torch.float32]),
    st.integers(0, 1),
)
FAULTS = (
    "none",
    "skip",
    "repeat",
    "swap",
    "operation",
    "structure",
    "size",
    "dtype",
    "option",
    "return",
    "raise",
)
WAYS = ("plain", "inside", "fused", "outside", "torch.func")


class Mine(Exception):
    """The failure that a program brings about."""


@dataclass(frozen=True)
class Program:
    """The steps of all shards but one, and those of that one; where it raises or returns."""

    steps: list[Step]
    odd: list[Step]
    rank: int
    size: int
    way: str
    raises_at: int | None = None

    @property
    def differs(self) -> bool:
        """Tell whether the shards make different calls."""
        return [step.key for step in self.steps] != [step.key for step in self.odd]

    def loss(self, x: Tensor) -> Tensor:
        """Run this shard's steps."""
        odd = fp.axis_index() == self.rank
        for k, step in enumerate(self.odd if odd else self.steps):
            if odd and self.raises_at == k:
                raise Mine(k)
            x = step.run(x)
        if odd and self.raises_at == len(self.odd):
            raise Mine("last")
        return x.sum()

    def __call__(self, x: Tensor) -> Any:
        """Run the program in its way."""
        mapped = fp.pmap(self.loss, in_axes=0, out_axes="sum", devices=self.size)
        if self.way == "inside":
            return fp.pmap(lambda x: fp.grad(self.loss)(x), in_axes=0, out_axes=0, devices=self.size)(x)  # noqa: PLW0108
        if self.way == "fused":
            return fp.pmap(fp.grad(self.loss), in_axes=0, out_axes="sum", devices=self.size)(x)
        if self.way == "outside":
            return fp.grad(mapped)(x)
        return torch.func.grad(mapped)(x) if self.way == "torch.func" else mapped(x)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    usual = draw(st.lists(random_steps, min_size=1, max_size=6))
    size = draw(st.integers(2, 4))
    fault, k = draw(st.sampled_from(FAULTS)), draw(st.integers(0, len(usual) - 1))
    odd, raises_at, step = list(usual), None, usual[k]
    if fault == "skip":
        del odd[k]
    elif fault == "repeat":
        odd.insert(k, step)
    elif fault == "swap":
        odd[k], odd[0] = odd[0], odd[k]
    elif fault == "operation":
        odd[k] = replace(step, name=draw(st.sampled_from(NAMES)))
    elif fault == "structure":
        odd[k] = replace(step, structure=draw(st.sampled_from(list(STRUCTURES))))
    elif fault == "size":
        odd[k] = replace(step, size=3)
    elif fault == "dtype":
        odd[k] = replace(step, dtype=torch.float16)
    elif fault == "option":
        odd[k] = replace(step, option=1 - step.option)
    elif fault == "return":
        del odd[k:]
    elif fault == "raise":
        raises_at = draw(st.integers(0, len(usual)))
    return Program(usual, odd, draw(st.integers(0, size - 1)), size, draw(st.sampled_from(WAYS)), raises_at)


EXAMPLES = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 60


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(programs())
def test_a_random_program_with_a_fault_ends_in_an_error_and_never_hangs(program: Program):
    fp.set_cpu_devices(4, threads_per_device=1)
    x = torch.linspace(0.1, 1.0, 2 * program.size, dtype=torch.float64)
    start = time.monotonic()
    with mock.patch.dict(os.environ, {"FUNCPAR_TIMEOUT": "20"}):
        if program.raises_at is not None:
            with pytest.raises(Mine, match=r"\d|last"):
                program(x)
        elif program.differs:
            with pytest.raises(fp.ReplicaMismatchError, match=r"different calls|another structure"):
                program(x)
        else:
            assert torch.equal(program(x), program(x))
    assert time.monotonic() - start < 5
    total = fp.pmap(fp.psum, in_axes=0, out_axes=None, devices=program.size)(torch.ones(program.size))
    assert total.tolist() == [program.size]
