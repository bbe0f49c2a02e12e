"""One pmapped function: split, run one shard per worker, merge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch._functorch.apis
from torch import Tensor

from funcpar import distributed, tree
from funcpar._alike import described, digest, identified
from funcpar._asked import recorded
from funcpar._axes import InAxes, paths_of
from funcpar._binding import Argument, Binder
from funcpar._closure import tensors_within
from funcpar._compile import Compilation, Plan
from funcpar._devices import Device, resolve
from funcpar._donation import Donation
from funcpar._frame import Frame
from funcpar._fused import Fused
from funcpar._group import current
from funcpar._joint import call_shards
from funcpar._link import Link
from funcpar._merge import Merge
from funcpar._pace import Pace, Paces
from funcpar._random import Streams
from funcpar._reducing import reducing
from funcpar._span import Signature, Span
from funcpar._split import Split, weights_of
from funcpar._within import gradient_within, specs_of
from funcpar._world import is_transformed, is_transformed_tensor


def _is_torch_func_gradient(fun: Callable[..., Any]) -> bool:
    code = getattr(fun, "__code__", None)
    if code is None or code.co_filename != torch._functorch.apis.__file__:
        return False
    return bool(code.co_qualname.startswith("grad"))


class Mapped:
    """One pmapped function: everything that is known before it is called."""

    def __init__(
        self,
        fun: Callable[..., Any],
        call: str,
        axis_name: Hashable,
        binder: Binder,
        in_axes: InAxes,
        out_axes: Any,
        devices: Any,
        weight: Callable[..., Any] | None,
        compilation: Compilation,
        spans: bool,
        donated: frozenset[int],
    ) -> None:
        self.fun = fun
        self.call = call
        self.axis_name = axis_name
        self.binder = binder
        self.in_axes = in_axes
        self.out_axes = out_axes
        self.devices = devices
        self.weight = weight
        self.compilation = compilation
        self.spans = spans
        self.donated = donated
        self.checked: set[Any] = set()
        self.is_closure_searched = False
        self.paces = Paces()
        self.signatures: dict[Any, Signature] = {}
        self.gradient, self.wrapped = gradient_within(fun)
        self.takes_local_gradient = _is_torch_func_gradient(fun)
        if self.gradient is not None:
            self.value_spec, self.aux_spec = specs_of(call, self.gradient, out_axes)
        if self.wrapped and out_axes not in ("auto", "mean", "sum"):
            raise ValueError(
                f"{call}: out_axes={out_axes!r}, and code around the gradient function makes the output.\n"
                f'Give "mean" or "sum" for the value, or map the gradient function itself.'
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        link = distributed.link() if self.spans and current() is None else None
        if link is None:
            return self._bind(args, kwargs, None)
        with link.call(self.call):
            return self._bind(args, kwargs, link)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], link: Link | None) -> Any:
        arguments = self.binder.bind(args, kwargs)
        if self.donated:
            with self._donation(arguments) as donation:
                return self._call(arguments, link, donation)
        return self._call(arguments, link, None)

    def _call(self, arguments: list[Argument], link: Link | None, donation: Donation | None) -> Any:
        split = self.in_axes.split(arguments, self._devices(), self.devices is not None)
        if link is None:
            split, weights = self._weigh(split)
            span, streams = None, Streams()
        else:
            weights = self._weights(split)
            span = self._spanning(link, arguments, split, weights)
            streams = Streams(link.index << 20)  # Far apart, so that nobody need ask how many others have.
        # Of names and structures alone: a graph keeps this, and must not keep the batch.
        roots, parts = [argument.root for argument in arguments], split.arguments
        name_of = lambda k: paths_of(roots, parts)[k]
        plan = self.compilation.plan(split, name_of)
        frame = Frame(
            split.devices,
            self.axis_name,
            tuple(weights),
            self.call,
            streams,
            funs=(self.fun,),
            name_of=name_of,
            span=span,
            takes_turns=plan.takes_turns,
            pace=self._pace(split) if span is None else None,
        )
        merge = Merge(self.call, split, weights, span, None if frame.is_cpu else self.checked, donation)
        with nullcontext() if span is None else span:
            out = self._run(split, frame, merge, plan)
            if span is not None and not span.has_ended:  # Rows alone came out: all end together even so.
                span.settled((), (), [])
        self.compilation.finish(plan)
        return out

    def _run(self, split: Split, frame: Frame, merge: Merge, plan: Plan) -> Any:
        if self.gradient is None:
            return self._plain(split, frame, merge, self.out_axes, plan)
        compiled = self.compilation.step(plan)
        specs = self.value_spec, self.aux_spec
        fused = Fused(self.gradient, self.fun, split, frame, merge, *specs, compiled)
        if self.wrapped:
            return self._plain(split, frame, merge, "auto", plan, fused)
        return fused.run()

    def _pace(self, split: Split) -> Pace | None:
        """Return what is known of how long such calls take, if any worker may run any shard."""
        # Bits may depend on the number of threads that a worker has.
        if len(split.devices) == 1 or len({(device.is_cpu, device.threads) for device in split.devices}) > 1:
            return None
        return self.paces[tuple(split.rows or ())] if split.devices[0].is_cpu else None

    def _donation(self, arguments: list[Argument]) -> Donation:
        if current() is not None or is_transformed():
            raise ValueError(
                f"{self.call}: donate_argnums in a shard, or under a torch.func transform, would take memory "
                f"from others that use it.\nDonate in the outermost call."
            )
        flat = [tree.leaves_with_path(argument.value, argument.root) for argument in arguments]
        chosen = [argument.position in self.donated for argument in arguments]
        donation = Donation(self.call, flat, chosen)
        if not self.is_closure_searched:  # Later, what it closes over says itself that it was donated.
            donation.refuse_closed_over([self.fun])
            self.is_closure_searched = True
        return donation

    def _devices(self) -> tuple[Device, ...]:
        shard = current()
        if shard is None:
            return resolve(self.devices, self.call)
        # Inside a shard only its own device is free, and by the law one shard is as good as any.
        return (shard.device,)

    def _weigh(self, split: Split) -> tuple[Split, list[float]]:
        """Return the weights of the shards, and one shard if they are all 0."""
        weights = self._weights(split)
        return (split, weights) if any(weights) else (split.undivided(), [1.0])

    def _weights(self, split: Split) -> list[float]:
        if self.weight is not None:
            return weights_of(self.call, self.weight, split)
        return [1.0] * len(split.devices) if split.rows is None else [float(n) for n in split.rows]

    def _spanning(self, link: Link, arguments: list[Argument], split: Split, weights: list[float]) -> Span:
        """Return the call over all processes; gradients of what they share are summed over them."""
        is_recorded = is_transformed() or (
            torch.is_grad_enabled()
            and any(leaf.requires_grad for leaf in split.whole if isinstance(leaf, Tensor))
        )

        def kinds() -> dict[str, str]:
            paths = paths_of([argument.root for argument in arguments], split.arguments)
            shared = zip(paths, split.whole, split.axes, strict=True)
            return {path: described(leaf) for path, leaf, axis in shared if axis is None} | {
                "the results": "part of a graph" if is_recorded else "plain",
                "the function": identified(self.fun),
            }

        # The texts, the same in all processes, are long: this one knows them by what is quick to compare.
        quick = (is_recorded, split.form(), *[
            None if axis is not None else
            (leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else described(leaf)
            for leaf, axis in zip(split.whole, split.axes, strict=True)
        ])  # fmt: skip
        signature = self.signatures.get(quick)
        if signature is None:
            signature = self.signatures[quick] = Signature(digest(kinds()))
        return Span(link, self.call, signature, kinds, weights, is_recorded)

    def _refuse_closed_over(self, frame: Frame) -> None:
        """Refuse what would get the derivative of this process alone."""
        if is_transformed() and any(is_transformed_tensor(tensor) for tensor in tensors_within(frame.funs)):
            raise ValueError(
                f"{self.call}: it closes over a tensor that a torch.func transform or dual level around it "
                f"works on, and over several processes only arguments have a derivative then.\n"
                f"Pass that tensor as an argument."
            )

    def _plain(
        self,
        split: Split,
        frame: Frame,
        merge: Merge,
        out_axes: Any,
        plan: Plan,
        fused: Fused | None = None,
    ) -> Any:
        size, span = len(split.devices), merge.span
        if span is not None:
            self._refuse_closed_over(frame)
            span.open()
            split.share(span.copied)
        specs: list[Any] = [None] * size
        gradients: set[int] = set()

        def body(rank: int, leaves: list[Any]) -> list[Any]:
            args, kwargs = split.rebuild(leaves)
            around = nullcontext() if fused is None or fused.is_local else reducing(fused, leaves)
            fun = self.compilation.function(plan, rank)
            with recorded() as seen, around:
                out, specs[rank] = tree.flatten(fun(*args, **kwargs))
            if rank == 0 and self.takes_local_gradient:
                gradients.update(range(len(out)))
            elif rank == 0 and seen:
                local = {id(grad) for grad, leaf in seen if not split.has_rows(leaf, leaves, rank)}
                gradients.update(k for k, leaf in enumerate(out) if id(leaf) in local)
            return split.marked(leaves, out)

        answers = call_shards(frame, [functools.partial(body, rank) for rank in range(size)], split.leaves)
        answers = [split.unmarked(answer) for answer in answers]
        if merge.donation is not None:
            split.leaves = []  # What is held here could not be given away.
            merge.donation.open(answers)
        outs = [tree.unflatten(spec, answer) for spec, answer in zip(specs, answers, strict=True)]
        if span is not None and is_transformed():
            outs = [tree.map(span.anchored, out) for out in outs]
        if fused is not None:
            merge.refuse_ambiguous(outs)
        return merge.trees(out_axes, outs, gradients)
