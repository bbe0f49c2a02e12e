"""Gradients summed over the shards of all processes, large ones while backward still runs.

A hook on each differentiated leaf sees its gradient when it is complete. The last shard of this
process to have it adds up, and gives the sum to the other processes in the order that all of them
keep. The value of the function travels at the end, with a note of whether this process got there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcpar import _streams
from funcpar._buckets import Sums
from funcpar._devices import Device
from funcpar._graph import Gradient, GradientHook
from funcpar._outgoing import AtOnce, InBuckets
from funcpar._reduce import add_up
from funcpar._route import NUM_MARKS, Route
from funcpar._span import Span
from funcpar._world import is_autocast

# Sums of squares of marks are exact in float32 for some 4,000 processes.
_MARKS = 60
# Smaller weights are rounded too much in float32.
_LEAST = 1e-30
# Gradients that are to be divided by more than that may have been too large or small for their dtype.
_FAR = 1e6


class Overlap:
    """The sums of one call of a gradient function.

    Seeds are the weights of the shards, as shares of the weight that all had together in the call
    before, if there was one like it: what they have now is known at the end, and then divided by.
    So a step of which nothing is new sends its gradients, and nothing else.

    Args:
        span: How the axis goes on in other processes.
        devices: One per shard of this process.
        route: How the gradients leave.
        is_mean: Whether shards have weights.
    """

    def __init__(self, span: Span, devices: Sequence[Device], route: Route, is_mean: bool) -> None:
        self._span = span
        self._route = route
        # Numbers on the CPU; on an accelerator, which nobody waits for here, tensors.
        self._values: list[Any] = [None] * len(devices)
        self._is_mean = is_mean
        self._is_divided = False
        self._expected = span.link.expected.get(span.key)
        self._outgoing: AtOnce | InBuckets
        if len(route.messages.buckets) == 1 and (devices[0].is_cpu or len(devices) == 1):
            self._outgoing = AtOnce(span, route, len(devices))
        else:
            self._outgoing = InBuckets(span, route, devices, self._is_deferred)
        # In half precision a seed that is off by a factor may overflow.
        if self._expected is None or route.is_half or is_autocast():
            span.open()

    def seed(self, place: int) -> float:
        """Return how much a shard's value counts."""
        return self._weights()[place] / self._divisor() if self._is_mean else 1.0

    def _divisor(self) -> float:
        """Return what the weight of all shards together is taken to be, from the first seed on."""
        if self._expected is None or (self._span.is_open and not self._is_divided):
            self._expected = sum(self._span.layout.weights)
        self._is_divided = True
        return self._expected

    def _is_deferred(self) -> bool:
        """Tell whether shards exchange with those of other processes.

        Then nothing is sent before they are done: it could pass an exchange in one process, and not
        in another, whose shards use other leaves.
        """
        return self._span.has_met or self._span.key in self._span.link.exchanging

    def _weights(self) -> Sequence[float]:
        """Return the weights of the shards here; what is new is compared before, and so before it is sent."""
        span = self._span
        return span.layout.weights[span.layout.here] if span.is_open else span.weights

    def hook(self, place: int) -> Callable[[int], GradientHook | None] | None:
        """Return what gives each leaf of a shard the hook of its stand-in; None if there is no hurry."""
        hook = self._outgoing.hook
        return None if hook is None else partial(hook, place)

    def end(self, place: int, value: Tensor, grads: Sequence[Gradient]) -> None:
        """Note that a shard's backward is done, its value, and the gradients that no hook has told of.

        Raises:
            RuntimeError: They are part of a graph.
        """
        if value.requires_grad:
            raise RuntimeError(
                f"{self._span.call}: the value depends on a tensor that requires a gradient and is no "
                f"argument, so that gradients would be part of a graph; over processes they cannot be.\n"
                f"Detach that tensor, pass it as an argument, or make the call under torch.no_grad()."
            )
        self._outgoing.end(place, grads)
        seed = self.seed(place)  # If it is 0, the value may be 0/0.
        if value.is_cpu:
            self._values[place] = value.item() * seed if seed else 0.0
        else:
            self._values[place] = value * seed if seed else torch.zeros_like(value)
        self._like = value

    def totals(self) -> tuple[Tensor, dict[int, Gradient]] | None:
        """Return the value and the gradients of all shards of all processes, None to begin again.

        That is if they weigh nothing, or quite another weight than was expected.

        Raises:
            ProcessFailedError: Another process failed.
            ReplicaMismatchError: Another process was in another call.
        """
        self._join()
        like, value = self._like, self._values[0]
        if len(self._values) > 1:
            value = sum(self._values) if like.is_cpu else add_up(self._values)
        carried = like.dtype is self._route.messages.kinds[-1][1]
        weight_here, divisor = sum(self._weights()), self._divisor() if self._is_mean else 1.0
        span, link = self._span, self._span.link
        if self._is_deferred():
            link.exchanging.add(span.key)
            link.meet(span.in_gradients)
        self._outgoing.send(self._tail(weight_here, value if carried else 0.0))
        *grads, tail = self._outgoing.totals()
        total, weight, failed, *marks = tail.cpu().tolist()
        if failed:  # Whoever failed says so next.
            link.meet(f"the end of {span.call}")
        # The marks of all are equal if, and only if, the mean of squares is the square of the mean.
        if any(square * link.count != mark * mark for mark, square in zip(*[iter(marks)] * 2, strict=True)):
            self._refuse()
        span.has_ended = True
        if carried and (not self._is_mean or _LEAST < weight < math.inf):
            found = torch.full_like(like, total)
        else:  # Of another dtype, or with a weight that would be rounded to that of the gradients.
            mine = torch.full((), weight_here, dtype=torch.float64, device=like.device)
            value = value if isinstance(value, Tensor) else torch.full_like(like, value)
            found, exact = Sums.of(link, span.call, [value, mine])
            weight = exact.item()
            if self._is_mean:
                span.refuse_infinite(weight)
        if self._is_mean and not divisor / _FAR < weight < divisor * _FAR:
            return None
        link.expected[span.key] = weight
        if self._is_mean and weight != divisor:
            for tensor in (found, *grads):
                tensor.mul_(divisor / weight)
        return found, dict(zip(self._route.places, grads, strict=True))

    def abandon(self) -> None:
        """Let the other processes come to an end: this one failed."""
        self._join()
        link = self._span.link
        if not link.was_told():
            link.spoke()
            if not self._is_deferred():  # Otherwise all are where words are exchanged.
                self._outgoing.abandon(self._tail(0.0, failed=1.0))

    def _tail(self, weight: float, value: Tensor | float = 0.0, failed: float = 0.0) -> Tensor:
        """Return what travels behind the gradients."""
        _, dtype, device = self._route.messages.kinds[-1]
        call, signature = self._span.key
        code = zlib.crc32(call.encode() + signature + str(self._span.link.turn).encode())
        numbers = [0.0 if isinstance(value, Tensor) else value, weight, failed]
        for _ in range(NUM_MARKS):
            code, mark = divmod(code, _MARKS)
            numbers += mark + 1, (mark + 1) ** 2
        tail = torch.tensor(numbers, dtype=dtype).to(device)
        if isinstance(value, Tensor):
            tail[0] = value
        return tail

    def _refuse(self) -> NoReturn:
        self._span.open()
        self._span.layout  # noqa: B018 (raises if the processes are in different calls)
        raise RuntimeError(
            f"{self._span.call}: the processes sent sums of different calls.\nStart them all again."
        )

    def _join(self) -> None:
        """In the caller: let its streams go on after what the shards have done."""
        self._outgoing.join()
        _streams.received(self._values)
