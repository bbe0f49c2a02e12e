"""The values measured on JAX, as tensors: see ``golden/README.md``."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import funcpar as fp
from funcpar import tree

DATA = json.loads((Path(__file__).parent / "golden" / "collectives.json").read_text())
AXIS = DATA["axis_name"]


@dataclass(frozen=True)
class Case:
    """One collective on one stacked operand; trees of tensors, None where there is nothing."""

    id: str
    size: int
    collective: str
    kwargs: dict[str, Any]
    constant: float | None
    exact: bool
    x: Any
    y: Any
    ct: Any
    x_bar: Any
    tangent: Any
    y_dot: Any

    def body(self, x: Any) -> Any:
        """Call the collective on this shard's row of the operand."""
        given = tree.map(lambda leaf: leaf[0], x) if self.constant is None else self.constant
        call = getattr(fp, self.collective)
        if self.collective in ("axis_index", "axis_size"):
            return torch.tensor([call(AXIS)])
        return tree.map(lambda leaf: torch.as_tensor(leaf)[None], call(given, AXIS, **self.kwargs))

    @functools.cached_property
    def mapped(self) -> Any:
        """The collective over all rows, one per device."""
        return fp.pmap(self.body, AXIS, in_axes=0, out_axes=0, devices=self.size)

    def by_leaves(self) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Return the mapped function of its differentiable leaves, those leaves, and its cotangents."""
        leaves, spec = tree.flatten(self.x)
        smooth = [k for k, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]

        def call(*some: Tensor) -> tuple[Tensor, ...]:
            given = list(leaves)
            for k, leaf in zip(smooth, some, strict=True):
                given[k] = leaf
            outs = tree.leaves(self.mapped(tree.unflatten(spec, given)))
            return tuple(out for out in outs if out.is_floating_point() or out.is_complex())

        return call, [leaves[k] for k in smooth], tree.leaves(self.ct)


def tensor(data: Any, dtype: str, shape: list[int]) -> Tensor:
    """Return an array of the file as a tensor."""
    if dtype.startswith("complex"):
        part = torch.float32 if dtype == "complex64" else torch.float64
        return torch.complex(*(torch.tensor(data[key], dtype=part).reshape(shape) for key in ("re", "im")))
    return torch.tensor(data, dtype=getattr(torch, dtype)).reshape(shape)


def array(node: dict[str, Any]) -> Tensor:
    """Return an array node as a tensor."""
    return tensor(node["data"], node["dtype"], node["shape"])


def _from_node(node: dict[str, Any]) -> Any:
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _from_node(child) for key, child in value.items()}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(map(_from_node, value))
    return array(value) if kind == "array" else None


def _field(entry: dict[str, Any], name: str) -> Any:
    value = entry[name]
    if value is None:
        return None
    if isinstance(value, dict) and "tree" in value:
        return _from_node(value["tree"])
    like = "y" if name in ("y", "ct", "y_dot") else "x"
    return tensor(value, entry["dtype" if like == "x" else "y_dtype"], entry[f"{like}_shape"])


def _case(entry: dict[str, Any]) -> Case:
    values = {name: _field(entry, name) for name in ("x", "y", "ct", "x_bar", "tangent", "y_dot")}
    kwargs = {k: [tuple(pair) for pair in v] if k == "perm" and v and isinstance(v[0], list) else v
              for k, v in entry["kwargs"].items()}  # fmt: skip
    return Case(
        entry["id"], entry["axis_size"], entry["collective"], kwargs, entry.get("constant"), entry["exact"],
        **values,
    )  # fmt: skip


CASES = [_case(entry) for entry in DATA["cases"]]


def assert_agrees(found: Any, expected: Any, exact: bool = False) -> None:
    """Assert that a tree of results is the expected one; integers may be wider."""
    leaves, spec = tree.flatten(expected)
    for one, other in zip(tree.flatten_like(spec, found), leaves, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        if not (other.is_floating_point() or other.is_complex()):
            assert not (one.is_floating_point() or one.is_complex()), one.dtype
            assert torch.equal(one.to(torch.int64), other.to(torch.int64)), (one, other)
            continue
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        if exact:
            assert torch.equal(one.detach(), other.to(one.dtype)), (one, other)
        else:
            limits = DATA["tolerance"]["float64" if other.dtype == torch.float64 else "float32"]
            torch.testing.assert_close(one.detach(), other.to(one.dtype), **limits)
