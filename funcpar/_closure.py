"""The tensors that a function closes over, as far as they can be found by looking."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

# Enough for any model; a function that reaches more is not worth the search.
_MOST = 100_000
# What functions of these packages name in their modules is not the user's, and leads far. Calls of pytest's
# own are in every function that asserts.
_OTHERS = {"torch", "funcpar", "_pytest"}


def computed_tensors(funs: Iterable[Callable[..., Any]]) -> list[Tensor]:
    """Return the tensors within functions that were computed from others that require a gradient.

    Looks into cells, defaults, globals that the user's code names, bound objects, partials, containers,
    and the attributes of modules and plain objects.
    """
    return [tensor for tensor in tensors_within(funs) if tensor.requires_grad and tensor.grad_fn is not None]


def tensors_within(funs: Iterable[Any]) -> Iterator[Tensor]:
    """Iterate over all tensors within functions."""
    return (item for item in _reached(funs) if isinstance(item, Tensor))


def holds_compiled(funs: Iterable[Callable[..., Any]]) -> bool:
    """Tell whether something within functions was compiled with torch.compile."""
    return any(_is_compiled(item) for item in _reached(funs))


def _is_compiled(item: Any) -> bool:
    attributes = getattr(item, "__dict__", None)
    if not isinstance(attributes, dict):
        return False
    return "_is_torch_compile" in attributes or attributes.get("_compiled_call_impl") is not None


def _reached(funs: Iterable[Any]) -> Iterator[Any]:
    """List the objects within functions, each once, until there are too many."""
    seen: set[int] = set()
    # Every object is kept until the end, so that no id is used twice.
    kept: list[Any] = list(funs)
    todo = list(kept)
    while todo and len(seen) < _MOST:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        yield item
        if not isinstance(item, Tensor):
            todo.extend(_within(item))


def _within(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif isinstance(item, types.FunctionType):
        yield from _within_function(item)
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif not isinstance(item, type | types.ModuleType | types.BuiltinFunctionType):
        attributes = getattr(item, "__dict__", None)
        if isinstance(attributes, dict):
            yield attributes


def _within_function(fun: types.FunctionType) -> Iterator[Any]:
    for cell in fun.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # Not filled yet.
            continue
    yield from (fun.__defaults__, fun.__kwdefaults__, fun.__dict__)
    if str(fun.__globals__.get("__name__")).partition(".")[0] in _OTHERS:
        return
    for code in _codes(fun.__code__):
        for name in code.co_names:
            value = fun.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                yield from (vars(value)[other] for other in code.co_names if other in vars(value))
            elif value is not None:
                yield value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
