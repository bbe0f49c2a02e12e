"""One call whose axis spans all processes: who has which shards, and what they make of outputs together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpar._across import copied, summed
from funcpar._alike import check_alike, described
from funcpar._errors import ReplicaMismatchError
from funcpar._graph import is_smooth
from funcpar._link import Link, Word
from funcpar._route import Route
from funcpar._told import PART, SAME, is_differentiated, told_of, with_values, zero_of
from funcpar._world import is_transformed


@dataclass(frozen=True, slots=True)
class Layout:
    """The shards of all processes.

    Attributes:
        index: Which process this is.
        counts: Number of shards of each process.
        weights: Weight of every shard in every mean, in rank order.
    """

    index: int
    counts: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def size(self) -> int:
        """Return the number of shards."""
        return len(self.weights)

    @property
    def offset(self) -> int:
        """Return the rank of this process's first shard."""
        return sum(self.counts[: self.index])

    def shares(self) -> list[float]:
        """Return the share of each of this process's shards in a mean."""
        total = sum(self.weights)
        return [weight / total for weight in self.weights[self.here]]

    @property
    def here(self) -> slice:
        """Return the ranks of this process's shards."""
        return slice(self.offset, self.offset + self.counts[self.index])


@dataclass(slots=True)
class Signature:
    """What is known of calls that are alike.

    Attributes:
        digest: A stand-in for what the processes must agree on.
        route: How gradients leave for other processes, once it is known.
    """

    digest: bytes
    route: Route | None = None


class Span:
    """One call over all processes, in this one.

    The others are told of it at the start, or when the first shard asks for what they say.

    Args:
        link: The line to the other processes.
        call: The call, such as ``pmap(train_step)``.
        signature: What is known of calls like this one.
        kinds: Returns what the processes must agree on, by path.
        weights: Weight of each shard here.
        is_recorded: Whether results may be part of the caller's graph.

    Attributes:
        has_met: Whether shards have met with those of other processes.
        has_ended: Whether the processes have met at the end.
        anchors: Zeros in the graphs of the shards, whose backward must run in all processes or in none.
    """

    def __init__(
        self,
        link: Link,
        call: str,
        signature: Signature,
        kinds: Callable[[], dict[str, str]],
        weights: Sequence[float],
        is_recorded: bool,
    ) -> None:
        self.link = link
        self.call = call
        self.signature = signature
        self.key = call, signature.digest
        self.weights = tuple(weights)
        self.is_recorded = is_recorded
        self._kinds = kinds
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._word: Word | None = None
        self.anchors: list[Tensor] = []
        self.has_met = False
        self.has_ended = False

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        self.anchors.clear()  # The graphs that they are in lead back here.

    def open(self) -> None:
        """Tell the other processes of the call, and begin to listen to them."""
        if self._word is None:
            self._word = self.link.say(self.call, (self.key[1], self.weights))

    @property
    def in_gradients(self) -> str:
        """Say where this process is while gradients are summed; another may be as such a call begins."""
        return f"the gradients of {self.call}"

    @property
    def is_open(self) -> bool:
        """Tell whether the other processes were told of the call."""
        return self._word is not None

    @property
    def layout(self) -> Layout:
        """Wait for the others, and return the shards of all processes.

        Raises:
            ReplicaMismatchError: Another process is in another call, or has other arguments.
        """
        if self._layout is None:
            with self._lock:
                if self._layout is None:
                    self._layout = self._met()
        return self._layout

    def numbers(self, num_here: int) -> tuple[int, int]:
        """Return the rank of the first shard here and the number of all, as far as that is known."""
        return (0, num_here) if self._layout is None else (self._layout.offset, self._layout.size)

    def _met(self) -> Layout:
        self.open()
        assert self._word is not None
        told = self._word.answers()
        if any(theirs != told[0][0] for theirs, _ in told):
            check_alike(self.link, self.call, self._kinds())
        weights = tuple(weight for _, theirs in told for weight in theirs)
        # What counts nothing anywhere is a mean of 0/0: each shard's value, undivided.
        weights = weights if any(weights) else (1.0,) * len(weights)
        self.refuse_infinite(sum(weights))
        return Layout(self.link.index, tuple(len(theirs) for _, theirs in told), weights)

    def refuse_infinite(self, weight: float) -> None:
        """Refuse a weight of all shards that no share can be made of."""
        if weight == float("inf"):
            raise self.link.agreed(
                ValueError(f"{self.call}: the weights of all processes add up to infinity.\nScale them down.")
            )

    def copied(self, leaves: Sequence[Any]) -> list[Any]:
        """Return replicated leaves, those that are differentiated so that their gradients are summed."""
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and is_differentiated(leaf)]
        answer = list(leaves)
        for k, leaf in zip(places, copied(self.link, self.call, [leaves[k] for k in places]), strict=True):
            answer[k] = leaf
            if is_transformed():  # With plain autograd the graph that joins the shards has its own.
                self.anchors.append(zero_of(leaf))
        return answer

    def backward(self) -> AbstractContextManager[None]:
        """Hold the line for the call's backward; what it raises is told to the other processes."""
        return self.link.call(f"the backward of {self.call}", begins=False)

    def closed_over(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return tensors that the shards use and that are no arguments, as :meth:`copied`.

        Raises:
            ReplicaMismatchError: The shards of another process use other ones.
        """
        # They have no names: only their values tell whether those of another process are the same.
        kinds = {f"closed-over tensor {k}": with_values(leaf) for k, leaf in enumerate(leaves)}
        self._agree(f"the end of the shards of {self.call}", kinds)
        return copied(self.link, self.call, leaves)

    def summed(self, leaves: list[Any]) -> list[Tensor]:
        """Return the sums over processes of gradients, differentiable."""
        what = self.in_gradients
        kinds = {f"gradient {k}": described(leaf) for k, leaf in enumerate(leaves)}
        self._agree(what, kinds)
        # Where no shard counts, they are zeros; in the graph all the same, as those of the others are.
        return summed(self.link, what, [self.anchored(leaf) for leaf in leaves])

    def _agree(self, where: str, kinds: dict[str, str]) -> None:
        """Meet, and refuse what the processes do not have alike."""
        everyone = self.link.meet(where, list(kinds.values()))
        if any(theirs != everyone[0] for theirs in everyone):
            check_alike(self.link, self.call, kinds)

    def settled(self, names: Sequence[str], kinds: Sequence[str], leaves: list[Any]) -> list[Any]:
        """Return output leaves as all processes have them: sums added up, what is the same compared.

        Args:
            names: Path of each leaf.
            kinds: LOCAL, PART or SAME.
            leaves: What the shards of this process made of each.

        Raises:
            ReplicaMismatchError: Processes differ in what should be the same.
        """
        end = f"the end of {self.call}"
        plain = not is_transformed()
        mine = [told_of(kind, leaf, plain) for kind, leaf in zip(kinds, leaves, strict=True)]
        everyone = self.link.meet(end, (list(names), mine))
        self.has_ended = True
        self._check(names, everyone)
        answer = list(leaves)
        parts: list[int] = []
        for k, kind in enumerate(kinds):
            column = [theirs[k] for _, theirs in everyone]
            is_wanted = any(told.is_differentiated for told in column)
            if kind == PART and is_wanted and not is_differentiated(leaves[k]):
                answer[k] = self.anchored(leaves[k])  # Another process's backward goes through this call.
            if kind == PART and all(told.number is not None for told in column):
                answer[k] = self._total(answer[k], sum(told.number for told in column), end)
            elif kind == PART:
                parts.append(k)
            elif kind == SAME and is_wanted:
                # Counted once: every process hands on the cotangent, so only one may have it.
                answer[k] = leaves[k] if self.link.index == 0 else self.nothing(leaves[k])
                parts.append(k)
        for k, total in zip(parts, summed(self.link, end, [answer[k] for k in parts]), strict=True):
            answer[k] = total
        return answer

    def nothing(self, like: Tensor) -> Tensor:
        """Return zeros that depend on the shards, whose backward must run where that of others does."""
        anchored: Tensor = self.anchored(torch.zeros_like(like.detach()))
        return anchored

    def anchored(self, leaf: Any) -> Any:
        """Return a leaf as what depends on all that was exchanged, whether this process used it or not."""
        if not isinstance(leaf, Tensor) or not is_smooth(leaf):
            return leaf
        for anchor in self.anchors:
            leaf = leaf + anchor.to(leaf)
        return leaf

    def _total(self, leaf: Any, value: Any, end: str) -> Any:
        """Return a sum of numbers as what it is a sum of, differentiable if that is."""
        if not isinstance(leaf, Tensor):
            return value
        total = torch.full_like(leaf.detach(), value)
        return summed(self.link, end, [leaf], [total])[0] if is_differentiated(leaf) else total

    def _check(self, names: Sequence[str], everyone: list[Any]) -> None:
        """Refuse outputs that differ from process to process."""
        lines = []
        if any(theirs != everyone[0][0] for theirs, _ in everyone):
            lines = [
                f"\n  process {k} returned {', '.join(theirs) or 'nothing'}"
                for k, (theirs, _) in enumerate(everyone)
            ]
        else:
            for k, name in enumerate(names):
                column = [theirs[k] for _, theirs in everyone]
                for what in ("kind", "form"):
                    found = [getattr(told, what) for told in column]
                    if any(each != found[0] for each in found):
                        shown = ", ".join(f"{each} in process {p}" for p, each in enumerate(found))
                        lines.append(f"\n  {name}  {shown}")
                        break
                else:
                    if any(told.value != column[0].value for told in column):
                        lines.append(f"\n  {name}  differs from process to process")
        if lines:
            raise self.link.agreed(
                ReplicaMismatchError(
                    f"{self.call}: the processes returned different outputs:{''.join(lines)}\n"
                    f"Return the same from every shard, reduce it (fp.pmean, fp.psum), or say with out_axes "
                    f"that it has rows (an int) or is a mean."
                )
            )
