"""check: the law, on the user's own function and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcpar import distributed, tree
from funcpar._graph import is_smooth
from funcpar._within import is_pmapped

# How far a leaf may be off, in units of its dtype's rounding, relative to its largest entry.
_ROUNDINGS = 1e4


def check(mapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a pmapped function and the plain one on the same arguments, and compare every leaf.

    For what no rule can see: a root of a mean, a maximum, a 0-d sum under ``"auto"``. A leaf may be
    off by 1e4 roundings of its dtype, relative to its largest entry (2e-12 in float64, 1e-3 in
    float32). Both start from the same state of torch's CPU generator, but a function that draws
    random numbers draws others in every shard.

    Args:
        mapped: What :func:`pmap` returned.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What ``mapped`` returned.

    Raises:
        TypeError: ``mapped`` is not a pmapped function.
        RuntimeError: It has the rows of several processes.
        ValueError: Results differ: every leaf that does, with how far.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.set_cpu_devices(2)
        >>> rms = fp.pmap(lambda x: (x**2).mean().sqrt(), in_axes=0)
        >>> try:
        ...     fp.check(rms, torch.tensor([1.0, 7.0]))
        ... except ValueError as error:
        ...     print(error)
        check(pmap(<lambda>)): the mapped function and the plain one differ:
          output  mapped 4.0  plain 5.0
        Give such outputs another out_axes, or make them of psum or pmean in the function.

    References:
        JAX has no such function; ``torch.autograd.gradcheck`` is the model.
    """
    plain = getattr(mapped, "__wrapped__", None)
    if plain is None or not is_pmapped(mapped):
        raise TypeError(
            f"check: {mapped!r} is not a pmapped function.\nGive what fp.pmap returned, and its arguments."
        )
    name, _, spans = vars(mapped)["__funcpar__"]
    call = f"check({name})"
    if spans and distributed.process_count() > 1:
        raise RuntimeError(
            f"{call}: the mapped function has the rows of all processes, the plain one those of this one.\n"
            f'Check pmap(..., processes="local"), or in one process.'
        )
    state = torch.get_rng_state()
    # The plain one first: the mapped one may be donated its arguments.
    leaves, spec = tree.flatten(plain(*args, **kwargs))
    torch.set_rng_state(state)
    found = mapped(*args, **kwargs)
    try:
        others = tree.flatten_like(spec, found, "output")
    except ValueError as error:
        raise ValueError(f"{call}: the results have different structures: {error}") from None
    paths = spec.paths("output")
    lines = [
        f"\n  {path}  {difference}"
        for path, other, leaf in zip(paths, others, leaves, strict=True)
        if (difference := _difference(other, leaf))
    ]
    if lines:
        raise ValueError(
            f"{call}: the mapped function and the plain one differ:{''.join(lines)}\n"
            f"Give such outputs another out_axes, or make them of psum or pmean in the function."
        )
    return found


def _difference(found: Any, plain: Any) -> str:
    """Describe how two leaves differ, empty if they agree."""
    if not (isinstance(found, Tensor) and isinstance(plain, Tensor)):
        same = type(found) is type(plain) and (found == plain or found is plain)
        return "" if same else f"mapped {found!r}  plain {plain!r}"
    if found.shape != plain.shape or found.dtype != plain.dtype:
        return f"mapped {found.dtype} {list(found.shape)}  plain {plain.dtype} {list(plain.shape)}"
    found, plain = found.detach().to_dense(), plain.detach().to_dense()
    if not is_smooth(plain):
        wrong = int((found != plain).sum())
        return f"{wrong} of {plain.numel()} entries differ" if wrong else ""
    wide = torch.complex128 if plain.is_complex() else torch.float64
    finite = plain.isfinite()
    if not torch.equal(plain[~finite].nan_to_num(nan=0.5), found[~finite].nan_to_num(nan=0.5)):
        return "NaN or infinity in different places"
    if not torch.equal(finite, found.isfinite()):
        return "NaN or infinity in different places"
    off, largest = (
        float(t[finite].to(wide).abs().max()) if bool(finite.any()) else 0.0 for t in (found - plain, plain)
    )
    if off <= _ROUNDINGS * torch.finfo(plain.dtype).eps * largest:
        return ""
    if plain.dim() == 0:
        return f"mapped {found.item():.6}  plain {plain.item():.6}"
    return f"off by up to {off:.2g}, where the largest entry is {largest:.2g}"
