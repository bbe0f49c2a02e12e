"""Memory and messages: what a step keeps resident at its peak, and what processes send each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.contenders import EAGER, Contender
from benchmarks.measure import Load
from benchmarks.models import Model
from benchmarks.processes import teams

MODEL_NAMES = ("wide_mlp", "cnn", "transformer")
STEPS = 3


def gradient_bytes(model: Model) -> int:
    """Return the size of one copy of the gradients."""
    return sum(param.numel() * param.element_size() for param in model.module().parameters())


def measure_memory(
    contenders: list[Contender], models: list[Model], devices: int, on_turn: Callable[[str], object]
) -> tuple[dict[str, Any], float]:
    """Return for each model the peak of each contender, and the load by others.

    A peak is that of the resident size, over what it was before the model was built, summed over processes.
    ``over_eager_bytes`` is the distance to plain eager, also in copies of the gradients. Contenders have
    fresh processes and run alone; those that do a part of the work are left out.
    """
    load = Load()
    found = {}
    for model in models:
        whole = [each for each in contenders if not each.shard_only and each.takes(model, devices)]
        copy = gradient_bytes(model)
        peaks = {each.name: sum(_ask("peak", each, model, devices, on_turn)) for each in whole}
        plain = peaks.get(EAGER)
        found[model.name] = {
            "gradient_bytes": copy,
            "contenders": {
                name: {
                    "peak_bytes": peak,
                    "over_eager_bytes": None if plain is None else peak - plain,
                    "over_eager_copies": None if plain is None else (peak - plain) / copy,
                }
                for name, peak in peaks.items()
            },
        }
    return found, load.of_others()


def measure_messages(
    contenders: list[Contender], models: list[Model], devices: int, on_turn: Callable[[str], object]
) -> tuple[dict[str, Any], float]:
    """Return for each model the bytes per step of contenders of several processes, and the load by others.

    ``collective_bytes`` is what one process brings to collectives, the most of any; ``loopback_bytes`` is
    what the system counted on the loopback interface, which carries all that processes here send each other.
    """
    several = [each for each in contenders if each.per_device and not each.shard_only]
    load = Load()
    found = {}
    for model in models:
        traffic = {each.name: _ask("traffic", each, model, devices, on_turn) for each in several}
        found[model.name] = {
            "gradient_bytes": gradient_bytes(model),
            "contenders": {
                name: {
                    "collective_bytes": max(each.collective for each in processes),
                    "loopback_bytes": max(each.loopback for each in processes),
                }
                for name, processes in traffic.items()
            },
        }
    return found, load.of_others()


def _ask(
    verb: str, contender: Contender, model: Model, devices: int, on_turn: Callable[[str], object]
) -> list[Any]:
    on_turn(contender.name)
    with teams([contender], model, devices) as found:
        return found[contender.name].ask(verb, STEPS)
