"""pmap: what users call, with its arguments checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from funcpar._axes import InAxes
from funcpar._binding import Binder, check_in_axes, check_out_axes, positions
from funcpar._compile import Compilation
from funcpar._mapped import Mapped
from funcpar._within import gradient_within


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
    processes: str = "all",
    compile: bool = False,
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
        compile: Whether each shard runs one graph, made by torch.compile; of ``pmap(value_and_grad(f))``
            forward, backward and weight together. Compiled once per signature (structure, shapes, plain
            numbers), which takes seconds, while no shard runs in this process. Needs a C++ compiler.
        processes: ``"all"``: once :func:`distributed.initialize` has joined several, the axis spans the
            devices of all. Each passes its own rows, any number of them, and the same replicated
            arguments; rows of results stay with their process, everything else is the same in all.
            ``"local"``: the axis ends with this process.
        donate_argnums: Positions of arguments that the caller does not need again: results of the same
            shape, dtype and device may get their memory, and using them after the call raises. If the
            function fails they stay what they were; if its results cannot be merged, those are gone whose
            memory a result had taken before.

    Returns:
        A function with the signature of ``fun``.

    Raises:
        TypeError: An argument is of the wrong kind, or cannot be split into rows.
        ValueError: Mapped arguments disagree on the rows, nothing is mapped, an output cannot be
            merged as asked, or something else uses what is donated.
        ReplicaMismatchError: The shards returned different structures, or different values for
            ``out_axes=None``.
        RuntimeError: An argument was donated to an earlier call.

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
    if not isinstance(compile, bool):
        raise TypeError(f"{call}: compile={compile!r} is not a bool.\nGive True or False.")
    if processes not in ("all", "local"):
        raise ValueError(f'{call}: processes={processes!r} is unknown.\nGive "all" or "local".')
    if isinstance(axis_name, tuple) or not isinstance(axis_name, Hashable):
        raise TypeError(f"{call}: axis_name={axis_name!r} cannot name an axis.\nGive a string.")
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        devices = tuple(devices)
    binder = Binder(fun)
    check_in_axes(call, in_axes, binder)
    check_out_axes(call, out_axes)
    static = positions(call, "static_broadcasted_argnums", static_broadcasted_argnums, binder)
    mapped = Mapped(
        fun,
        call,
        axis_name,
        binder,
        InAxes(call, in_axes, static, min_rows),
        out_axes,
        devices,
        weight,
        Compilation(call, fun, gradient_within(fun)[0], compile),
        processes == "all",
        positions(call, "donate_argnums", donate_argnums, binder),
    )

    @functools.wraps(fun)
    def pmapped(*args: Any, **kwargs: Any) -> Any:
        return mapped(args, kwargs)

    # What wraps a pmapped function copies its attributes, so the mark names its bearer.
    pmapped.__funcpar__ = call, id(pmapped), processes == "all"  # type: ignore[attr-defined]
    return pmapped
