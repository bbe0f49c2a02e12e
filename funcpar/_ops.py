"""Which of torch's ops draw random numbers, and what takes a call of one on below BackendSelect."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

Op: TypeAlias = torch._ops.OpOverload[..., Any]
_CHANCES = {"p", "dropout_p", "dropout"}
# The ops that are told the seed, backward ones too, draw nothing; MIOpen's state of dropout is its own.
_TOLD = {"seed", "dropout_seed", "philox_seed", "rng_state"}
_OTHERS = {"aten::_fused_sdp_choice", "aten::miopen_rnn"}


def random_ops(key: str = "CPU") -> list[Op]:
    """List the aten ops that draw on a CPU: those with a generator argument and a CPU kernel of their own.

    All other random ops (dropout, rand, randint, attention, recurrent layers) are composed of these there.
    On an accelerator, which has another `key`, a few have a kernel of their own: see `dropouts`.
    """
    return [op for op in _with_kernel(key) if "generator" in names(op)]


def dropouts(key: str) -> list[Op]:
    """List the aten ops that draw on an accelerator and take no generator: all drop with some probability."""
    return [
        op
        for op in _with_kernel(key)
        if torch.Tag.nondeterministic_seeded in op.tags
        and _CHANCES.intersection(names(op))
        and not _TOLD.intersection(names(op))
        and "generator" not in names(op)
        and op.name() not in _OTHERS  # type: ignore[no-untyped-call]
    ]


def _with_kernel(key: str) -> Iterator[Op]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def names(op: Op) -> list[str]:
    """Return the names of an op's arguments."""
    return [argument.name for argument in op._schema.arguments]


def drops(given: dict[str, Any]) -> bool:
    """Tell whether such an op draws anything, given its arguments; those left out have their defaults."""
    if given.get("train") is False:
        return False
    # native_dropout draws for a probability of 0 too, and attention does not.
    return "p" in given or given.get("dropout_p", given.get("dropout", 0.0)) > 0


def way_on(op: Op, keyset: torch._C.DispatchKeySet) -> tuple[str, Callable[..., Any]]:
    """Return the dispatch key that `op` called with `keyset` is bound for, and what takes the call on."""
    keys = torch._C.DispatchKey
    below = torch._C._dispatch_keyset_full_after(keys.BackendSelect) & keyset
    backend = below.remove(keys.PythonDispatcher).highestPriorityTypeId()
    # Only a trace uses the Python dispatcher, which wants to be asked again at every key; else the kernel is
    # called by its key, which unlike redispatching releases the GIL.
    if below.has(keys.PythonDispatcher):
        return backend.name, partial(op.redispatch, below)
    return backend.name, partial(op._op_dk, backend)
