"""What torch.nn.parallel calls device ids, as ranks of funcpar's devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

import funcpar as fp

DeviceId: TypeAlias = int | str | torch.device | fp.Device


def rank_of(wanted: Any, call: str) -> int:
    """Return the rank of one device: an index, a name, a torch.device or a fp.Device.

    Raises:
        TypeError: It is of another kind.
        ValueError: There is no such device.
    """
    known = fp.devices()
    if isinstance(wanted, bool) or not isinstance(wanted, DeviceId):
        raise TypeError(
            f"{call}: {wanted!r} is not a device.\nGive an index, a torch.device or a name such as 'cpu:1'."
        )
    if isinstance(wanted, str):
        try:
            wanted = torch.device(wanted)
        except RuntimeError as error:
            raise ValueError(f"{call}: {wanted!r} names no device.\nName one of {_listing()}.") from error
    if isinstance(wanted, fp.Device):
        found = [device.rank for device in known if device == wanted]
    elif isinstance(wanted, int):
        found = [device.rank for device in known if device.rank == wanted]
    else:
        # Virtual CPU devices share one torch.device, so the index of a name is a rank there.
        found = [
            d.rank for d in known
            if d.torch_device.type == wanted.type
            and (wanted.index or 0) == (d.rank if wanted.type == "cpu" else d.torch_device.index)
        ]  # fmt: skip
    if not found:
        raise ValueError(
            f"{call}: there is no device {str(wanted)!r}; there are {_listing()}.\n"
            f"Name one of those, or make more with fp.set_cpu_devices(count)."
        )
    return found[0]


def ranks_of(wanted: Iterable[Any] | None, call: str) -> list[int]:
    """Return the rank of every device named; of all devices for None."""
    if wanted is None:
        return [device.rank for device in fp.devices()]
    if isinstance(wanted, str | torch.device | fp.Device) or not isinstance(wanted, Iterable):
        raise TypeError(f"{call}: {wanted!r} is not a list of devices.\nGive a list, such as [0, 1].")
    return [rank_of(one, call) for one in wanted]


def place_of(wanted: Any, call: str) -> torch.device:
    """Return where tensors on a device live; -1 is the CPU, as in torch."""
    if wanted == -1 and not isinstance(wanted, bool):
        return torch.device("cpu")
    if isinstance(wanted, str | torch.device) and torch.device(wanted) == torch.device("cpu"):
        return torch.device("cpu")
    return fp.devices()[rank_of(wanted, call)].torch_device


def is_in_shard() -> bool:
    """Tell whether this code runs in a shard already, whose device is the only one it may use."""
    try:
        fp.axis_size()
    except fp.UnboundAxisError:
        return False
    return True


def _listing() -> str:
    return ", ".join(f"'{device.torch_device.type}:{device.rank}'" for device in fp.devices())
