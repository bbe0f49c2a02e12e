"""replicate: modules that share the parameters of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from compat._devices import DeviceId, ranks_of
from compat._replicas import Subject

T = TypeVar("T", bound=nn.Module)


def replicate(network: T, devices: Sequence[DeviceId], detach: bool = False) -> list[T]:
    """Return one replica of a module per device.

    A replica has all parameters of the module, as tensors that are no leaves and send their gradients to
    the module's own. On CPU they share its memory. The first replica has the module's own buffers, the
    others have copies. What a replica's forward writes to itself stays on the replica.

    Args:
        network: The module.
        devices: One per replica; the same one may be there several times.
        detach: Whether the parameters send no gradients.

    Returns:
        A list of modules of the same class.

    Raises:
        TypeError: The module cannot be copied: a ScriptModule, or one that has seen no input yet.
        ValueError: A device is not there.

    Example:
        >>> import compat, torch
        >>> model = torch.nn.Linear(3, 2)
        >>> first, second = compat.replicate(model, [0, 0])
        >>> second(torch.ones(1, 3)).sum().backward()
        >>> model.weight.grad
        tensor([[1., 1., 1.],
                [1., 1., 1.]])

    References:
        ``torch.nn.parallel.replicate``, whose replicas have no parameters().
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"replicate: {type(network).__name__} is not an nn.Module.\nGive a module.")
    ranks = ranks_of(devices, "replicate")
    if not ranks:
        return []
    subject = Subject(network)

    def shared(tensor: Tensor) -> Tensor:
        return tensor.detach() if detach or not tensor.requires_grad else tensor.view_as(tensor)

    replicas: list[T] = []
    for place in range(len(ranks)):
        params = {name: shared(param) for name, param in subject.params.items()}
        replica, _ = subject.apply(params, subject.buffers, lambda shell: shell)
        if place == 0:
            for module, copy in zip(network.modules(), replica.modules(), strict=True):
                copy._buffers.update(module._buffers)
        replicas.append(replica)
    return replicas
