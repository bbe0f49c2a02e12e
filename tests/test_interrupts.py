"""Ctrl-C between any two lines of the machine: nothing of a call stays behind in the caller's thread."""

import ast
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import funcpar as fp
from funcpar import _asked, _exchange, _group, _isolation, _random, _standstill, _watch
from funcpar._pace import Pace

HERE = str(Path(fp.__file__).parent)
NET = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
APPLY, PARAMS = fp.functionalize(NET)
X = torch.arange(39.0, dtype=torch.float64).reshape(13, 3) / 39
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
STRIDE = 1 if THOROUGH else 7


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return fp.pmean(APPLY(params, x).square().mean()) if len(x) < 13 else APPLY(params, x).square().mean()


@functools.cache
def lines(path: str) -> tuple[set[int], set[int], set[int]]:
    """Return lines of a file: those with calls in them, where a ``with`` block begins, and a ``finally``."""
    nodes = list(ast.walk(ast.parse(Path(path).read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call | ast.With)]
    called = {line for node in calls for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    finals = {node.finalbody[0].lineno for node in nodes if isinstance(node, ast.Try) and node.finalbody}
    return called, {node.lineno for node in nodes if isinstance(node, ast.With)}, finals


def interrupted(call: Callable[[], Any], number: int) -> bool:
    """Raise KeyboardInterrupt at the so many-th line of funcpar where one can come; tell if there was one.

    Python asks for signals as a function begins, after a call, and as a loop goes on: after the last call of
    a block still inside it.
    """
    count = itertools.count()
    came = False

    def trace(frame: Any, event: str, _: Any) -> Any:
        path, latest = frame.f_code.co_filename, 0

        def inside(frame: Any, event: str, _: Any) -> Any:
            nonlocal came, latest
            if event == "line":
                before, latest = latest, frame.f_lineno
                called, blocks, finals = lines(path)
                is_end = latest in finals or (before > latest and latest in blocks)
                can_come = before == 0 or before in called or before > latest
                if can_come and not is_end and next(count) == number:
                    came = True
                    raise KeyboardInterrupt
            return inside

        return inside if path.startswith(HERE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return came


def left_behind() -> dict[str, Any]:
    """Return what this thread has set, that a call may have left there."""
    return {
        "shards": _group.live(),
        "isolated": _isolation.isolation.on,
        "stream": _random.here.stream,
        "depth": _standstill.here.depth,
        "running": threading.get_ident() in _standstill.state.running,
        "turn": _standstill.state.turn.locked(),
        "asked": (_asked.asked.target, _asked.asked.handler, _asked.asked.seen),
        "tokens": _exchange.here.tokens,
        "threads": torch.get_num_threads(),
        "mkl": [line for line in torch.__config__.parallel_info().splitlines() if "mkl_get_max" in line],
        "grad": torch.is_grad_enabled(),
        "cache": torch.is_autocast_cache_enabled(),
        "engine": torch._C._is_multithreading_enabled(),
        "watched": set(_watch._watch.running),
    }


@pytest.mark.parametrize("devices", [1, 3], ids=["one device", "three"])
@pytest.mark.parametrize("kind", ["gradient", "joined"])
def test_an_interrupt_leaves_nothing_behind(devices, kind, monkeypatch):
    monkeypatch.setattr(Pace, "is_together", lambda self: False)
    fp.set_cpu_devices(3, threads_per_device=1)
    if kind == "gradient":
        step = fp.pmap(fp.value_and_grad(loss_fn), devices=devices)
        call = lambda: step(PARAMS, X)
    else:
        mapped = fp.pmap(loss_fn, devices=devices)
        call = lambda: fp.value_and_grad(mapped)(PARAMS, X)
    call()
    before = left_behind()
    for number in itertools.count(0, STRIDE):
        if not interrupted(call, number):
            break
        assert left_behind() == before, f"after an interrupt at line {number}"
    assert number > 300
    torch.manual_seed(0)
    value, grads = call()
    torch.manual_seed(0)
    again, grads_again = call()
    assert torch.equal(value, again)
    for name in grads:
        assert torch.equal(grads[name], grads_again[name])
