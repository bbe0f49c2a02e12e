"""Binding: a call's arguments by the function's signature, so that a name and a position mean the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from funcpar import tree

SPECS = ("auto", "mean", "sum", "stack", "shards")


@dataclass(slots=True)
class Argument:
    """One argument of a call.

    Attributes:
        root: What the user knows it as, in messages.
        parameter: The parameter that takes it.
        position: Its place among the positional arguments, None if it has none.
        value: The value.
        keyword: The name it is passed on by, None if by position.
        is_first: Whether it is what the function takes first.
    """

    root: str
    parameter: str
    position: int | None
    value: Any
    keyword: str | None = None
    is_first: bool = False


class Binder:
    """Names the arguments of a function's calls by its signature."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        target = fun.forward if isinstance(fun, torch.nn.Module) else fun
        try:
            self.signature: inspect.Signature | None = inspect.signature(target)
        except (TypeError, ValueError):  # A builtin without one.
            self.signature = None
        self.parameters = list(self.signature.parameters.values()) if self.signature else []
        self._names = [p.name for p in self.parameters]
        self._simple = self.signature is not None and all(
            p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in self.parameters
        )
        required = [k for k, p in enumerate(self.parameters, 1) if p.default is p.empty]
        self._num_required = max(required, default=0)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Argument]:
        """Return the arguments in the order of the parameters.

        Raises:
            TypeError: The function cannot be called so; the text is Python's.
        """
        if self.signature is None:
            named = [
                Argument(f"args[{k}]", f"args[{k}]", k, value, is_first=k == 0)
                for k, value in enumerate(args)
            ]
            return named + [Argument(key, key, None, value, key) for key, value in kwargs.items()]
        if self._simple and not kwargs and self._num_required <= len(args) <= len(self.parameters):
            return [
                Argument(name, name, k, value, is_first=k == 0)
                for k, (name, value) in enumerate(zip(self._names, args, strict=False))
            ]
        return self._bind(self.signature.bind(*args, **kwargs).arguments, kwargs)

    def _bind(self, bound: dict[str, Any], kwargs: dict[str, Any]) -> list[Argument]:
        found: list[Argument] = []
        gap = False  # After a parameter that was left out, the rest must go by name.
        for k, p in enumerate(self.parameters):
            if p.name not in bound:
                gap = True
            elif p.kind is p.VAR_POSITIONAL:
                found += [
                    Argument(f"{p.name}[{j}]", p.name, k + j, value, is_first=k + j == 0)
                    for j, value in enumerate(bound[p.name])
                ]
            elif p.kind is p.VAR_KEYWORD:
                found += [
                    Argument(key, key, None, value, key, is_first=k + j == 0)
                    for j, (key, value) in enumerate(bound[p.name].items())
                ]
            else:
                # What was given by name is passed on by name: the signature may be that of a function
                # under a wrapper that takes its arguments in another order.
                by_name = p.name in kwargs or (gap and p.kind is not p.POSITIONAL_ONLY)
                position = None if p.kind is p.KEYWORD_ONLY else k
                keyword = p.name if by_name else None
                found.append(Argument(p.name, p.name, position, bound[p.name], keyword, is_first=k == 0))
        return found


def positions(call: str, name: str, static: Any, binder: Binder) -> frozenset[int]:
    """Return the positions of arguments that the option ``name`` gives.

    Raises:
        TypeError: A position is not an integer.
        ValueError: The function has no such parameter.
    """
    numbers = tuple(static) if isinstance(static, list | tuple | set | frozenset) else (static,)
    room = len(binder.parameters)
    endless = not room or any(p.kind is p.VAR_POSITIONAL for p in binder.parameters)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                f"{call}: {name}={static!r} is not an integer or several.\n"
                f"Give positions of arguments, from 0."
            )
        if number < -room or (number >= room and not endless):
            raise ValueError(
                f"{call}: {name}={static!r}, and the function has {room} parameters.\n"
                f"Give positions from 0 to {room - 1}."
            )
    return frozenset(number % room if number < 0 else number for number in numbers)


def check_in_axes(call: str, spec: Any, binder: Binder) -> None:
    """Refuse what can never be ``in_axes`` of this function.

    Raises:
        TypeError: An entry is of the wrong kind.
        ValueError: An entry names no parameter.
    """
    if isinstance(spec, str) and spec != "auto":
        raise ValueError(
            f'{call}: in_axes={spec!r} is unknown.\nGive "auto", an int, None, or a tree of those.'
        )
    if isinstance(spec, dict) and binder.parameters:
        names = [p.name for p in binder.parameters]
        if not any(p.kind is p.VAR_KEYWORD for p in binder.parameters):
            for name in spec:
                if name not in names:
                    raise ValueError(
                        f"{call}: in_axes names {name!r}, which is no parameter of the function.\n"
                        f"Its parameters are {', '.join(names)}."
                    )
    if isinstance(spec, list | tuple) and binder.parameters:
        room = len(binder.parameters)
        if len(spec) > room and not any(p.kind is p.VAR_POSITIONAL for p in binder.parameters):
            raise ValueError(
                f"{call}: in_axes has {len(spec)} entries, and the function has {room} parameters.\n"
                f"Give in_axes one entry per argument, or a dict by parameter name."
            )
    for path, leaf in tree.leaves_with_path(spec, "in_axes"):
        if leaf != "auto" and (isinstance(leaf, bool) or not isinstance(leaf, int)):
            raise TypeError(
                f"{call}: {path}={leaf!r} is not an axis.\nGive an int (split along it) or None (replicate)."
            )


def check_out_axes(call: str, spec: Any) -> None:
    """Refuse what can never be ``out_axes``.

    Raises:
        ValueError: An entry is a string that is no spec.
        TypeError: An entry is of another kind.
    """
    for path, leaf in tree.leaves_with_path(spec, "out_axes"):
        if isinstance(leaf, str) and leaf not in SPECS:
            raise ValueError(
                f"{call}: {path}={leaf!r} is unknown.\nGive an int, None, or one of {', '.join(SPECS)}."
            )
        if isinstance(leaf, bool) or not isinstance(leaf, int | str):
            raise TypeError(
                f"{call}: {path}={leaf!r} is not a spec.\nGive an int, None, or one of {', '.join(SPECS)}."
            )
