"""Merging: from what the shards returned to what one call returns.

Every leaf of the output gets a spec from ``out_axes``; one function per spec turns a column (that
leaf of every shard, in rank order) into one leaf. What a spec cannot honour is refused.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcpar import tree
from funcpar._donation import Donation
from funcpar._equality import all_equal, kind, same_object, where_unequal
from funcpar._errors import ReplicaMismatchError
from funcpar._graph import is_smooth
from funcpar._outputs import check_lists, check_open, check_tensors
from funcpar._reduce import add_up
from funcpar._span import Span
from funcpar._split import Split
from funcpar._staging import Shards
from funcpar._told import LOCAL, PART, SAME
from funcpar._transfer import remember_column
from funcpar._world import is_transformed

# What a spec makes of a leaf, seen from the other processes; anything else stays with its process.
_ACROSS = {"mean": PART, "sum": PART, None: SAME}


@dataclass(frozen=True, slots=True)
class Merge:
    """How the outputs of one call are merged.

    Attributes:
        call: The call for messages, such as ``pmap(train_step)``.
        split: What each shard got.
        weights: Weight of each shard in a mean.
        span: How the axis goes on in other processes, None if it does not.
        checked: On accelerators, what was found equal in earlier calls.
        donation: What the call's results may use the memory of.
        events: On accelerators, after what the results are there.
    """

    call: str
    split: Split
    weights: Sequence[float]
    span: Span | None = None
    checked: set[Any] | None = None
    donation: Donation | None = None
    events: dict[torch.device, Any] = field(default_factory=dict)

    def trees(
        self, spec: Any, outs: Sequence[Any], gradients: Collection[int] = (), root: str = "output"
    ) -> Any:
        """Merge one tree per shard; ``spec`` is a prefix of it.

        ``gradients`` says which leaves are gradients that the function took of its own rows.
        """
        if spec == "shards":
            return Shards([tree.map(self._own, out) for out in outs], self.split.devices, self.split.rows)
        if type(spec) in (list, tuple, dict) and "shards" in tree.leaves(spec):
            return self._by_child(spec, outs, gradients, root)
        if not gradients and not isinstance(spec, list | tuple | dict) and {Tensor} == set(map(type, outs)):
            return self.column(spec, list(outs), root)  # No structure to compare.
        leaves, structure = tree.flatten(outs[0])
        rows = [leaves]
        for rank, out in enumerate(outs[1:], 1):
            try:
                rows.append(tree.flatten_like(structure, out, root))
            except ValueError as error:
                raise ReplicaMismatchError(
                    f"{self.call}: shard {rank} returned another structure than shard 0: {error}\n"
                    f"Return the same structure from every shard."
                ) from None
        specs = tree.broadcast_prefix(spec, structure, f"{self.call}: out_axes")
        paths = structure.paths(root)
        check_lists(self.call, self.split.rows, specs, rows, outs)
        local = [k for k in sorted(gradients) if specs[k] == "auto"]
        if local and (len(outs) > 1 or self.span is not None):
            self._refuse_gradient(paths[local[0]])
        columns = [[row[k] for row in rows] for k in range(len(leaves))]
        return tree.unflatten(structure, self.columns(specs, columns, paths, structure.order()))

    def refuse_ambiguous(self, outs: Sequence[Any]) -> None:
        """Refuse what may be the rows of a shard, or one value that all shards made of a whole gradient."""
        columns = zip(*(tree.leaves(out) for out in outs), strict=False)
        for path, column in zip(tree.flatten(outs[0])[1].paths("output"), columns, strict=False):
            tensors = len(column) > 1 and all(isinstance(leaf, Tensor) for leaf in column)
            if tensors and not same_object(column) and self._follows_rows(column, path) and all_equal(column):
                raise ValueError(
                    f"{self.call}: {path} is equal on all shards and has the shape of rows, so that it "
                    f"cannot be told whether code around the gradient function made it of a whole gradient.\n"
                    f"Do it after the call, or map the gradient function itself."
                )

    def _refuse_gradient(self, path: str) -> NoReturn:
        raise ValueError(
            f"{self.call}: {path} is a gradient that each shard took of its own rows, and "
            f'out_axes="auto" does not guess how to merge it.\n'
            f"Map the gradient function itself, pmap(fp.grad(f)) or pmap(fp.value_and_grad(f)), "
            f'which reduces it; or give out_axes, "mean" or "stack" say, for this output.'
        )

    def _by_child(self, spec: Any, outs: Sequence[Any], gradients: Collection[int], root: str) -> Any:
        """Merge the children one by one, so that a ``"shards"`` takes whatever each shard has there."""
        keys = list(spec) if isinstance(spec, dict) else range(len(spec))
        for out in outs:
            if (
                type(out) is not type(outs[0])
                or type(out) not in (list, tuple, dict)
                or len(out) != len(keys)
            ):
                raise ValueError(
                    f"{self.call}: out_axes={spec!r} does not fit an output that is a {type(out).__name__}.\n"
                    f'Give "shards" for the whole output, or for entries of a list, tuple or dict.'
                )
        merged, start = [], 0
        for key in keys if isinstance(spec, dict) else range(len(keys)):
            count = len(tree.leaves(outs[0][key]))
            own = [k - start for k in gradients if start <= k < start + count]
            merged.append(self.trees(spec[key], [out[key] for out in outs], own, f"{root}[{key!r}]"))
            start += count
        return dict(zip(keys, merged, strict=True)) if isinstance(spec, dict) else type(outs[0])(merged)

    def columns(
        self, specs: Sequence[Any], columns: Sequence[list[Any]], paths: Sequence[str], order: Sequence[int]
    ) -> list[Any]:
        """Merge leaves: of each the column, its value on every shard."""
        resolved = [self._resolved(*each) for each in zip(specs, columns, paths, strict=True)]
        merged = [self._merged(*each) for each in zip(resolved, columns, paths, strict=True)]
        if self.span is None:
            return merged
        kinds = [_ACROSS.get(spec, LOCAL) for spec in resolved]
        # Dicts agree by name, whatever the order of their keys in each process.
        settled = self.span.settled(*([them[k] for k in order] for them in (paths, kinds, merged)))
        for k, leaf in zip(order, settled, strict=True):
            merged[k] = leaf
        return merged

    def column(self, spec: Any, column: list[Any], path: str) -> Any:
        """Merge one leaf of every shard."""
        if self.span is None:
            return self._merged(self._resolved(spec, column, path), column, path)
        return self.columns([spec], [column], [path], [0])[0]

    def _resolved(self, spec: Any, column: list[Any], path: str) -> Any:
        """Return the spec that holds for a leaf: what "auto" finds; equality for means of integers."""
        if spec == "auto" or spec is None:
            check_open(self.call, column, path)
        if spec == "auto":
            spec = self._auto(column, path)
        if spec == "mean" and isinstance(column[0], Tensor) and not is_smooth(column[0]):
            check_tensors(self.call, column, path, 'out_axes="mean"', alike=True)
            return None
        return spec

    def _merged(self, spec: Any, column: list[Any], path: str) -> Any:
        if isinstance(spec, int):
            merged = self._joined(spec, column, path)
        else:
            merge = {"mean": self._mean, "sum": self._sum, "stack": self._stack, None: self._equal}[spec]
            merged = merge(column, path)
        if self.donation is not None:
            merged = self.donation.settle(merged)
        if spec is None and not self.split.devices[0].is_cpu:
            remember_column(merged, column, self.events)
        return merged

    def _auto(self, column: list[Any], path: str) -> Any:
        alone = len(column) == 1 and self.span is not None and not self.split.is_replicated(column[0])
        if all(isinstance(leaf, Tensor) for leaf in column) and (alone or not same_object(column)):
            if all(leaf.dim() == 0 and is_smooth(leaf) for leaf in column):
                return "mean"
            if self._follows_rows(column, path):
                return 0
        if not all_equal(column, path, self.checked):
            shapes = ", ".join(kind(leaf) for leaf in column)
            rows = self.split.rows
            there = "nothing is mapped" if rows is None else f"the shards have {rows} rows"
            pair = ' Value and aux each have one, as in out_axes=("mean", "sum").'
            raise ValueError(
                f"{self.call}: {path} differs between shards and does not follow the rows: {shapes}; "
                f"{there}.\n"
                f'Say how to merge it with out_axes: an int joins along a dimension, "mean", "sum", "stack", '
                f'"shards"; None promises that all shards agree.{pair * path.startswith("aux")}'
            )
        return None

    def _follows_rows(self, column: Sequence[Tensor], path: str) -> bool:
        rows = self.split.rows
        if rows is None or any(leaf.dim() == 0 for leaf in column):
            return False
        sizes = [leaf.shape[0] for leaf in column]
        total = sum(rows)
        factor = sum(sizes) // total if total else 1
        if factor < 1 or sizes != [factor * n for n in rows]:
            return False
        axes = {axis for axis in self.split.axes if axis is not None}
        for axis in axes if 0 not in axes and len(rows) > 1 else ():
            if all(leaf.dim() > axis and leaf.shape[axis] == n for leaf, n in zip(column, rows, strict=True)):
                raise ValueError(
                    f"{self.call}: {path} may have its rows along dimension 0 or along dimension {axis}, "
                    f"where they were split: {', '.join(map(kind, column))}.\nSay which with out_axes=0 or "
                    f"out_axes={axis}; None promises that all shards agree."
                )
        return True

    def _joined(self, dim: int, column: list[Any], path: str) -> Any:
        check_tensors(self.call, column, path, f"out_axes={dim}", alike=False)
        if any(not -leaf.dim() <= dim < leaf.dim() for leaf in column):
            raise ValueError(
                f"{self.call}: {path} has {column[0].dim()} dimensions and cannot be joined along dimension "
                f'{dim}.\nGive it another out_axes, "stack" or "mean" say.'
            )
        dim = dim % column[0].dim()
        rest = {leaf.shape[:dim] + leaf.shape[dim + 1 :] for leaf in column}
        if len(rest) > 1 or len({leaf.dim() for leaf in column}) > 1:
            raise ReplicaMismatchError(
                f"{self.call}: {path} cannot be joined along dimension {dim}: "
                f"{', '.join(kind(leaf) for leaf in column)}.\nReturn the same shape but for that dimension."
            )
        if len(column) == 1:
            return self._own(column[0])
        parts = [leaf.to(column[0].device) for leaf in column]
        return torch.cat(parts, dim) if self.donation is None else self.donation.joined(parts, dim)

    def _mean(self, column: list[Any], path: str) -> Any:
        if all(isinstance(leaf, float | complex) for leaf in column):
            return sum(leaf * share for leaf, share in zip(column, self.shares(), strict=True) if share)
        check_tensors(self.call, column, path, 'out_axes="mean"', alike=True)
        if len(column) == 1 and self.span is None:
            return self._own(column[0])
        total: Tensor | None = None
        for leaf, share in zip(column, self.shares(), strict=True):
            if share:  # A shard of weight 0 may hold 0/0.
                total = _add_scaled(total, leaf.to(column[0].device), share)
        if total is None:
            assert self.span is not None  # Alone, some shard has a share.
            return self.span.nothing(column[0])
        return total

    def shares(self) -> list[float]:
        """Return the share of each shard here in a mean."""
        if self.span is None:
            total = sum(self.weights)
            return [weight / total for weight in self.weights]
        return self.span.layout.shares()

    def is_alone(self) -> bool:
        """Tell whether there is one shard, whose mean is its own value."""
        return len(self.weights) == 1 and self.span is None

    def _sum(self, column: list[Any], path: str) -> Any:
        if all(isinstance(leaf, numbers.Number) for leaf in column):
            return sum(column)
        check_tensors(self.call, column, path, 'out_axes="sum"', alike=True)
        first = column[0]
        if first.dtype is torch.bool:
            column = [leaf.to(torch.int64) for leaf in column]
        return add_up([leaf.to(first.device) for leaf in column])

    def _stack(self, column: list[Any], path: str) -> Tensor:
        column = [torch.as_tensor(leaf) if isinstance(leaf, numbers.Number) else leaf for leaf in column]
        check_tensors(self.call, column, path, 'out_axes="stack"', alike=True)
        return torch.stack([leaf.to(column[0].device) for leaf in column])

    def _equal(self, column: list[Any], path: str) -> Any:
        if not all_equal(column, path, self.checked):
            raise ReplicaMismatchError(
                f"{self.call}: {path} was promised equal on all shards and is not: "
                f"{', '.join(kind(leaf) for leaf in column)}{where_unequal(column)}.\n"
                f'Reduce it in the function (fp.pmean, fp.psum), or give it out_axes "mean" or "stack".'
            )
        return self._own(column[0])

    def _own(self, leaf: Any) -> Any:
        """Copy a tensor that sees memory of an argument; a replicated argument itself stays itself.

        One that is donated lives on as another object, which has its memory.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        is_replicated = self.split.is_replicated(leaf)
        if self.donation is not None and self.donation.returns(leaf):
            return self.donation.returned(leaf, once=not is_replicated)
        return leaf.clone() if not is_replicated and self.split.is_seen_by(leaf) else leaf


def _add_scaled(total: Tensor | None, leaf: Tensor, share: float) -> Tensor:
    if is_transformed():  # A tensor: the tangent of a 0-d tensor times a Python float would be float64.
        real = leaf.real.dtype if leaf.is_complex() else leaf.dtype
        term = leaf * torch.full((), share, dtype=real, device=leaf.device)
    else:  # Rounded twice, as in a graph of all shards, which must give the same bits.
        term = leaf * share
    return term if total is None else total + term
