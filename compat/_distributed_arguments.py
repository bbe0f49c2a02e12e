"""What may be given to DistributedDataParallel, and what of torch's is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_NAME = "DistributedDataParallel"

# Methods of torch's class that reach into its reducer, with what to do instead.
REFUSALS = {
    "join_hook": "Use `with model.join():`, which also answers the backward of every other wrapper call.",
    "_register_builtin_comm_hook": "Use register_comm_hook with a hook of torch.distributed.algorithms.",
    "_register_fused_optim": "Step the optimizer after the backward.",
    "_register_buffer_comm_hook": "Reduce buffers yourself, and give forward_sync_buffers=False.",
    "_update_process_group": "Make a new wrapper on the new group.",
    "_set_sparse_metadata": "It is not needed.",
}


def check_arguments(given: dict[str, Any]) -> None:
    """Refuse what is not rebuilt, and what is wrong by itself.

    Raises:
        NotImplementedError: An argument is not rebuilt.
        TypeError: The module is none.
        ValueError: Arguments contradict each other.
    """
    module = given["module"]
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_NAME}: {type(module).__name__} is not an nn.Module.\nGive a module.")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{_NAME}: a ScriptModule keeps its parameters where they cannot be stood in for.\n"
            f"Wrap the module that was scripted."
        )
    for name, fix in (
        ("mixed_precision", "run forward under torch.autocast"),
        ("bucket_cap_mb_list", "give bucket_cap_mb, one size for all"),
    ):
        if given[name] is not None:
            raise NotImplementedError(f"{_NAME}: {name} is not supported.\nLeave it out, and {fix}.")
    pair = (given["delay_all_reduce_named_params"], given["param_to_hook_all_reduce"])
    if (pair[0] is None) != (pair[1] is None):
        raise ValueError(
            f"{_NAME}: delay_all_reduce_named_params and param_to_hook_all_reduce go together.\n"
            f"Give both or neither; here they change nothing."
        )
    if given["process_group"] is not None and given["device_mesh"] is not None:
        raise ValueError(f"{_NAME}: process_group and device_mesh both name the ranks.\nGive one of them.")
    cap = given["bucket_cap_mb"]
    if cap is not None and cap <= 0:
        raise ValueError(f"{_NAME}: bucket_cap_mb={cap} holds nothing.\nGive a size in MiB, or None.")


def check_module(module: nn.Module, ignored: set[str], device_ids: Any, output_device: Any) -> torch.device:
    """Return the device of a module's parameters.

    Raises:
        RuntimeError: There is no parameter that needs a gradient, or one without a shape.
        ValueError: Devices are wrong.
    """
    params = {name: p for name, p in module.named_parameters() if name not in ignored}
    lazy = [name for name, p in params.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"{_NAME}: {', '.join(lazy)} have no shape yet.\nCall the module once before you wrap it."
        )
    if not any(p.requires_grad for p in params.values()):
        raise RuntimeError(
            f"{_NAME}: no parameter of {type(module).__name__} needs a gradient.\nCall the module without it."
        )
    devices = list(dict.fromkeys(p.device for p in params.values()))
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"{_NAME}: parameters are on {', '.join(map(str, devices))}.\nMove the module to one device type."
        )
    is_plain = devices[0].type == "cpu" or len(devices) > 1
    if (device_ids or output_device) and (is_plain or len(device_ids or ()) > 1):
        raise ValueError(
            f"{_NAME}: device_ids={device_ids}, output_device={output_device}, and parameters on "
            f"{', '.join(map(str, devices))}.\nLeave both out, or name the one accelerator of the module."
        )
    return devices[0]


def group_of(process_group: Any, device_mesh: Any) -> Any:
    """Return the process group to use.

    Raises:
        RuntimeError: There is none.
        NotImplementedError: The mesh has several dimensions, or is part of a larger one.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{_NAME}: there is no process group.\n"
            f"Call torch.distributed.init_process_group() first, under torchrun say."
        )
    if device_mesh is None:
        return dist.group.WORLD if process_group is None else process_group
    if device_mesh.ndim != 1 or device_mesh._get_root_mesh() != device_mesh:
        raise NotImplementedError(
            f"{_NAME}: device_mesh={device_mesh} is not one dimension of its own.\n"
            f"Give process_group=device_mesh.get_group(name) for data parallelism alone."
        )
    return device_mesh.get_group(mesh_dim=0)


def refusal(name: str) -> Callable[..., Any]:
    """Return a method that says that it is not rebuilt."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{_NAME}.{name} is not supported.\n{REFUSALS[name]}")

    refuse.__name__ = name
    return refuse


class Reducer:
    """What trainers prepare on torch's reducer. Here nothing needs preparing, so nothing happens."""

    def prepare_for_backward(self, outputs: Any = ()) -> None:
        """Accept torch's notice that a backward comes."""

    def prepare_for_forward(self) -> None:
        """Accept torch's notice that a forward comes."""

    def _rebuild_buckets(self) -> bool:
        return False
