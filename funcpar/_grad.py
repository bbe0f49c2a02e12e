"""grad and value_and_grad: of a function of pytrees, by plain autograd where that serves.

Under a torch.func transform they are torch.func's vjp. Otherwise they are one backward pass over
stand-ins for the differentiated leaves; the result is part of the caller's graph where anything
that it depends on requires a gradient there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpar import tree
from funcpar._asked import asked, handled
from funcpar._differentiate import by_autograd, by_torch_func, recordable
from funcpar._graph import Gradient, GradientHook, holds_tensors, is_differentiable, own_all
from funcpar._world import in_torch_func, is_below_autograd

# Given a function of the differentiable leaves, those leaves, and which of all leaves they are.
Differentiate: TypeAlias = Callable[
    [Callable[..., Any], list[Tensor], list[int]], tuple[Tensor, Any, list[Gradient]]
]


@dataclass(slots=True)
class Evaluation:
    """One function value with its gradients, flat.

    Attributes:
        value: The 0-d value.
        aux: What else the function returned, None without ``has_aux``.
        leaves: The leaves of the differentiated arguments.
        grads: One per leaf; None where the leaf is not differentiated or was not used.
        build: Makes the tree of gradients from a list like ``grads``.
    """

    value: Tensor
    aux: Any
    leaves: list[Any]
    grads: list[Gradient]
    build: Callable[[list[Gradient]], Any]


class GradientFunction:
    """What :func:`grad` and :func:`value_and_grad` return; pmap recognises it."""

    def __init__(
        self, name: str, fun: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool
    ) -> None:
        if not callable(fun):
            raise TypeError(f"{name}: {fun!r} is not callable.\nGive a function, such as loss_fn.")
        numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
        if not numbers or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
            raise TypeError(
                f"{name}({_name_of(fun)}): argnums={argnums!r} is not an integer or a tuple of integers.\n"
                f"Give positions of arguments, such as argnums=0 or argnums=(0, 1)."
            )
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.argnums = tuple(numbers)
        self.single = not isinstance(argnums, tuple | list)
        self.has_aux = has_aux
        self.with_value = name == "value_and_grad"
        self.call = f"{name}({_name_of(fun)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate here, or as pmap has asked to."""
        traced = torch.compiler.is_dynamo_compiling()  # A graph knows nothing of this thread.
        if not traced and asked.target is self and asked.handler is not None:
            handler = asked.handler
            with handled(None, None):  # A call of the same function further in is a local one.
                return handler(self, args, kwargs)
        found = self.evaluate(args, kwargs)
        grads = self.finish(found.leaves, found.grads if traced else own_all(found.grads))
        answer = self.answer(found, grads)
        if not traced and asked.seen is not None:
            asked.seen += [(g, leaf) for g, leaf in zip(grads, found.leaves, strict=True) if g is not None]
        return answer

    def answer(self, found: Evaluation, grads: list[Gradient]) -> Any:
        """Put value, aux and gradients together as the caller knows them."""
        built = found.build(grads)
        if self.with_value:
            return ((found.value, found.aux), built) if self.has_aux else (found.value, built)
        return (built, found.aux) if self.has_aux else built

    def finish(self, leaves: list[Any], grads: list[Gradient]) -> list[Gradient]:
        """Give leaves that were not used zeros."""
        return [
            torch.zeros_like(leaf.detach()) if grad is None and is_differentiable(leaf) else grad
            for leaf, grad in zip(leaves, grads, strict=True)
        ]

    def differentiated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tree.Spec]:
        """Return the leaves of the differentiated arguments, and the structure of the list of those."""
        return _flatten_slots(self._slots(args, kwargs), args, kwargs)

    def evaluate(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed: Callable[[], float] | None = None,
        hook: Callable[[int], GradientHook | None] | None = None,
    ) -> Evaluation:
        """Return the value, aux, and the gradients times ``seed()`` (None: 1), asked for after forward.

        ``hook(k)`` is what the gradient of leaf k is told to as soon as it is complete.
        """
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and is_below_autograd():
            raise RuntimeError(
                f"{self.call}: it is called in an op that Python implements (torch.library.custom_op, or "
                f"__torch_dispatch__), where torch records no graph, so that gradients would be zeros.\n"
                f"Call it outside of the op, or in the op's own backward."
            )
        given = args, kwargs
        if not traced and torch.is_inference_mode_enabled():  # Inference tensors cannot be part of a graph.
            args, kwargs = tree.map(recordable, given)
        differentiate = by_torch_func if traced or in_torch_func() else by_autograd
        found = self.evaluate_by(
            lambda call, inputs, chosen: differentiate(
                call, inputs, seed, [] if hook is None else [hook(k) for k in chosen]
            ),
            args,
            kwargs,
        )
        if args is not given[0]:  # Who asks knows the leaves that it gave.
            found.leaves = self.differentiated(*given)[0]
        return found

    def evaluate_by(
        self, differentiate: Differentiate, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Evaluation:
        """Return value, aux and gradients as ``differentiate`` makes them of the differentiable leaves."""
        slots = self._slots(args, kwargs)
        leaves, spec = _flatten_slots(slots, args, kwargs)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and holds_tensors(leaf):
                raise TypeError(
                    f"{self.call}: a differentiated argument holds a {type(leaf).__qualname__} with tensors "
                    f"or arrays in it, which is no pytree node.\nUse dicts, lists, tuples or dataclasses of "
                    f"tensors, or register the type with torch.utils._pytree."
                )
        chosen = differentiable(leaves)

        def call(*stands: Tensor) -> tuple[Tensor, Any]:
            new = list(leaves)
            for k, stand in zip(chosen, stands, strict=True):
                new[k] = stand
            new_args, new_kwargs = list(args), dict(kwargs)
            for slot, part in zip(slots, tree.unflatten(spec, new), strict=True):
                if isinstance(slot, int):
                    new_args[slot] = part
                else:
                    new_kwargs[slot] = part
            return self._split(self.fun(*new_args, **new_kwargs))

        inputs = [leaves[k] for k in chosen]
        value, aux, some = differentiate(call, inputs, chosen)
        grads: list[Gradient] = [None] * len(leaves)
        for k, grad in zip(chosen, some, strict=True):
            grads[k] = grad
        return Evaluation(value, aux, leaves, grads, lambda new: self._joined(tree.unflatten(spec, new)))

    def _joined(self, parts: list[Any]) -> Any:
        return parts[0] if self.single else tuple(parts)

    def _slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
        """Return where each differentiated argument is: a position in args or a name in kwargs."""
        slots: list[int | str] = []
        for number in self.argnums:
            position = number + len(args) if number < 0 else number
            if 0 <= position < len(args):
                slots.append(position)
                continue
            names = list(inspect.signature(self.fun).parameters) if position >= 0 else []
            if position >= len(names) or names[position] not in kwargs:
                raise ValueError(
                    f"{self.call}: argnums={number}, and the call has {len(args)} positional arguments.\n"
                    f"Give argnums the position of an argument that is passed."
                )
            slots.append(names[position])
        if len(set(slots)) < len(slots):
            raise ValueError(
                f"{self.call}: argnums={self.argnums} names one argument twice.\nName each argument once."
            )
        return slots

    def _split(self, answer: Any) -> tuple[Tensor, Any]:
        aux = None
        if self.has_aux:
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise TypeError(
                    f"{self.call}: with has_aux=True the function must return a pair (value, aux); it "
                    f"returned a {type(answer).__name__}.\nReturn (value, aux), or leave has_aux out."
                )
            answer, aux = answer
        if not isinstance(answer, Tensor):
            raise TypeError(
                f"{self.call}: the function returned a {type(answer).__name__}, not a tensor.\n"
                f"Return a 0-d tensor; has_aux=True lets it return (value, aux)."
            )
        if answer.dim() != 0 or not answer.is_floating_point():
            raise ValueError(
                f"{self.call}: the function returned a tensor of shape {tuple(answer.shape)} and dtype "
                f"{answer.dtype}, not a real scalar.\nReturn a 0-d floating-point tensor, such as its mean()."
            )
        return answer, aux


def grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the gradient of ``fun``.

    Gradients have the structure, shapes, dtypes and devices of the differentiated arguments: float
    and complex leaves get one (of complex leaves torch's convention, the conjugate), other leaves
    None; leaves that the value does not depend on get zeros. They are plain, writable tensors that
    share memory with nothing, and part of the caller's graph only where a tensor that they depend on
    requires a gradient there.

    Args:
        fun: Returns a 0-d real floating-point tensor, or ``(value, aux)`` with ``has_aux``.
        argnums: Positions of the arguments to differentiate; a tuple gives a tuple of gradients.
        has_aux: Whether ``fun`` returns something besides its value.

    Returns:
        A function of the same arguments that returns ``grads``, or ``(grads, aux)``.

    Raises:
        TypeError: ``fun`` is not callable or returns no tensor, or ``argnums`` is of another kind.
        ValueError: ``fun`` returns no real scalar, or an argument of ``argnums`` is not passed.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.grad(lambda w, x: (w["a"] * x).sum())({"a": torch.ones(2)}, torch.tensor([3.0, 4.0]))
        {'a': tensor([3., 4.])}

    References:
        ``jax.grad``. JAX refuses integer arguments; here they get None.
    """
    return GradientFunction("grad", fun, argnums, has_aux)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes ``fun`` and its gradient.

    Shapes, dtypes, devices and memory of the gradients are those of :func:`grad`.

    Args:
        fun: Returns a 0-d real floating-point tensor, or ``(value, aux)`` with ``has_aux``.
        argnums: Positions of the arguments to differentiate; a tuple gives a tuple of gradients.
        has_aux: Whether ``fun`` returns something besides its value.

    Returns:
        A function of the same arguments that returns ``(value, grads)``, or ``((value, aux), grads)``.

    Raises:
        TypeError: ``fun`` is not callable or returns no tensor, or ``argnums`` is of another kind.
        ValueError: ``fun`` returns no real scalar, or an argument of ``argnums`` is not passed.

    Example:
        >>> import torch, funcpar as fp
        >>> fp.value_and_grad(lambda w: (w**2).sum())(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))

    References:
        ``jax.value_and_grad``; ``torch.func.grad_and_value`` returns the two in the other order.
    """
    return GradientFunction("value_and_grad", fun, argnums, has_aux)


def _flatten_slots(
    slots: list[int | str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], tree.Spec]:
    return tree.flatten([args[slot] if isinstance(slot, int) else kwargs[slot] for slot in slots])


def _name_of(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def differentiable(leaves: list[Any]) -> list[int]:
    """Return which leaves get a gradient."""
    return [k for k, leaf in enumerate(leaves) if is_differentiable(leaf)]
