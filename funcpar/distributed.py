"""Several processes: after :func:`initialize` a pmapped function's axis spans the devices of all.

The engine is torch.distributed, the launcher torchrun or whatever sets its environment. Each process
passes its own rows, and the same replicated arguments.

>>> import funcpar as fp
>>> fp.distributed.process_index(), fp.distributed.process_count()
(0, 1)
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist

from funcpar import tree
from funcpar._alike import check_alike, described
from funcpar._background import in_background
from funcpar._devices import has_accelerator
from funcpar._limits import waiting_time
from funcpar._link import Link, timeout_of
from funcpar._pages import keep_freed

_link: Link | None = None
_is_ours = False


def initialize(
    backend: str | None = None,
    *,
    timeout: float | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Join the other processes, so that pmap spans the devices of all; every process calls this once.

    Reads what torchrun sets in the environment, or takes over the process group that
    ``torch.distributed.init_process_group`` has made. In a program that was started alone (no
    ``WORLD_SIZE`` in the environment, no argument) it does nothing: there is one process.

    Args:
        backend: Of torch.distributed; by default gloo, and NCCL beside it for CUDA tensors.
        timeout: Seconds that a process waits for the others before it raises; by default
            ``FUNCPAR_TIMEOUT``, or 300.
        init_method: Where the processes meet, ``"tcp://host:port"`` say; by default ``"env://"``.
        rank: Which process this is; by default ``RANK`` of the environment.
        world_size: How many there are; by default ``WORLD_SIZE`` of the environment.

    Raises:
        RuntimeError: It was called before, torch.distributed is missing, or torchrun restarted the program in
            a way that keeps the processes from meeting.
        ValueError: The environment is incomplete, or ``timeout`` is not positive.

    Example:
        >>> import funcpar as fp
        >>> fp.distributed.initialize()  # Started alone, not by torchrun: one process.
        >>> fp.distributed.process_count()
        1

    References:
        ``jax.distributed.initialize``, which needs a coordinator's address.
    """
    global _link, _is_ours
    if _link is not None:
        raise RuntimeError(
            "initialize: the processes are joined already.\nCall it once, or call shutdown() before."
        )
    seconds = _seconds(timeout)
    if not dist.is_available():
        raise RuntimeError("initialize: this torch was built without torch.distributed.\nUse another build.")
    if not dist.is_initialized():
        if init_method is None and rank is None and world_size is None and "WORLD_SIZE" not in os.environ:
            return
        _check_environment(init_method, rank, world_size)
        _check_restart(init_method)
        dist.init_process_group(
            backend,
            init_method=init_method or "env://",
            timeout=timeout_of(seconds),
            rank=-1 if rank is None else rank,
            world_size=-1 if world_size is None else world_size,
        )
        _is_ours = True
    # Groups of our own: what the user sends over theirs must not come between.
    with in_background():
        words = dist.new_group(backend="gloo", timeout=timeout_of(seconds))
    tensors = dist.new_group(timeout=timeout_of(seconds)) if has_accelerator() else words
    _link = Link(words, tensors, seconds)
    keep_freed()
    # Torch's own groups abort the process now and then if they are left to the interpreter's end.
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the other processes; whoever waits for this one then is told. Pmaps keep to this process.

    A process group that the user made stays. At the end of the program this is done if it was not before.

    Example:
        >>> import funcpar as fp
        >>> fp.distributed.shutdown()  # Nothing was joined: nothing happens.

    References:
        ``jax.distributed.shutdown``.
    """
    global _link, _is_ours
    atexit.unregister(shutdown)
    link, _link = _link, None
    if link is not None:
        link.close("shutdown()")
    if _is_ours:
        _is_ours = False
        dist.destroy_process_group()


def link() -> Link | None:
    """Return the line to the other processes, None where there are none (internal)."""
    return None if _link is None or _link.count == 1 else _link


def process_index() -> int:
    """Return which process this is, from 0; 0 if it is alone.

    Example:
        >>> import funcpar as fp
        >>> fp.distributed.process_index()
        0

    References:
        ``jax.process_index``.
    """
    return 0 if _link is None else _link.index


def process_count() -> int:
    """Return how many processes were joined; 1 if it is alone.

    Example:
        >>> import funcpar as fp
        >>> fp.distributed.process_count()
        1

    References:
        ``jax.process_count``.
    """
    return 1 if _link is None else _link.count


def broadcast(values: Any, source: int = 0) -> Any:
    """Return one process's tree in all processes: the same initial parameters, say.

    Args:
        values: A tree of tensors and of what pickle takes; structure, shapes and dtypes must be the
            same in all processes.
        source: Whose values.

    Returns:
        A new tree. Every tensor is on the device of this process's own leaf, and own memory.

    Raises:
        ReplicaMismatchError: Structures, shapes or dtypes differ; all differing leaves are named.
        ValueError: There is no such process.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.distributed.broadcast({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}

    References:
        ``jax.experimental.multihost_utils.broadcast_one_to_all``.
    """
    if not 0 <= source < process_count():
        raise ValueError(
            f"broadcast: source={source}, and there are {process_count()} processes.\n"
            f"Give a number from 0 to {process_count() - 1}."
        )
    leaves, spec = tree.flatten(values)
    if _link is None:
        return tree.map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, values
        )
    link = _link
    with link.call("broadcast"):
        paths = spec.paths("values")
        kinds = {
            path: described(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__qualname__
            for path, leaf in zip(paths, leaves, strict=True)
        }
        check_alike(link, "broadcast", kinds)
        order = spec.order()
        mine = [leaves[k] for k in order] if link.index == source else None
        theirs = link.values("broadcast", mine)[source]
        answer: list[Any] = [None] * len(leaves)
        for k, leaf in zip(order, theirs, strict=True):
            answer[k] = leaf
            if isinstance(leaf, torch.Tensor):
                answer[k] = leaf.detach().to(leaves[k].device, copy=link.index == source)
        return tree.unflatten(spec, answer)


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return waiting_time()
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(
            f"initialize: timeout={timeout!r} is not a positive number of seconds.\nGive one, such as 300."
        )
    return float(timeout)


def _check_environment(init_method: str | None, rank: int | None, world_size: int | None) -> None:
    wanted = [] if init_method is not None else ["MASTER_ADDR", "MASTER_PORT"]
    wanted += ["RANK"] * (rank is None) + ["WORLD_SIZE"] * (world_size is None)
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise ValueError(
            f"initialize: the environment lacks {', '.join(missing)}.\n"
            f"Start the program with torchrun, set them, or give init_method, rank and world_size."
        )


def _check_restart(init_method: str | None) -> None:
    """Refuse what torch would wait for in vain: see pytorch issue 135712."""
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if init_method is None and is_shared and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise RuntimeError(
            "initialize: torchrun has restarted this program, and the store that they share still holds the "
            "addresses of the processes before.\nSet TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and "
            "start it with --standalone or --rdzv-backend c10d."
        )
