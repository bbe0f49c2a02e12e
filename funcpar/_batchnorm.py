"""Batch normalisation over the rows of all shards: what one device computes of the whole batch.

Each shard centres its rows at its own mean and sums what is left, and its square; one exchange hands
every shard the counts, centres and sums of all. So nothing large is ever subtracted from something
large, and all shards hold bitwise the same statistics.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from funcpar._gathers import all_gather
from funcpar._group import find, live
from funcpar._isolation import _refuse_shared_statistics

_Module = TypeVar("_Module", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """Normalise each channel over the rows of all shards, as BatchNorm does over the whole batch.

    In a shard of several it equals torch's BatchNorm on one device: in value, in the derivatives of every
    order, and in running statistics, whatever the sizes of the shards and ``weight=`` are. The shards meet
    once in forward and once in backward. Alone, outside of every pmap, and where running statistics
    normalise (``eval()``), it is torch's BatchNorm.

    Running statistics are equal on all shards, so ``out_axes=None`` returns them: call the module through
    :func:`functionalize_with_buffers`. State dicts are those of BatchNorm.

    Shapes: (N, C, S) to (N, C, S), for S of any number of dimensions, none included. The result has the
    dtype of the input; statistics of half precision are taken in float32. Its own memory.

    Args:
        num_features: C, the number of channels.
        eps: Added to the variance.
        momentum: Share of the new batch in running statistics; None takes the average over all batches.
        affine: Learn a weight, and a bias, per channel.
        track_running_stats: Keep running statistics; without them batch statistics are used in ``eval()``
            too, and synchronised.
        device: Where parameters and buffers are made.
        dtype: Their dtype.
        bias: With ``affine``, learn a bias.
        axis_name: The mapped axis to normalise over, by default the innermost.

    Raises:
        UnboundAxisError: No running pmap binds ``axis_name``, inside of one that binds another.
        ReplicaMismatchError: Another shard does not come to this layer.
        TypeError: The input is not of a floating-point dtype.
        ValueError: The input has no channels or others than ``num_features``, all shards together have one
            value per channel, or the module is called directly by several shards, in training: its
            running statistics would be theirs in common.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(3)
        >>> model = fp.SyncBatchNorm(2)
        >>> apply, params, buffers = fp.functionalize_with_buffers(model)
        >>> step = fp.pmap(apply, in_axes=(None, None, 0), out_axes=(0, None))
        >>> x = torch.arange(14.0).reshape(7, 2)
        >>> out, buffers = step(params, buffers, x)
        >>> torch.allclose(out, torch.nn.BatchNorm1d(2)(x), atol=1e-6), buffers["running_mean"]
        (True, tensor([0.6000, 0.7000]))

    References:
        ``torch.nn.SyncBatchNorm``, which needs a process group and an accelerator per process, and has no
        derivatives beyond the first.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        axis_name: Hashable = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.axis_name = axis_name

    def forward(self, input: Tensor) -> Tensor:
        """Normalise this shard's rows."""
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not by_batch or not live() or find(self.axis_name, "SyncBatchNorm").group.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        writes = self.training and self.track_running_stats
        if writes:
            _refuse_shared_statistics(self.running_mean)
        # float32 at least, as torch's kernels: squares of half precision overflow, and their sums round.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mine = _Moments(wide)
        parts, counts = all_gather((mine.parts, mine.count), self.axis_name)
        if mine.count <= 1 and (total := int(counts.sum())) <= 1:
            if total == 1:
                raise ValueError(
                    f"SyncBatchNorm: all {len(counts)} shards together have one value per channel, which has "
                    f"no variance.\nGive it more rows, or call module.eval() before."
                )
            return super().forward(input)
        counts = counts.to(parts)
        mean, squares = _combined(parts, counts)
        if writes:
            with torch.no_grad():
                centre = mean.detach() + parts.detach()[0, 0]
                self._track(centre, squares.detach() / (counts.sum() - 1))
        scale = torch.rsqrt(squares / counts.sum() + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = (mine.parts[0] - parts[0, 0] - mean) * scale
        if self.bias is not None:
            shift = shift + self.bias
        # With statistics of 0 and 1 this is scale * x + shift, in one kernel forward and one backward.
        zeros, ones = torch.zeros_like(shift), torch.ones_like(shift)
        out = F.batch_norm(mine.centred, zeros, ones, scale.to(wide), shift.to(wide), False, 0.0, 0.0)
        return out.to(input.dtype)

    def extra_repr(self) -> str:
        """Show the arguments, as BatchNorm does, and the axis if it is named."""
        named = "" if self.axis_name is None else f", axis_name={self.axis_name!r}"
        return f"{super().extra_repr()}{named}"  # type: ignore[no-untyped-call]

    @classmethod
    def convert_sync_batchnorm(cls, module: _Module, axis_name: Hashable = None) -> _Module | SyncBatchNorm:
        """Replace every BatchNorm in a module by a SyncBatchNorm, in place.

        The new layers hold the same parameters, buffers and hooks, and are in the same mode, so that an
        optimizer made before goes on. A layer that occurs under two names is one layer afterwards.

        Args:
            module: Any module. Its BatchNorm layers of any dimension, torch.nn.SyncBatchNorm included.
            axis_name: The mapped axis, by default the innermost.

        Returns:
            ``module`` itself, or if it is a BatchNorm, a new SyncBatchNorm.

        Raises:
            TypeError: A layer is lazy and has seen no input, or derives from BatchNorm with a forward or
                submodules of its own; nothing was replaced.

        Example:
            >>> import torch, funcpar as fp
            >>> fp.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(4)))[0].eps
            1e-05

        References:
            ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which drops hooks, and what a subclass adds.
        """
        norms = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
        _check_convertible(norms)
        new: dict[nn.Module | None, SyncBatchNorm] = {}
        for layer in norms.values():
            new[layer] = cls._from(layer, axis_name)
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in new:
                    parent._modules[name] = new[child]
        return next((new[layer] for layer in norms.values() if layer is module), module)

    @classmethod
    def _from(cls, layer: _BatchNorm, axis_name: Hashable) -> SyncBatchNorm:
        new = cls.__new__(cls)
        # The hooks' own dictionaries go over, so that the handles that remove them keep working.
        own = layer.__dict__.copy()
        for key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[key] = own[key].copy()
        own.pop("process_group", None)
        new.__dict__.update(own, axis_name=axis_name)
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: the input has {input.dim()} dimensions.\nGive it the shape (N, C, ...)."
            )
        if input.shape[1] != self.num_features or not self.num_features:
            raise ValueError(
                f"SyncBatchNorm: the input has {input.shape[1]} channels, and num_features="
                f"{self.num_features}.\nGive it the shape (N, {self.num_features or 'C'}, ...)."
            )
        if not input.is_floating_point():
            raise TypeError(
                f"SyncBatchNorm: the input is of dtype {input.dtype}.\nGive it a floating-point dtype."
            )

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics take in those of a batch."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.copy_(value * factor + running.to(value.dtype) * (1.0 - factor))


class _Moments:
    """What a shard knows of its channels: how many values, their centre, and sums around it."""

    def __init__(self, x: Tensor) -> None:
        dims = [0, *range(2, x.dim())]
        self.count = x.numel() // x.shape[1]
        # Nothing depends on where the centre is, so that no derivative goes through it.
        centre = x.detach().sum(dims) / max(self.count, 1)
        self.centred = x - centre.reshape(-1, *[1] * (x.dim() - 2))
        self.parts = torch.stack([centre, self.centred.sum(dims), self.centred.square().sum(dims)])


def _combined(parts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over all shards, from the first one's centre, and the sum of squares around it."""
    centres, sums, squares = parts.unbind(1)
    counts = counts[:, None]
    offsets = sums / counts.clamp(min=1)
    means = centres - centres[0] + offsets
    mean = (counts * means).sum(0) / counts.sum()
    within = squares - sums * offsets
    return mean, (within + counts * (means - mean).square()).sum(0)


def _check_convertible(norms: dict[str, _BatchNorm]) -> None:
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    problems = []
    for name, layer in norms.items():
        kind = type(layer)
        if isinstance(layer, LazyModuleMixin):
            problems.append(f"  {name or 'module'}  a {kind.__name__} that has seen no input")
        elif kind.forward not in known or "forward" in layer.__dict__:
            problems.append(f"  {name or 'module'}  a {kind.__name__} with a forward of its own")
        elif layer._modules:
            problems.append(f"  {name or 'module'}  a {kind.__name__} with submodules of its own")
    if problems:
        lines = "\n".join(problems)
        raise TypeError(
            f"convert_sync_batchnorm: these layers cannot be replaced:\n{lines}\n"
            f"Call lazy layers once, and replace the others by hand."
        )
