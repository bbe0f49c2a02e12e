"""torch.func.functional_call on a wrapper, which torch refuses for every DataParallel."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils import stateless

from compat._data_parallel import DataParallel

_plain = stateless._functional_call


@functools.wraps(_plain)
def _functional_call(
    module: Any,
    parameters_and_buffers: Mapping[str, Tensor],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    if not isinstance(module, DataParallel):
        return _plain(
            module, parameters_and_buffers, args, kwargs, tie_weights=tie_weights, strict=strict  # type: ignore[arg-type]
        )  # fmt: skip
    positional = args if isinstance(args, tuple) else () if args is None else (args,)
    return module._call(None, positional, kwargs or {}, _named_below(module, parameters_and_buffers, strict))


def _named_below(wrapper: DataParallel[Any], given: Mapping[str, Tensor], strict: bool) -> dict[str, Tensor]:
    """Return the tensors by the wrapped module's own names; tied parameters have one name."""
    names: dict[str, Tensor] = dict(wrapper.named_parameters(remove_duplicate=False))
    names.update(wrapper.named_buffers(remove_duplicate=False))
    unknown = [name for name in given if name not in names]
    missing = [name for name in names if name not in given] if strict else []
    if unknown or missing:
        listed = [
            *(f"  {name!r}  unknown" for name in unknown),
            *(f"  {name!r}  missing" for name in missing),
        ]
        raise ValueError(
            "functional_call(DataParallel): the names are not the wrapper's:\n" + "\n".join(listed) + "\n"
            "Give names as in wrapper.named_parameters(), with 'module.'."
        )
    first: dict[int, str] = {}
    for name, tensor in names.items():
        first.setdefault(id(tensor), name)
    return {first[id(names[name])].removeprefix("module."): tensor for name, tensor in given.items()}


stateless._functional_call = _functional_call
