"""Binding: a call's arguments by the function's signature, so that a name and a position mean the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Argument:
    """One argument of a call: its name for messages, which parameter it is, its value."""

    root: str
    parameter: str
    position: int
    value: Any
    keyword: str | None = None


class Binder:
    """Names the arguments of a function's calls by its signature."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        target = fun.forward if isinstance(fun, torch.nn.Module) else fun
        try:
            self.signature: inspect.Signature | None = inspect.signature(target)
        except (TypeError, ValueError):  # A builtin without one.
            self.signature = None
        self.parameters = list(self.signature.parameters.values()) if self.signature else []
        self.simple = self.signature is not None and all(
            p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in self.parameters
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Argument]:
        """Return the arguments in the order of the parameters.

        Raises:
            TypeError: The function cannot be called so; the text is Python's.
        """
        if self.signature is None:
            named = [Argument(f"args[{k}]", f"args[{k}]", k, value) for k, value in enumerate(args)]
            return named + [
                Argument(key, key, len(args) + k, value, key) for k, (key, value) in enumerate(kwargs.items())
            ]
        if self.simple and not kwargs and len(args) <= len(self.parameters):
            required = [p for p in self.parameters[len(args) :] if p.default is p.empty]
            if not required:
                return [
                    Argument(p.name, p.name, k, value)
                    for k, (p, value) in enumerate(zip(self.parameters, args, strict=False))
                ]
        return self._bind(self.signature.bind(*args, **kwargs).arguments)

    def _bind(self, bound: dict[str, Any]) -> list[Argument]:
        found: list[Argument] = []
        gap = False  # After a parameter that was left out, the rest must go by name.
        for k, p in enumerate(self.parameters):
            if p.name not in bound:
                gap = True
            elif p.kind is p.VAR_POSITIONAL:
                found += [
                    Argument(f"{p.name}[{j}]", p.name, k + j, value) for j, value in enumerate(bound[p.name])
                ]
            elif p.kind is p.VAR_KEYWORD:
                found += [
                    Argument(key, key, k + j, value, key)
                    for j, (key, value) in enumerate(bound[p.name].items())
                ]
            else:
                by_name = p.kind is p.KEYWORD_ONLY or (gap and p.kind is not p.POSITIONAL_ONLY)
                found.append(Argument(p.name, p.name, k, bound[p.name], p.name if by_name else None))
        return found
