"""DistributedDataParallel: a module whose gradients are the mean over processes."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from compat._comm_hook import HookStarter, check_hook
from compat._devices import is_in_shard
from compat._distributed_arguments import (
    REFUSALS,
    Reducer,
    check_arguments,
    check_module,
    group_of,
    refusal,
)
from compat._join import Joining
from compat._lanes import Lanes
from compat._peers import Peers
from compat._sameness import check_sameness, copy_from, take_buffers, tensors_of
from compat._stage import Stage
from compat._stand_ins import Survey
from compat._state import add_prefix, with_versions

_MIB = 1 << 20
_CAP = 8  # MiB. Torch's 25 leaves most models one or two buckets, and little to overlap.
_Base: Any = torch.nn.parallel.DistributedDataParallel


class DistributedDataParallel(_Base):  # type: ignore[misc]
    """Wrap a module so that its gradients are the mean over the processes of a group.

    ``torch.distributed.init_process_group`` is all it needs; the backend may be any. Every process computes
    the loss of its own batch; ``loss.backward()`` leaves in ``.grad`` the mean of all processes' gradients,
    reduced in buckets while backward still runs, in memory of its own. So do ``torch.autograd.grad``,
    ``create_graph=True`` and torch.func's transforms, to any order: the mean is differentiable.

    A parameter that no process used keeps its ``.grad``; one that some used gets the mean, where the others
    count as zero. Neither flag nor restriction goes with that: any branches, several forwards, parameters
    used outside of forward on all ranks, ``requires_grad`` changed between steps. Within a forward the
    module's parameters are tensors that share memory with the parameters; ``isinstance(p, nn.Parameter)``
    holds.

    Args:
        module: The module, equal in structure on all ranks; its values are rank 0's afterwards.
        device_ids: None, or one accelerator that inputs are moved to.
        output_device: Accepted, as torch does.
        dim: Accepted; nothing is split.
        broadcast_buffers: Whether buffers are rank 0's before each forward in training mode, and before the
            first one after it.
        init_sync: Whether modules are compared, and rank 0's values sent, now.
        process_group: By default the group of all processes.
        bucket_cap_mb: Size of buckets in MiB.
        find_unused_parameters: Accepted; not needed.
        check_reduction: Accepted; not needed.
        gradient_as_bucket_view: Accepted; gradients own their memory.
        static_graph: Accepted; not needed.
        delay_all_reduce_named_params: Accepted; these are reduced with the others.
        param_to_hook_all_reduce: Accepted; not needed.
        mixed_precision: Refused: use ``torch.autocast``.
        device_mesh: A mesh of one dimension that is no part of a larger one, in place of the group.
        skip_all_reduce_unused_params: Accepted; not needed.
        bucket_cap_mb_list: Refused: use ``bucket_cap_mb``.
        batched_grad_copy: Accepted; large gradients are not copied, small ones in one go.
        forward_sync_buffers: The newer name of ``broadcast_buffers``.

    Raises:
        TypeError: ``module`` is no module, or one that cannot be wrapped.
        ValueError: An argument is wrong.
        RuntimeError: There is no process group, or no parameter that needs a gradient.
        ReplicaMismatchError: The ranks hold different modules, or make different calls.
        CollectiveTimeoutError: A rank does not come within FUNCPAR_TIMEOUT seconds (default 300).
        ConnectionError: A rank is gone.

    Example:
        >>> import compat, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = compat.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).mean().backward()
        >>> model.module.weight.grad
        tensor([[1., 1.]])
        >>> dist.destroy_process_group()

    References:
        ``torch.nn.parallel.DistributedDataParallel``, which it derives from. See docs/compat.md for what
        differs. A mean over ranks is not that of the rows if ranks have unequal numbers: for that fp.pmap.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        check_arguments(dict(locals()))
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.device = check_module(module, self.parameters_to_ignore, device_ids, output_device)
        self.module = module
        self.process_group = group_of(process_group, device_mesh)
        self.device_type = self.device.type
        self.device_ids = [self.device.index] if device_ids else None
        self.output_device = self.device.index if device_ids else None
        self.dim = dim
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.logger = None
        syncs_at_start = True
        self.forward_sync_buffers = True
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
        elif broadcast_buffers is not None:
            self.forward_sync_buffers = syncs_at_start = broadcast_buffers
        self.bucket_bytes_cap = int((_CAP if bucket_cap_mb is None else bucket_cap_mb) * _MIB)
        self._begin()
        if init_sync:
            tensors = tensors_of(module, self.parameters_to_ignore, syncs_at_start)
            check_sameness(self.peers, tensors)
            copy_from(self.peers, 0, list(tensors.values()))

    def _begin(self) -> None:
        """Make what a copy or a pickle of the wrapper does not take along."""
        name = f"DistributedDataParallel({type(self.module).__name__})"
        self.peers = Peers(self.process_group, self.device, name)
        self.reducer = Reducer()
        self._buffers_may_differ = False
        self._agreed_buffers: set[int] = set()
        me = weakref.ref(self)

        def is_synced() -> bool:
            wrapper = me()
            return wrapper is None or bool(wrapper.require_backward_grad_sync)

        self._stage = Stage(
            self.module, self.parameters_to_ignore, self.peers, self.bucket_bytes_cap, is_synced
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; what it returns is not looked at, so it may be anything."""
        if torch.compiler.is_compiling():  # Hand-made graphs and sessions are nothing for a trace.
            return torch.compiler.disable(self._call)(inputs, kwargs)  # type: ignore[no-untyped-call]
        return self._call(inputs, kwargs)

    def _call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_in_shard():
            raise RuntimeError(
                f"{self.peers.call}: called in a shard, where several calls would run at once.\n"
                f"Wrap one pmap per process, or call the plain module in the shard."
            )
        try:
            found = self._stage.survey()
            self._sync_buffers(found)
            if self.device_ids:
                all_inputs, all_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
                inputs, kwargs = all_inputs[0], all_kwargs[0]
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
                return self._stage.call(found, inputs, kwargs)
        except BaseException as error:
            if "Cannot assign non-leaf Tensor to parameter" in str(error):
                error.add_note(
                    f"In the forward of {self.peers.call} parameters have a graph: tie them in __init__."
                )
            self.peers.say(f"raised {type(error).__name__}: {str(error)[:200]}, in forward")
            raise

    def lanes(self) -> Lanes:
        """Return the graph that gradients pass; join answers with it."""
        return self._stage.lanes()

    def _sync_buffers(self, found: Survey) -> None:
        is_due = self.module.training or self._buffers_may_differ
        if is_due and self.require_backward_grad_sync and self.forward_sync_buffers:
            take_buffers(self.peers, found.buffers, self._agreed_buffers)
            self._buffers_may_differ = False
        self._buffers_may_differ |= self.module.training

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank while inside; the next backward outside averages all there is.

        What counts is where the backward runs; a forward inside does not take rank 0's buffers.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """Return a context for a loop of which ranks may run different numbers of steps.

        A rank that leaves it answers the others' calls until they leave too; then all have the parameters of
        one of the last. Whatever the others do is answered: no_sync, several backwards, torch.autograd.grad.

        Args:
            divide_by_initial_world_size: Whether a mean still divides by all ranks, or by those left.
            enable: False makes it do nothing.
            throw_on_early_termination: Whether the first rank to leave ends the loop of all by RuntimeError.
        """
        return Joining(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a function reduce the buckets; see torch's. Call it once, before the first backward."""
        check_hook(self.peers.call, hook)
        if self._stage.has_hook:
            raise RuntimeError(
                f"{self.peers.call}.register_comm_hook: there is a hook already.\nRegister one hook."
            )
        self._stage.use(HookStarter(self.peers.call, state, hook))

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {
            "world_size": self.peers.size, "rank": self.peers.rank, "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group), "can_set_static_graph": True,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the wrapper or of the plain module; see nn.Module."""
        return super().load_state_dict(with_versions(self, state_dict), *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        add_prefix(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in _NOT_COPIED:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = group_of(None, None)
        self._begin()


_NOT_COPIED = ("process_group", "peers", "reducer", "_stage")
DistributedDataParallel.__module__ = "compat"  # The name that pickles hold.
for _name in REFUSALS:
    setattr(DistributedDataParallel, _name, refusal(_name))
