"""Devices: what a shard runs on, named by rank.

A CPU tensor's device has no index, so a device is told apart by its rank and never by
``tensor.device``. Where there is no accelerator the devices are virtual CPU devices: worker
threads that share memory and split the intra-op threads between them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """One place where a shard runs.

    Attributes:
        rank: Position in :func:`devices`, from 0.
        torch_device: Where tensors of its shards live.
        threads: Intra-op threads of its worker.
        is_cpu: Whether shards of this device share memory with the caller.

    Example:
        >>> import funcpar as fp
        >>> fp.set_cpu_devices(2, threads_per_device=1)
        >>> fp.devices()[1]
        cpu[1]
    """

    rank: int
    torch_device: torch.device
    threads: int = 1
    is_cpu: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_cpu", self.torch_device.type == "cpu")

    def __repr__(self) -> str:
        return f"{self.torch_device.type}[{self.rank}]"


_lock = threading.Lock()
_devices: tuple[Device, ...] | None = None


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # The thread that held it does not exist in the child.


os.register_at_fork(after_in_child=_after_fork)


def devices() -> tuple[Device, ...]:
    """Return the devices of this process, in rank order.

    Every accelerator that ``torch.accelerator`` reports; where there is none, virtual CPU devices:
    ``FUNCPAR_CPU_DEVICES`` of them, by default one per thread of ``torch.get_num_threads()``, each
    with its share of those threads. The answer stays the same until :func:`set_cpu_devices`.

    Returns:
        D devices, D >= 1.

    Raises:
        ValueError: ``FUNCPAR_CPU_DEVICES`` is not a positive integer.

    Example:
        >>> import funcpar as fp
        >>> fp.set_cpu_devices(4)
        >>> fp.devices()
        (cpu[0], cpu[1], cpu[2], cpu[3])

    References:
        ``jax.devices``; JAX makes virtual CPU devices with ``XLA_FLAGS`` or ``jax_num_cpu_devices``.
    """
    global _devices
    if _devices is None:
        with _lock:
            if _devices is None:
                _devices = _find()
    return _devices


def set_cpu_devices(count: int, threads_per_device: int | None = None) -> None:
    """Make the devices of this process ``count`` virtual CPU devices, beside an accelerator too.

    Args:
        count: How many, at least 1.
        threads_per_device: Intra-op threads of each; by default an equal share of
            ``torch.get_num_threads()``, at least 1. The caller's own setting is untouched.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is less than 1.

    Example:
        >>> import funcpar as fp
        >>> fp.set_cpu_devices(3)
        >>> len(fp.devices())
        3
    """
    global _devices
    count = _positive("set_cpu_devices", "count", count)
    if threads_per_device is not None:
        threads_per_device = _positive("set_cpu_devices", "threads_per_device", threads_per_device)
    with _lock:
        _devices = _virtual(count, threads_per_device)


def has_accelerator() -> bool:
    """Tell whether torch reports an accelerator, used or not."""
    return torch.accelerator.is_available()


def resolve(wanted: Any, call: str) -> tuple[Device, ...]:
    """Return the devices that ``devices=`` names.

    ``wanted`` is None (all), a count, or an index, Device, torch.device or string, or an iterable
    of those. The same device may be named several times.
    """
    known = devices()
    if wanted is None:
        return known
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if not 1 <= wanted <= len(known):
            raise ValueError(
                f"{call}: devices={wanted} asks for {wanted} devices, and there are {len(known)}: "
                f"{_listing(known)}.\nGive a count from 1 to {len(known)}, or make more with "
                f"fp.set_cpu_devices({max(wanted, 1)})."
            )
        return known[:wanted]
    if isinstance(wanted, str | torch.device | Device):
        wanted = (wanted,)
    if isinstance(wanted, bool) or not isinstance(wanted, Iterable):
        raise TypeError(
            f"{call}: devices={wanted!r} is no count, device or list of devices.\n"
            f"Give a count (devices=2), or a list such as devices=[0, 1] or devices=['cpu:0', 'cpu:1']."
        )
    chosen = tuple(_find_one(one, known, call) for one in wanted)
    if not chosen:
        raise ValueError(f"{call}: devices is empty.\nName at least one of {_listing(known)}.")
    return chosen


def _find_one(wanted: Any, known: tuple[Device, ...], call: str) -> Device:
    if isinstance(wanted, bool) or not isinstance(wanted, int | str | torch.device | Device):
        raise TypeError(
            f"{call}: {wanted!r} in devices is not a device.\n"
            f"Give an index, a fp.Device, a torch.device or a string, one of {_listing(known)}."
        )
    if isinstance(wanted, Device):
        match = [d for d in known if d.rank == wanted.rank and d.torch_device == wanted.torch_device]
    elif isinstance(wanted, int):
        match = [d for d in known if d.rank == wanted]
    else:
        match = _named(wanted, known, call)
    if not match:
        raise ValueError(
            f"{call}: there is no device {wanted!r}; there are {_listing(known)}.\n"
            f"Name one of those, or make more with fp.set_cpu_devices(count)."
        )
    return match[0]


def _named(wanted: str | torch.device, known: tuple[Device, ...], call: str) -> list[Device]:
    """A name's index is a rank for virtual CPU devices, and torch's own index for accelerators."""
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ValueError(
            f"{call}: {wanted!r} is no device name; there are {_listing(known)}.\n"
            f"Write a type and an index, such as 'cpu:1'."
        ) from error
    index = device.index or 0
    return [
        d for d in known
        if d.torch_device.type == device.type
        and index == (d.rank if device.type == "cpu" else d.torch_device.index)
    ]  # fmt: skip


def accelerator_kind() -> str | None:
    """Return the type of device that this torch was built for beside the CPU, present or not."""
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else kind.type


def _find() -> tuple[Device, ...]:
    given = os.environ.get("FUNCPAR_CPU_DEVICES")
    if given is not None:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(
                f"FUNCPAR_CPU_DEVICES={given!r} is not a positive integer.\n"
                f"Set it to the number of virtual CPU devices, or unset it."
            )
        return _virtual(int(given), None)
    if has_accelerator():
        kind = accelerator_kind()
        assert kind is not None
        return tuple(Device(i, torch.device(kind, i)) for i in range(torch.accelerator.device_count()))
    return _virtual(torch.get_num_threads(), None)


def _virtual(count: int, threads: int | None) -> tuple[Device, ...]:
    share = threads or max(1, torch.get_num_threads() // count)
    return tuple(Device(rank, torch.device("cpu"), share) for rank in range(count))


def _positive(call: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{call}: {name}={value!r} is not an integer.\nGive a positive integer.")
    if value < 1:
        raise ValueError(f"{call}: {name}={value} is less than 1.\nGive a positive integer.")
    return value


def _listing(known: tuple[Device, ...]) -> str:
    return ", ".join(f"'{d.torch_device.type}:{d.rank}'" for d in known)
