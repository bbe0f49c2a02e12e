"""Graphs: one function compiled as a whole, with a reason where it cannot be."""

from __future__ import annotations

import importlib
import itertools
import operator
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcpar._dynamo import compiling_under, install

_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift, operator.setitem,
}  # fmt: skip
_numbers = itertools.count()
_NOT_THE_USERS = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))


class Refused(Exception):
    """Why a graph that torch could compile must not be: what, and the fix."""


class Graph:
    """A function with code of its own for one signature, compiled when it is first called.

    Args:
        where: The call for messages, such as ``pmap(train_step, compile=True)``.
        fun: What is compiled, as one graph.
        detached: Whether a tensor that requires a gradient must not be part of it.
        threads: How many threads generated code uses, None for those of the thread that compiles.
    """

    def __init__(
        self, where: str, fun: Callable[..., Any], detached: bool, threads: int | None = None
    ) -> None:
        self.where = where
        self._plain = fun
        dynamo: Any = torch._dynamo
        install()
        self._too_often = dynamo.exc.FailOnRecompileLimitHit
        self._failures = (dynamo.exc.TorchDynamoException, self._too_often)

        def inductor(graph: Any, inputs: Sequence[Any]) -> Any:
            if detached:
                _refuse_gradients(graph, inputs)
            _refuse(graph, _written_to(graph))
            # What torch takes from its cache on disk comes without a word on what it writes to.
            cached = _config("functorch").patch(enable_autograd_cache=False)
            used = {} if threads is None else {"cpp.threads": threads}
            with cached, _config("inductor").patch(used):
                code = BACKEND(graph, inputs)
            _refuse(graph, _mutated())
            return code

        # Dynamo keeps what it compiles with the code object, which is the same for all closures of a body.
        own = fun.__code__.replace(co_name=f"{fun.__name__}_{next(_numbers)}")
        self._code = own
        fresh = types.FunctionType(own, fun.__globals__, own.co_name, fun.__defaults__, fun.__closure__)
        options: dict[str, Any] = {"guard_filter_fn": _guarded}
        self._call = torch.compile(fresh, backend=inductor, fullgraph=True, dynamic=False, options=options)

    def __call__(self, *args: Any) -> Any:
        """Call the function.

        Raises:
            ValueError: It cannot be compiled.
        """
        try:
            with compiling_under(_setting):
                return self._call(*args)
        except self._failures as error:
            failure: BaseException = error
        if getattr(failure, "gb_type", None) == "Observed exception" or "fake tensor call" in str(failure):
            self._plain(*args)  # The function itself raises, and its own error says more.
        raise self._explained(failure)

    def _explained(self, error: BaseException) -> ValueError:
        cause = getattr(error, "inner_exception", None)
        if isinstance(cause, Refused):
            return ValueError(f"{self.where}: {cause}")
        if isinstance(error, self._too_often):
            message = f"{self.where}: {_changing(self._code)}"
        else:
            text = str(error)
            message = f"{self.where}: cannot compile the function: {_reason(text)}\n{_fix(text)}"
        explained = ValueError(message)
        explained.__cause__ = error
        return explained


def _guarded(guards: Sequence[Any]) -> list[bool]:
    """Tell which guards are looked at in every call: not those that this package is what it was."""
    return ["__import_funcpar_dot_" not in guard.name or ".torch." in guard.name for guard in guards]


def _inductor(graph: Any, inputs: Sequence[Any]) -> Any:
    inductor = importlib.import_module("torch._inductor.compile_fx")  # Takes a second, so not before.

    def inner(aten: Any, *args: Any, **kwargs: Any) -> Any:
        # One call of C++ code does without the interpreter's lock, so that shards keep nobody waiting. But it
        # calls kernels, and random ops are met on the way to them.
        is_native = kwargs.get("cpp_wrapper", False) and not _draws(aten)
        with inductor.config.patch(cpp_wrapper=is_native):
            return inductor.compile_fx_inner(aten, *args, **kwargs | {"cpp_wrapper": is_native})

    is_cpu = all(given.is_cpu for given in inputs if isinstance(given, Tensor))
    # Torch's own random ops draw from the stream of the shard, and the same numbers as without compile=True.
    return inductor.compile_fx(graph, inputs, inner, {"fallback_random": True, "cpp_wrapper": is_cpu})


def _draws(aten: Any) -> bool:
    """Tell whether a graph, or one within it, calls a random op, or what is given one to call."""
    graphs = [part.graph for part in aten.modules() if isinstance(part, torch.fx.GraphModule)]
    called = [each for graph in graphs for node in graph.nodes for each in (node.target, *node.args)]
    return any(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in called)


def _config(name: str) -> Any:
    return importlib.import_module(f"torch._{name}.config")


BACKEND: Callable[[Any, Sequence[Any]], Any] = _inductor


def _setting() -> Any:
    """Return what dynamo is set to while it makes a graph here."""
    dynamo: Any = torch._dynamo
    # What torch has learned about 0-d float64 inputs of other graphs makes it lose writes to them in this
    # one, before anybody can refuse them.
    dynamo.symbolic_convert.TensorifyState.clear()
    # By default dynamo takes the hooks of a module for what they were.
    return dynamo.config.patch(trace_autograd_ops=True, skip_nnmodule_hook_guards=False)


def _inputs_of(graph: Any) -> list[str]:
    """Name the inputs of a graph as dynamo does, by where they come from."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [str(getattr(getattr(node, "_dynamo_source", None), "name", node.name)) for node in nodes]


def _refuse_gradients(graph: Any, inputs: Sequence[Any]) -> None:
    names = [
        name for name, given in zip(_inputs_of(graph), inputs, strict=True)
        if isinstance(given, Tensor) and given.requires_grad
    ]  # fmt: skip
    if names:
        raise Refused(
            f"the function uses tensors that require a gradient, and compiled gradients have no derivative:\n"
            f"{_listed(names)}\nDetach them, call it under torch.no_grad(), or leave compile=True out."
        )


def _written_to(graph: Any) -> list[int]:
    """Return which inputs an operation of a graph writes to by itself, not through a view."""
    places = {node: k for k, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    return [
        places[node.args[0]] for node in graph.graph.nodes
        if node.args and node.args[0] in places and (node.target in _IN_PLACE or _is_in_place(node))
    ]  # fmt: skip


def _is_in_place(node: Any) -> bool:
    name = str(node.target)
    return (
        bool(node.op == "call_method") and name[-1] == "_" and name[-2:] != "__" and name != "requires_grad_"
    )


def _mutated() -> list[int]:
    """Return which inputs the graph that was compiled last writes to, in whatever way."""
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        raise Refused("torch does not tell what the graph writes to in place.\nLeave compile=True out.")
    return [k for k, info in enumerate(metadata.input_info) if info.mutates_data]


def _refuse(graph: Any, written: list[int]) -> None:
    if written:
        names = _inputs_of(graph)
        raise Refused(
            f"the function writes in place to what it is given or closes over, which shards share:\n"
            f"{_listed([names[k] for k in written])}\nReturn the new value instead "
            f"(functionalize_with_buffers does for buffers), or call module.eval() before."
        )


def _listed(names: Sequence[str]) -> str:
    more = [f"  and {len(names) - 8} more"] if len(names) > 8 else []
    return "\n".join([*(f"  {name}" for name in names[:8]), *more])


def _reason(text: str) -> str:
    """Return what dynamo says, without its hints and the frames of this package."""
    kept: list[str] = []
    hidden = False
    for line in text.partition("Set TORCHDYNAMO_VERBOSE")[0].splitlines():
        if line.startswith('   File "') or line.startswith('  File "'):
            hidden = any(f'"{path}{os.sep}' in line for path in _NOT_THE_USERS)
        elif not line.startswith("  "):
            hidden = False
        if line.strip() and not hidden and not line.lstrip().startswith(("Hint:", "For more details")):
            kept.append(line.rstrip())
    return "\n".join(kept)


def _changing(code: types.CodeType) -> str:
    """Say what differs from call to call beside the arguments."""
    failures: dict[Any, list[str]] = torch._dynamo.utils.guard_failures
    reasons = failures.get(code, [])
    last = f":\n  {' '.join(reasons[-1].partition(': ')[2].splitlines()[0].split())}" if reasons else "."
    return (
        f"for the same arguments it was compiled {torch._dynamo.config.recompile_limit} times, as something "
        f"else that it depends on differs from call to call{last}\n"
        f"Pass a number that changes as an argument or as a 0-d tensor, or leave compile=True out."
    )


def _fix(text: str) -> str:
    if "force-skipped" in text:
        return (
            "Collectives and nested pmaps meet other shards and cannot be part of a graph: leave "
            "compile=True out, or map torch.compile(f), which compiles what is between them."
        )
    if "C++ compiler" in text or "CppCompile" in text:
        return "Install a C++ compiler (CXX names it), or leave compile=True out."
    return (
        "Write it with tensor operations alone (torch.where for a branch), or leave compile=True out; "
        "torch.compile(f) inside pmap compiles parts."
    )
