"""What an autograd graph reaches, and who else can see a gradient's memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Gradient: TypeAlias = Tensor | None

# Types that are nothing but their values: of others, a copy or an end may not be what it seems.
PLAIN_TYPES: tuple[type[Tensor], ...] = (Tensor, torch.nn.Parameter)

# A leaf under every exchange between shards, so that a backward can be made to run it.
ROOT = torch.zeros((), requires_grad=True)


def apply(function: type[torch.autograd.Function], *args: Any) -> Sequence[Tensor]:
    """Apply an autograd Function with several outputs."""
    outs: Sequence[Tensor] = function.apply(*args)  # type: ignore[no-untyped-call]
    return outs


def backward(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    keep: bool = False,
    create: bool = False,
) -> list[Gradient]:
    """Run backward: ``torch.autograd.grad``, without its checks of what users pass.

    For a small model they take as long as a layer.
    """
    run: Any = torch.autograd.graph._engine_run_backward
    return list(
        run(tuple(outs), tuple(cotangents), keep or create, create, tuple(ins), True, accumulate_grad=False)
    )


def reach(outs: Sequence[Tensor], until: Sequence[Tensor] = ()) -> tuple[set[Any], list[Tensor]]:
    """Return the nodes and the leaves of the graph that made ``outs``, no further than ``until``."""
    ends = {tensor.grad_fn for tensor in until}
    nodes = [out.grad_fn for out in outs if out.grad_fn is not None and out.grad_fn not in ends]
    leaves = [out for out in outs if out.requires_grad and out.grad_fn is None]
    seen: set[Any] = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is not None and node not in seen and node not in ends:
                seen.add(node)
                nodes.append(node)
                if not node.next_functions and hasattr(node, "variable"):
                    leaves.append(node.variable)
    return seen, leaves


def closed_over(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that the graph of ``outs`` reaches and that are not among ``ins``."""
    mine = {id(tensor) for tensor in ins} | {id(ROOT)}
    return list({id(leaf): leaf for leaf in reach(outs, ins)[1] if id(leaf) not in mine}.values())


def refuse_hidden(outs: Sequence[Tensor]) -> None:
    """Refuse a graph in which something that looks unused may be used out of sight.

    Raises:
        RuntimeError: There is a reentrant checkpoint, whose own graph is made in backward only.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in reach(outs)[0]):
        raise RuntimeError(
            "a checkpoint with use_reentrant=True hides what its function depends on, so that its gradient "
            "would be zero.\nCheckpoint with use_reentrant=False."
        )


def explain_compiled(error: RuntimeError) -> None:
    """Add the fix to torch's error for a second derivative of a compiled function."""
    if "does not currently support double backward" in str(error):
        error.add_note("Compiled code has first derivatives alone: leave torch.compile or compile=True out.")


def owned(grads: Sequence[Gradient]) -> list[bool]:
    """Tell for each gradient of a list whether only that list can see its memory."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # What is made here may be wrapped.
        return [False] * len(grads)
    # What is counted for tensors that only a list knows, one with its own memory and one a view;
    # counted here, since whatever evaluates frames (torch.compile does) may add references.
    alone = [_owners(tensor) for tensor in [torch.empty(1, 1), torch.empty(1, 1).t()]]
    return [grad is not None and _is_plain(grad) and _owners(grad) in alone for grad in grads]


def own_all(grads: list[Gradient]) -> list[Gradient]:
    """Return plain, writable gradients that share memory with nothing."""
    mine = owned(grads)
    return [
        grad if is_mine or grad is None else grad.clone() for grad, is_mine in zip(grads, mine, strict=True)
    ]


def _is_plain(grad: Tensor) -> bool:
    if is_wrapped(grad) or grad.layout is not torch.strided or grad.requires_grad or grad.is_inference():
        return False
    if not grad.untyped_storage().resizable():  # Memory of somebody else, such as a numpy array.
        return False
    return grad.is_contiguous() or (grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last))


class GradientHook:
    """A hook of a leaf that tells its gradient, and whether nobody but autograd can see that memory.

    Attributes:
        backward: Its first entry is the number of the backward whose gradient is told, once that runs.
    """

    __slots__ = ("_tell", "backward")

    def __init__(self, tell: Callable[[Tensor, bool], Any]) -> None:
        self._tell = tell
        self.backward: Sequence[int] = ()

    def __call__(self, grad: Tensor) -> None:
        """Be called by autograd when the gradient is complete."""
        if torch._C._current_graph_task_id() not in self.backward[:1]:
            return  # A backward within that one, whose gradient is its caller's.
        is_own = grad.layout is torch.strided and _owners_in_hook(grad) in _owners_alone() and _is_plain(grad)
        self._tell(grad, is_own)


def _owners_in_hook(grad: Tensor) -> tuple[int, ...]:
    # Autograd's own references count too: two leaves may be about to get one tensor.
    return grad._use_count(), *_owners(grad)  # type: ignore[attr-defined]


@functools.cache
def _owners_alone() -> tuple[tuple[int, ...], ...]:
    """Return what is counted in a hook for gradients that autograd alone knows: plain ones, and views."""
    found: list[tuple[int, ...]] = []

    class Counting(GradientHook):
        def __call__(self, grad: Tensor) -> None:
            owners = _owners_in_hook(grad)
            found.append(owners)

    with torch.inference_mode(False), torch.enable_grad():
        w = torch.zeros(3, 2, requires_grad=True)
        for out in (
            (w * torch.ones(3, 2)).sum(),
            torch.nn.functional.linear(torch.ones(4, 2), w).square().sum(),
        ):
            handle = w.register_hook(Counting(print))  # type: ignore[no-untyped-call]
            torch.autograd.grad(out, [w])
            handle.remove()
    return tuple(found)


def _owners(grad: Tensor) -> tuple[int, ...]:
    """Count who refers to a gradient, to its memory, and, if it is a view, to its base."""
    counts = [sys.getrefcount(grad), torch._C._storage_Use_Count(grad.untyped_storage()._cdata)]
    if grad._is_view():
        base: Any = grad._base
        counts += [sys.getrefcount(base), base._use_count()]
    return tuple(counts)


def is_smooth(tensor: Tensor) -> bool:
    """Tell whether entries are numbers that a derivative can be taken of: float or complex ones."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_differentiable(leaf: Any) -> bool:
    """Tell whether a leaf gets a gradient."""
    return isinstance(leaf, Tensor) and is_smooth(leaf)


def innermost(tensor: Tensor) -> Tensor:
    """Return what a tensor wraps, below all torch.func transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_wrapped(tensor: Tensor) -> bool:
    """Tell whether a torch.func transform, or a vectorized backward, wraps a tensor."""
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def storages(leaves: Iterable[Any]) -> set[int]:
    """Return the memories that plain tensors are in; of what is sparse or wrapped nothing is known."""
    return {
        leaf.untyped_storage()._cdata
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not is_wrapped(leaf)
    }


def shares_memory(tensor: Tensor, others: Callable[[], Collection[int]]) -> bool:
    """Tell whether a tensor's memory is one of the others, which are asked for only if it is shared."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # Sparse, or wrapped by a transform.
        return False
    if torch._C._storage_Use_Count(storage._cdata) <= 2:  # The tensor's, and that of `storage`.
        return False
    return storage._cdata in others()


def holds_tensors(leaf: Any) -> bool:
    """Tell whether a leaf that is no tensor holds some, as an unregistered container does."""
    if isinstance(leaf, np.ndarray):
        return True
    if isinstance(leaf, dict):
        return any(isinstance(item, Tensor) or holds_tensors(item) for item in leaf.values())
    if isinstance(leaf, list | tuple | set | frozenset):
        return any(isinstance(item, Tensor) or holds_tensors(item) for item in leaf)
    return False
