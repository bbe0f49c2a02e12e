"""Communication hooks: a user's function in the place of the mean over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compat._buckets import Bucket, Reduction, layout_of
from compat._peers import Kind, Peers

_GRAD_BUCKET: Any = getattr(dist, "GradBucket")  # noqa: B009
_HOW = "Give hook(state, bucket) -> torch.futures.Future[torch.Tensor]."


class GradBucket:
    """What a hook is given, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, index: int, is_last: bool, params: list[Tensor], buffer: Tensor) -> None:
        self._index, self._is_last, self._params, self._buffer = index, is_last, params, buffer

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def is_last(self) -> bool:
        """Tell whether it is the last bucket of the backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients in one dimension, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the buffer."""
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return self._params

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer."""
        parts = torch.split(self._buffer, [p.numel() for p in self._params])
        return [_shaped(part, p) for part, p in zip(parts, self._params, strict=True)]


def check_hook(call: str, hook: Callable[..., Any]) -> None:
    """Refuse what cannot be called as a hook.

    Raises:
        TypeError: It is not callable, or takes other arguments, or has other annotations.
    """
    if not callable(hook):
        raise TypeError(f"{call}.register_comm_hook: {type(hook).__name__} is not callable.\n{_HOW}")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    takes = inspect.Parameter.empty if bucket is None else bucket.annotation
    gives = signature.return_annotation
    is_bucket = isinstance(takes, str) or takes in (inspect.Parameter.empty, _GRAD_BUCKET)
    is_future = isinstance(gives, str) or gives in (inspect.Signature.empty, torch.futures.Future[Tensor])
    if len(signature.parameters) != 2 or not is_bucket or not is_future:
        raise TypeError(f"{call}.register_comm_hook: the hook's signature is {signature}.\n{_HOW}")


class HookStarter:
    """Starts the reduction of a bucket by a user's hook.

    Args:
        call: How messages name the wrapper.
        state: What the hook is given first.
        hook: The hook.
    """

    def __init__(self, call: str, state: object, hook: Callable[..., Any]) -> None:
        self._call, self._state, self._hook = call, state, hook
        self._index = 0

    def __call__(
        self,
        peers: Peers,
        bucket: Bucket,
        params: Sequence[Tensor],
        grads: dict[int, tuple[Tensor, bool]],
        share: int,
        extra: Sequence[float] = (),
    ) -> Reduction:
        """Call the hook, and count who has used what beside it."""
        mine = [params[k] for k in bucket.places]
        buffer = mine[0].new_zeros(sum(p.numel() for p in mine))
        for part, p, k in zip(
            torch.split(buffer, [p.numel() for p in mine]), mine, bucket.places, strict=True
        ):
            grad, _ = grads.get(k, (None, False))
            if grad is not None:
                _shaped(part, p).copy_(grad.to_dense() if grad.is_sparse else grad)
        given = GradBucket(self._index, bool(extra), mine, buffer)
        self._index = 0 if extra else self._index + 1
        future = self._hook(self._state, given)
        if not isinstance(future, torch._C.Future):
            kind = type(future).__name__
            raise TypeError(f"{self._call}: the communication hook returned a {kind}.\n{_HOW}")
        started = Reduction([_Waiting(future, self._call, mine, bucket)])
        if extra:
            started.extra = torch.tensor(extra, device=peers.device)
            started.works.append(peers.all_reduce(started.extra, Kind.BACKWARD))
        started.grads = started.works[0].grads
        return started


class _Waiting:
    """A future that waits like a work of a process group, and then has gradients."""

    def __init__(self, future: Any, call: str, params: list[Tensor], bucket: Bucket) -> None:
        self._future, self._call, self._params, self._bucket = future, call, params, bucket
        self.grads: dict[int, Tensor] = {}

    def is_completed(self) -> bool:
        """Tell whether the hook has its result."""
        return bool(self._future.done())

    def wait(self, timeout: Any = None) -> None:
        """Take the hook's result apart."""
        value = self._future.wait()
        result = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        size = sum(p.numel() for p in self._params)
        if not isinstance(result, Tensor) or result.numel() != size:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{self._call}: the communication hook's future holds {shape}, not a tensor of {size} "
                f"numbers.\n"
                f"Return one that has the shape of bucket.buffer()."
            )
        parts = torch.split(result.reshape(-1), [p.numel() for p in self._params])
        for k, part, p in zip(self._bucket.places, parts, self._params, strict=True):
            self.grads[k] = torch.empty_like(p).copy_(_shaped(part, p))


def _shaped(part: Tensor, param: Tensor) -> Tensor:
    """Return a piece of a buffer as a view with the parameter's shape and layout."""
    return part.as_strided(param.shape, layout_of(param), part.storage_offset())
