"""The linear maps that collectives are: what each shard gets from all, and each map's transpose.

A map takes the column of a leaf, its value on every shard in rank order, and gives the value of one
shard, always in new memory. The transpose of a map over all shards is a map of this table too, so
derivatives of collectives are collectives, to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self, TypeAlias

import torch
from torch import Tensor

from funcpar._reduce import add_up

Groups: TypeAlias = tuple[tuple[int, ...], ...]

# What users know an option as, where it has another name here.
_SHOWN = {
    "groups": "axis_index_groups",
    "dim": "axis",
    "split": "split_axis",
    "concat": "concat_axis",
    "pairs": "perm",
}


@dataclass(frozen=True, slots=True)
class Map:
    """One map over the shards of an axis.

    Attributes:
        lead: Leading dimensions that vmap added, which no option counts.
    """

    lead: int = field(default=0, kw_only=True)

    def __str__(self) -> str:
        """Show the options, as the end of an argument list."""
        everyone = (tuple(range(self.num_ranks())),)
        options = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "lead"]
        return "".join(f", {_SHOWN.get(name, name)}={value}" for name, value in options if value != everyone)

    def num_ranks(self) -> int:
        """Return how many ranks the options name."""
        return 0

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        """Return what shard ``rank`` gets."""
        raise NotImplementedError

    def transposed(self) -> Map:
        """Return the adjoint of the map over all shards."""
        raise NotImplementedError

    def batched(self) -> Self:
        """Return the same map of leaves with one more leading dimension."""
        return replace(self, lead=self.lead + 1)

    def _dim(self, dim: int, num_dims: int) -> int:
        return self.lead + dim % (num_dims - self.lead)


@dataclass(frozen=True, slots=True)
class Grouped(Map):
    """A map within groups of shards."""

    groups: Groups = ()

    def num_ranks(self) -> int:
        return sum(map(len, self.groups))

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that exchange with ``rank``, in order."""
        return next(group for group in self.groups if rank in group)

    def within(self, rank: int, column: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Return the values of a rank's group, and its place there."""
        group = self.group(rank)
        return [column[r] for r in group], group.index(rank)


@dataclass(frozen=True, slots=True)
class Sum(Grouped):
    """Everyone gets the sum."""

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        total = add_up(self.within(rank, column)[0])
        assert total is not None
        return total

    def fill(self, rank: int, column: Sequence[Tensor], room: Tensor) -> None:
        """Write this rank's part of its group's sum into memory that the group shares."""
        values, place = self.within(rank, column)
        start, stop = (room.numel() * p // len(values) for p in (place, place + 1))
        first, *rest = [value.reshape(-1)[start:stop] for value in values]
        part = room.view(-1)[start:stop]
        if not rest:
            part.copy_(first)
            return
        torch.add(first, rest[0], out=part)
        for value in rest[1:]:
            part.add_(value)

    def transposed(self) -> Map:
        return self


@dataclass(frozen=True, slots=True)
class Extremum(Grouped):
    """Everyone gets the largest entries, or the smallest. NaN wins, as in ``torch.amax``."""

    largest: bool = True

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(self.within(rank, column)[0])
        return stacked.amax(0) if self.largest else stacked.amin(0)

    def transposed(self) -> Map:
        raise NotImplementedError("an extremum is not linear")


@dataclass(frozen=True, slots=True)
class Gather(Grouped):
    """Everyone gets all, along a new dimension or joined along one."""

    dim: int = 0
    tiled: bool = False

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        values, _ = self.within(rank, column)
        if self.tiled:
            return torch.cat(values, self._dim(self.dim, values[0].dim()))
        return torch.stack(values, self._dim(self.dim, values[0].dim() + 1))

    def transposed(self) -> Map:
        return Scatter(self.groups, self.dim, self.tiled, lead=self.lead)


@dataclass(frozen=True, slots=True)
class Scatter(Grouped):
    """Everyone gets its part of the sum."""

    dim: int = 0
    tiled: bool = False

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        values, place = self.within(rank, column)
        dim = self._dim(self.dim, values[0].dim())
        total = add_up([_part(value, dim, place, len(values), self.tiled) for value in values])
        assert total is not None
        return total

    def transposed(self) -> Map:
        return Gather(self.groups, self.dim, self.tiled, lead=self.lead)


@dataclass(frozen=True, slots=True)
class Exchange(Grouped):
    """Everyone gets its part of each."""

    split: int = 0
    concat: int = 0
    tiled: bool = False

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        values, place = self.within(rank, column)
        num_dims = values[0].dim()
        dim = self._dim(self.split, num_dims)
        parts = [_part(value, dim, place, len(values), self.tiled) for value in values]
        concat = self._dim(self.concat, num_dims)
        return torch.cat(parts, concat) if self.tiled else torch.stack(parts, concat)

    def transposed(self) -> Map:
        return replace(self, split=self.concat, concat=self.split)


@dataclass(frozen=True, slots=True)
class Permute(Map):
    """Each destination gets its source's value, all others zeros."""

    pairs: tuple[tuple[int, int], ...] = ()

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        for source, destination in self.pairs:
            if destination == rank:
                return column[source].clone()
        return torch.zeros_like(column[rank])

    def transposed(self) -> Map:
        return replace(self, pairs=tuple((destination, source) for source, destination in self.pairs))


@dataclass(frozen=True, slots=True)
class Broadcast(Map):
    """Everyone gets the source's value."""

    source: int = 0

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        return column[self.source].clone()

    def transposed(self) -> Map:
        return Collect(self.source, lead=self.lead)


@dataclass(frozen=True, slots=True)
class Collect(Map):
    """The target gets the sum, all others zeros."""

    target: int = 0

    def output(self, rank: int, column: Sequence[Tensor]) -> Tensor:
        total = add_up(column) if rank == self.target else torch.zeros_like(column[rank])
        assert total is not None
        return total

    def transposed(self) -> Map:
        return Broadcast(self.target, lead=self.lead)


def _part(value: Tensor, dim: int, place: int, count: int, tiled: bool) -> Tensor:
    if not tiled:
        return value.select(dim, place)
    size = value.shape[dim] // count
    return value.narrow(dim, place * size, size)
