"""parallel_apply: modules and functions, each on its own input, at the same time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import funcpar as fp
from compat._devices import DeviceId, rank_of, ranks_of
from compat._replicas import run, told

Modules: TypeAlias = Callable[..., Any] | Sequence[Callable[..., Any]]
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def parallel_apply(
    modules: Modules,
    inputs: Iterable[Any],
    kwargs_tup: Iterable[dict[str, Any]] | None = None,
    devices: Sequence[DeviceId | None] | None = None,
) -> list[Any]:
    """Call each module on its input, module i on devices[i], all at once.

    One module or function takes any iterable of inputs, a DataLoader say, and keeps its order; no more
    inputs are in flight than there are devices. A tuple or list is unpacked as positional arguments;
    anything else is the one argument. A module that is there several times shares its parameters, so their
    gradients are summed; its buffers and attributes are then those of the first call.

    Args:
        modules: A list of callables or a ModuleList; or one module (a Sequential too) or function.
        inputs: One input per module; any number for one module.
        kwargs_tup: Keyword arguments of each call.
        devices: One per module, None for any; by default all in turn. For one module: those to use.

    Returns:
        A list of outputs, one per input.

    Raises:
        ValueError: Lengths disagree, or a device is not there.
        TypeError: An argument is of another kind.

    Example:
        >>> import compat, torch
        >>> double = lambda x, by=2: x * by
        >>> compat.parallel_apply(double, [torch.tensor(1), torch.tensor(2)], devices=[0])
        [tensor(2), tensor(4)]

    References:
        ``torch.nn.parallel.parallel_apply``, which needs an accelerator, starts a thread per call, and
        loses the autocast dtype, inference mode and the types of exceptions.
    """
    if isinstance(inputs, Tensor | Mapping | str) or not isinstance(inputs, Iterable):
        raise TypeError(
            f"parallel_apply: inputs is a {type(inputs).__name__}, not a list of inputs.\n"
            f"Cut it first: parallel_apply(modules, scatter(inputs, devices), devices=devices)."
        )
    written: dict[str, None] = {}
    if _is_one(modules):
        outputs = _one_for_all(modules, _calls(inputs, kwargs_tup), devices, written)  # type: ignore[arg-type]
    else:
        outputs = _one_for_each(list(modules), list(_calls(inputs, kwargs_tup)), devices, written)  # type: ignore[arg-type]
    if written:
        warnings.warn(told(list(written), "parallel_apply"), stacklevel=2)
    return outputs


def _one_for_each(
    funs: list[Callable[..., Any]],
    calls: list[Call],
    devices: Sequence[DeviceId | None] | None,
    written: dict[str, None],
) -> list[Any]:
    if len(funs) != len(calls):
        raise ValueError(
            f"parallel_apply: {len(funs)} modules and {len(calls)} inputs.\nGive one input per module."
        )
    if devices is not None and len(devices) != len(funs):
        raise ValueError(
            f"parallel_apply: {len(funs)} modules and {len(devices)} devices.\nGive one device per module."
        )
    count = len(fp.devices())
    named: Sequence[DeviceId | None] = [None] * len(funs) if devices is None else devices
    ranks = [k % count if one is None else rank_of(one, "parallel_apply") for k, one in enumerate(named)]
    return _apply(funs, calls, ranks, written)


def _is_one(modules: Any) -> bool:
    if isinstance(modules, nn.Module):
        # A ModuleList has no forward, and is a list here.
        return type(modules).forward is not nn.Module.forward or not isinstance(modules, Iterable)
    if callable(modules) or isinstance(modules, Iterable):
        return callable(modules)
    raise TypeError(
        f"parallel_apply: modules is a {type(modules).__name__}.\nGive a module, a function, or a list."
    )


def _one_for_all(
    fun: Callable[..., Any],
    calls: Iterator[Call],
    devices: Sequence[DeviceId | None] | None,
    written: dict[str, None],
) -> list[Any]:
    named = [device for device in devices or () if device is not None]
    ranks = ranks_of(named or None, "parallel_apply")
    outputs: list[Any] = []
    while chunk := list(islice(calls, len(ranks))):
        outputs += _apply([fun] * len(chunk), chunk, ranks[: len(chunk)], written)
    return outputs


def _apply(
    funs: list[Callable[..., Any]], calls: list[Call], ranks: list[int], written: dict[str, None]
) -> list[Any]:
    if len(funs) == 1:
        args, kwargs = calls[0]
        return [funs[0](*args, **kwargs)]
    outputs, names = run(funs, calls, ranks, "parallel_apply")
    written.update(dict.fromkeys(names))
    return outputs


def _calls(inputs: Iterable[Any], kwargs_tup: Iterable[dict[str, Any]] | None) -> Iterator[Call]:
    """Yield the arguments of each call, as they are asked for."""
    if kwargs_tup is None:
        for given in inputs:
            yield _positional(given), {}
        return
    rest = iter(kwargs_tup)
    count = 0
    for count, given in enumerate(inputs, 1):
        kwargs = next(rest, None)
        if kwargs is None:
            raise ValueError(
                f"parallel_apply: there are more inputs than the {count - 1} kwargs_tup.\n"
                f"Give one dict per input."
            )
        if not isinstance(kwargs, dict):
            raise TypeError(
                f"parallel_apply: kwargs_tup[{count - 1}] is a {type(kwargs).__name__}, not a dict.\n"
                f"A criterion takes pairs: parallel_apply(criterion, list(zip(outputs, targets)))."
            )
        yield _positional(given), kwargs
    if next(rest, None) is not None:
        raise ValueError(
            f"parallel_apply: there are more kwargs_tup than the {count} inputs.\nGive one dict per input."
        )


def _positional(given: Any) -> tuple[Any, ...]:
    is_unpacked = isinstance(given, list | tuple) and not isinstance(given, PackedSequence)
    return tuple(given) if is_unpacked else (given,)
