"""pmap: split, run one shard per worker, merge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch._functorch.apis

from funcpar import tree
from funcpar._axes import InAxes
from funcpar._binding import Argument, Binder, check_in_axes, positions
from funcpar._devices import Device, resolve
from funcpar._donation import Donation
from funcpar._frame import Frame
from funcpar._fused import Fused, gradient_within, specs_of
from funcpar._grad import recorded
from funcpar._group import current
from funcpar._joint import call_shards
from funcpar._merge import Merge, check_out_axes
from funcpar._split import Split, weights_of
from funcpar._world import is_transformed


def pmap(
    fun: Callable[..., Any],
    axis_name: Hashable = None,
    *,
    in_axes: Any = "auto",
    out_axes: Any = "auto",
    devices: Any = None,
    weight: Callable[..., Any] | None = None,
    min_rows: int = 1,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Map a function over the rows of its arguments, one shard of rows per device, all at once.

    The law: where the outputs of ``fun`` follow the rows of the batch, or are scalar means over
    them, ``pmap(fun)(params, batch) == fun(params, batch)``, and so are all its derivatives, on any
    number of devices, for any number of rows. What cannot be merged so is refused, as far as shapes
    tell; :func:`check` finds the rest.

    N rows on D devices are cut into R = min(D, N // min_rows), at least 1, balanced shards, in
    order. Results are on the device of the first shard, own their storage, and wait for nobody.
    ``pmap(value_and_grad(f))`` and ``pmap(grad(f))`` take the gradient in every shard and sum it over
    the shards; ``out_axes`` then describes what ``f`` itself returns.

    Args:
        fun: The function; called with the same structure of arguments, of fewer rows.
        axis_name: Name of the mapped axis, for collectives inside ``fun``.
        in_axes: How arguments are split: an int (along that dimension, which stays), None (every
            shard gets the whole), a sequence with one entry per argument, or a dict by parameter
            name, whose entries are pytree prefixes of the arguments. ``"auto"``: the first parameter
            is replicated, all others are split along dimension 0. 0-d tensors and scalars are never
            split.
        out_axes: How results are merged, a pytree prefix of the output: an int concatenates along
            that dimension; None promises that all shards agree (checked); ``"mean"`` and ``"sum"``
            reduce; ``"stack"`` adds a leading dimension of size R; ``"shards"`` leaves a
            :class:`Shards`; ``"auto"`` concatenates what follows the rows, takes the mean of 0-d
            floats, and takes anything else only if it is equal on all shards.
        devices: A count, or a list of indices, devices or names; all by default. The same device may
            be named several times.
        weight: ``weight(*args, **kwargs)`` of a shard is its weight in every mean, a constant for
            gradients; by default its number of rows. A shard of weight 0 is left out.
        min_rows: The fewest rows worth a shard.
        static_broadcasted_argnums: Positions of arguments that every shard gets whole and as they are.
        donate_argnums: Positions of arguments that the caller does not need again: results of the same
            shape, dtype and device may get their memory, and using them after the call raises. If the
            function fails they stay what they were.

    Returns:
        A function with the signature of ``fun``.

    Raises:
        TypeError: An argument is of the wrong kind, or cannot be split into rows.
        ValueError: Mapped arguments disagree on the rows, nothing is mapped, an output cannot be
            merged as asked, or something else uses what is donated.
        ReplicaMismatchError: The shards returned different structures, or different values for
            ``out_axes=None``.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(4)
        >>> def loss_fn(w, x, y):
        ...     return ((x @ w - y) ** 2).mean()
        >>> w, x, y = torch.ones(3), torch.arange(39.0).reshape(13, 3), torch.zeros(13)
        >>> torch.allclose(fp.pmap(loss_fn)(w, x, y), loss_fn(w, x, y))
        True
        >>> loss, grads = fp.pmap(fp.value_and_grad(loss_fn))(w, x, y)
        >>> torch.allclose(grads, fp.grad(loss_fn)(w, x, y))
        True

    References:
        ``jax.pmap``, where the mapped axis is removed, its size must be the number of devices, and
        means over shards are not weighted.
    """
    name = getattr(fun, "__name__", type(fun).__name__)
    call = f"pmap({name})"
    if not callable(fun):
        raise TypeError(f"pmap: {fun!r} is not callable.\nGive a function, such as pmap(loss_fn).")
    if isinstance(min_rows, bool) or not isinstance(min_rows, int) or min_rows < 1:
        raise ValueError(f"{call}: min_rows={min_rows!r} is not a positive integer.\nGive 1 or more.")
    if weight is not None and not callable(weight):
        raise TypeError(f"{call}: weight={weight!r} is not callable.\nGive a function of the arguments.")
    if isinstance(axis_name, tuple) or not isinstance(axis_name, Hashable):
        raise TypeError(f"{call}: axis_name={axis_name!r} cannot name an axis.\nGive a string.")
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        devices = tuple(devices)
    binder = Binder(fun)
    check_in_axes(call, in_axes, binder)
    check_out_axes(call, out_axes)
    static = positions(call, "static_broadcasted_argnums", static_broadcasted_argnums, binder)
    mapped = _Mapped(
        fun,
        call,
        axis_name,
        binder,
        InAxes(call, in_axes, static, min_rows),
        out_axes,
        devices,
        weight,
        positions(call, "donate_argnums", donate_argnums, binder),
    )

    @functools.wraps(fun)
    def pmapped(*args: Any, **kwargs: Any) -> Any:
        return mapped(args, kwargs)

    # What wraps a pmapped function copies its attributes, so the mark names its bearer.
    pmapped.__funcpar__ = call, id(pmapped)  # type: ignore[attr-defined]
    return pmapped


def _is_torch_func_gradient(fun: Callable[..., Any]) -> bool:
    code = getattr(fun, "__code__", None)
    if code is None or code.co_filename != torch._functorch.apis.__file__:
        return False
    return bool(code.co_qualname.startswith("grad"))


class _Mapped:
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
        self.donated = donated
        self.checked: set[Any] = set()
        self.has_looked = False
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
        arguments = self.binder.bind(args, kwargs)
        if self.donated:
            with self._donation(arguments) as donation:
                return self._run(arguments, donation)
        return self._run(arguments, None)

    def _run(self, arguments: list[Argument], donation: Donation | None) -> Any:
        split = self.in_axes.split(arguments, self._devices(), self.devices is not None)
        split, weights = self._weigh(split)
        frame = Frame(
            split.devices,
            self.axis_name,
            tuple(weights),
            self.call,
            funs=(self.fun,),
            name_of=lambda k: self.in_axes.path(arguments, split, k),
        )
        merge = Merge(self.call, split, weights, None if frame.is_cpu else self.checked, donation)
        if self.gradient is None:
            return self._plain(split, frame, merge, self.out_axes)
        fused = Fused(self.gradient, self.fun, split, frame, merge, self.value_spec, self.aux_spec)
        if self.wrapped:
            return self._plain(split, frame, merge, "auto", fused)
        return fused.run()

    def _donation(self, arguments: list[Argument]) -> Donation:
        if current() is not None or is_transformed():
            raise ValueError(
                f"{self.call}: donate_argnums in a shard, or under a torch.func transform, would take memory "
                f"from others that use it.\nDonate in the outermost call."
            )
        flat = [tree.leaves_with_path(argument.value, argument.root) for argument in arguments]
        chosen = [argument.position in self.donated for argument in arguments]
        donation = Donation(self.call, flat, chosen)
        if not self.has_looked:
            donation.refuse_closed_over([self.fun])
            self.has_looked = True
        return donation

    def _devices(self) -> tuple[Device, ...]:
        shard = current()
        if shard is None:
            return resolve(self.devices, self.call)
        # Inside a shard only its own device is free, and by the law one shard is as good as any.
        return (shard.device,)

    def _weigh(self, split: Split) -> tuple[Split, list[float]]:
        """Return the weights of the shards, and one shard if they are all 0."""
        if self.weight is not None:
            weights = weights_of(self.call, self.weight, split)
            return (split, weights) if any(weights) else (split.undivided(), [1.0])
        if split.rows is None or len(split.rows) == 1:
            return split, [1.0] * len(split.devices)
        weights = [float(n) for n in split.rows]
        return (split, weights) if any(weights) else (split.undivided(), [1.0])

    def _plain(
        self, split: Split, frame: Frame, merge: Merge, out_axes: Any, fused: Fused | None = None
    ) -> Any:
        size = len(split.devices)
        specs: list[Any] = [None] * size
        gradients: set[int] = set()

        def body(rank: int, leaves: list[Any]) -> list[Any]:
            args, kwargs = split.rebuild(leaves)
            reducing = nullcontext() if fused is None or size == 1 else fused.reducing(leaves)
            with recorded() as seen, reducing:
                out, specs[rank] = tree.flatten(self.fun(*args, **kwargs))
            if rank == 0 and self.takes_local_gradient:
                gradients.update(range(len(out)))
            elif rank == 0 and seen:
                local = {id(grad) for grad, leaf in seen if not split.has_rows(leaf, leaves, rank)}
                gradients.update(k for k, leaf in enumerate(out) if id(leaf) in local)
            return split.marked(leaves, out)

        answers = call_shards(frame, [functools.partial(body, rank) for rank in range(size)], split.leaves)
        if merge.donation is not None:
            split.leaves = []
        outs = [
            tree.unflatten(spec, split.unmarked(answer)) for spec, answer in zip(specs, answers, strict=True)
        ]
        if fused is not None:
            merge.refuse_ambiguous(outs)
        return merge.trees(out_axes, outs, gradients)
