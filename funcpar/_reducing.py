"""A gradient function that code of the user calls, in a function that pmap was given.

A decorator with ``functools.wraps`` say, that clips gradients or logs their norm: it gets the gradient
of the whole, in every shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from funcpar import _streams
from funcpar._asked import handled
from funcpar._fused import Fused
from funcpar._grad import GradientFunction
from funcpar._group import find
from funcpar._request import Call, call_site


@contextmanager
def reducing(fused: Fused, leaves: list[Any]) -> Iterator[None]:
    """Within a shard: let the gradient function, called by code of the user, return the whole's.

    Every shard gets the same objects, but for gradients of split arguments: those of its rows.
    """

    def handler(gradient: GradientFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = fused.evaluate(leaves, gradient, args, kwargs)
        known = set(map(id, leaves))
        if not all(id(leaf) in known for leaf in found.leaves):
            raise ValueError(
                f"{fused.merge.call}: code around {gradient.call} passes it a tensor that is no argument "
                f"of the mapped function, so that it cannot be told whether it has rows.\n"
                f"Pass the arguments on as they are, or do what is done to them inside the function."
            )
        axes = fused.axes(fused.places(found.leaves, leaves))
        _, own, summed = fused.sum(found, axes)
        shard = find(None, gradient.call)
        if not summed:
            raise RuntimeError(
                f"{fused.merge.call}: what {gradient.call} returns depends on tensors that require a "
                f"gradient, and code around it cannot be given a gradient that is part of a graph.\n"
                f"Detach the arguments, call it under torch.no_grad(), or map {gradient.call} itself."
            )
        values = shard.group.exchange(
            shard, Call(gradient.call, "value", call_site()), found.value, limited=False
        )
        whole = None
        if shard.place == 0:
            value = fused.merge.column(fused.value_spec, values, "the value")
            totals = gradient.finish(found.leaves, [fused.totals.get(k) for k in range(len(axes))])
            whole = value, fused.across(totals, axes, gradient.differentiated(args, kwargs)[1].order())
        call = Call(gradient.call, "result", call_site())
        found.value, grads = shard.group.exchange(shard, call, whole, limited=False)[0]
        if not shard.device.is_cpu:
            home = shard.device.torch_device
            found.value = _streams.bring(found.value, home)
            grads = [g if g is None else _streams.bring(g, home) for g in grads]
        mine = gradient.finish(found.leaves, own)
        return gradient.answer(
            found, [g if axis is None else m for g, m, axis in zip(grads, mine, axes, strict=True)]
        )

    with handled(fused.gradient, handler):
        yield
