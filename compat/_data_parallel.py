"""DataParallel: a module whose calls are split over devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import funcpar as fp
from compat._devices import DeviceId, is_in_shard, rank_of, ranks_of
from compat._gather import gather
from compat._nodes import has_tensors
from compat._parallel_apply import parallel_apply
from compat._replicas import Policy, run, told
from compat._replicate import replicate
from compat._scatter import scatter_kwargs
from compat._state import add_prefix, with_versions
from compat._wrappers import attribute_through

T = TypeVar("T", bound=nn.Module)


class DataParallel(nn.DataParallel[T]):
    """Wrap a module so that each call is split over devices by rows, and its outputs are joined.

    Every device runs a replica that shares the module's parameters, so gradients add up in the module's own
    ``.grad``. Each row is computed once: inputs are cut into balanced pieces, objects that are no tensors go
    to every replica, and a call without tensors runs once. A 0-d output becomes a vector with one entry per
    replica; see :func:`compat.gather`.

    Names of the wrapped module's attributes and methods can be read through the wrapper; a method so called
    runs on the module itself, see :meth:`apply_method`. A state dict loads with or without ``module.``.

    Args:
        module: The module; also one that holds wrappers, which then pass their input on.
        device_ids: Devices in order, by default all. None at all (``[]``): calls go to the module.
        output_device: Where outputs are joined, by default the first device; -1 is the CPU.
        dim: The dimension of rows.
        buffers: Whose buffers are kept after a call: ``"first"``, the first replica's, or ``"mean"``, the
            mean of floating-point ones weighted by rows.

    Attributes:
        module: The wrapped module.
        device_ids: Ranks of its devices.
        output_device: Rank of the output device.
        dim: The dimension of rows.

    Raises:
        TypeError: ``module`` is no module, or a device is of the wrong kind.
        ValueError: A device is not there, or ``buffers`` is unknown.

    Example:
        >>> import compat, torch
        >>> model = compat.DataParallel(torch.nn.Linear(3, 1), device_ids=[0])
        >>> model(torch.ones(5, 3)).mean().backward()
        >>> model.module.weight.grad
        tensor([[1., 1., 1.]])

    References:
        ``torch.nn.DataParallel``, which it derives from. See docs/compat.md for what differs.
    """

    # Wrappers that torch's class has pickled lack these.
    dim: int = 0
    output_device: Any = None
    buffer_policy: Policy = "first"
    _told: frozenset[str] = frozenset()

    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        buffers: Policy = "first",
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DataParallel: {type(module).__name__} is not an nn.Module.\nFor a function use fp.pmap."
            )
        if buffers not in ("first", "mean"):
            raise ValueError(f'DataParallel: buffers={buffers!r} is unknown.\nGive "first" or "mean".')
        self.module = module
        self.dim = dim
        self.buffer_policy = buffers
        self.device_ids = ranks_of(device_ids, "DataParallel")
        if not self.device_ids:
            return
        wanted = self.device_ids[0] if output_device is None else output_device
        self.output_device = -1 if wanted == -1 else rank_of(wanted, "DataParallel")
        self.src_device_obj = fp.devices()[self.device_ids[0]].torch_device

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on all devices, each on its rows."""
        if torch.compiler.is_compiling():  # Threads are no matter for a graph; the module may be compiled.
            return torch.compiler.disable(self._call)(None, inputs, kwargs)  # type: ignore[no-untyped-call]
        return self._call(None, inputs, kwargs)

    def apply_method(self, name: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Call another method than forward on all devices, each on its rows.

        Args:
            name: The method of the wrapped module.
            *inputs: Its arguments, split as those of forward.
            **kwargs: Its keyword arguments.

        Returns:
            The joined outputs.

        Example:
            >>> import compat, torch
            >>> class Doubling(torch.nn.Module):
            ...     def double(self, x):
            ...         return 2 * x
            >>> compat.DataParallel(Doubling()).apply_method("double", torch.arange(3))
            tensor([0, 2, 4])
        """
        return self._call(name, inputs, kwargs)

    def replicate(self, module: T, device_ids: Sequence[DeviceId]) -> list[T]:
        """Return one replica per device. Called only where a subclass overrides this or parallel_apply."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[DeviceId]) -> Any:
        """Return the positional and the keyword arguments of each replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def parallel_apply(self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call the replicas. Called only where a subclass overrides this or replicate."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of the replicas."""
        return gather(outputs, output_device, self.dim)

    def __getattr__(self, name: str) -> Any:
        return attribute_through(self, name)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the wrapper or of the plain module; see nn.Module."""
        return super().load_state_dict(with_versions(self, state_dict), *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        add_prefix(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _call(
        self,
        method: str | None,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Mapping[str, Tensor] | None = None,
    ) -> Any:
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            invoke = _invoking(method)
            # A trace would take what the replicas compute for constants.
            if not self.device_ids or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                return self._alone(invoke, inputs, kwargs, given)
            # A shard has one device, and by the law one is as good as any number.
            ids = self.device_ids[:1] if is_in_shard() else self.device_ids
            args, kwds = self._scattered(inputs, kwargs, ids)
            if len(ids) == 1:
                return self._alone(invoke, args[0], kwds[0], given)
            if given is None and method is None and self._overrides("replicate", "parallel_apply"):
                replicas = self.replicate(self.module, ids[: len(args)])
                outputs = self.parallel_apply(replicas, args, kwds)
            elif len(args) == 1:
                outputs = [self._alone(invoke, args[0], kwds[0], given)]
            else:
                outputs = self._in_parallel(invoke, args, kwds, given)
            return self.gather(outputs, self.output_device)

    def _scattered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], ids: list[int]) -> tuple[Any, Any]:
        if not self._overrides("scatter") and not has_tensors((inputs, kwargs)):
            return (inputs,), (kwargs,)
        args, kwds = self.scatter(inputs, kwargs, ids)
        if not args and not kwds:
            return ((),), ({},)
        if len(args) != len(kwds):
            raise ValueError(
                f"DataParallel: scatter returned {len(args)} tuples of arguments and {len(kwds)} dicts.\n"
                f"Return one of each per replica."
            )
        return args, kwds

    def _in_parallel(
        self,
        invoke: Callable[..., Any],
        args: Sequence[Any],
        kwds: Sequence[Any],
        given: Mapping[str, Tensor] | None,
    ) -> list[Any]:
        shards = [(tuple(a), k) for a, k in zip(args, kwds, strict=True)]
        outputs, names = run(
            [self.module] * len(shards),
            shards,
            self.device_ids[: len(shards)],
            "DataParallel",
            invoke=invoke,
            policy=self.buffer_policy,
            given=given,
            dim=self.dim,
            weigh=True,
        )
        if not self._told.issuperset(names):
            self._told = self._told.union(names)
            warnings.warn(told(names, "DataParallel"), stacklevel=6)
        return outputs

    def _alone(
        self,
        invoke: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[str, Tensor] | None,
    ) -> Any:
        if given is None:
            return invoke(self.module, args, kwargs)
        outputs, _ = run(
            [self.module], [(tuple(args), kwargs)], [0], "DataParallel", invoke=invoke, given=given
        )
        return outputs[0]

    def _overrides(self, *names: str) -> bool:
        """Tell whether a subclass, this object or a patch has another way of doing one of these."""
        cls = type(self)
        return any(name in self.__dict__ or getattr(cls, name) is not _OWN_WAYS[name] for name in names)


DataParallel.__module__ = "compat"  # The name that pickles hold.
_OWN_WAYS = {
    name: getattr(DataParallel, name) for name in ("scatter", "replicate", "parallel_apply", "gather")
}


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceId] | None = None,
    output_device: DeviceId | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a module once, split over devices by rows: the functional form of :class:`DataParallel`.

    Args:
        module: The module.
        inputs: Its arguments, a tuple, or its one argument; None for none.
        device_ids: Devices in order, by default all.
        output_device: Where outputs are joined, by default the first device; -1 is the CPU.
        dim: The dimension of rows.
        module_kwargs: Its keyword arguments.

    Returns:
        What the module returns, joined.

    Raises:
        TypeError: ``module`` is no module, or a device is of the wrong kind.
        ValueError: A device is not there, or tensors disagree on the rows.

    Example:
        >>> import compat, torch
        >>> compat.data_parallel(torch.nn.Identity(), torch.arange(4))
        tensor([0, 1, 2, 3])
    """
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*args, **(module_kwargs or {}))


def _invoking(method: str | None) -> Callable[..., Any]:
    if method is None:
        return lambda module, args, kwargs: module(*args, **kwargs)
    return lambda module, args, kwargs: getattr(module, method)(*args, **kwargs)
