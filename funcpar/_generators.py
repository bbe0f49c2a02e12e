"""Stand in for torch's default generators, and let accelerators draw from others.

`torch.manual_seed`, `get_rng_state`, `fork_rng` and activation checkpointing find the objects of this module
in the place of the default generators. Each means another generator, which it asks for every time.

An op on an accelerator that takes a generator is given one. The few that take none (dropout, attention) draw
from the default generator of their device, so that one is lent the state of another while the host asks
for the op. States are shared, not copied, and nothing waits for the accelerator. Meanwhile a lock keeps
everything else from the default generator.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from funcpar._ops import Op, drops, names

# Makes a generator of a device; tests put that of a simulated one here.
new_generator: Callable[[torch.device], torch.Generator] = torch.Generator


class Source(Protocol):
    """What has the numbers of one shard."""

    def on(self, device: torch.device) -> torch.Generator:
        """Return the generator for what is drawn on an accelerator."""

    def number(self) -> int:
        """Draw an integer."""


class DefaultGenerator(torch.Generator):
    """What torch takes for a default generator; `target` tells which one it means at the moment.

    It is a real generator for isinstance and for torch's argument parser. Routed ops know it by its address.
    """

    _target: Callable[[], torch.Generator]
    _lock: contextlib.AbstractContextManager[Any]

    def __new__(
        cls,
        target: Callable[[], torch.Generator],
        lock: contextlib.AbstractContextManager[Any],
        device: torch.device,
    ) -> "DefaultGenerator":
        made = super().__new__(cls, device)  # type: ignore[call-arg]
        made._target, made._lock = target, lock
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return self._target().__reduce__()

    def get_state(self) -> torch.Tensor:
        with self._lock:
            return self._target().get_state()

    def set_state(self, _new_state: torch.Tensor) -> torch.Generator:
        with self._lock:
            return self._target().set_state(_new_state)

    def clone_state(self) -> torch.Generator:
        with self._lock:
            return self._target().clone_state()

    def graphsafe_get_state(self) -> torch.Generator:
        with self._lock:
            return self._target().graphsafe_get_state()

    def graphsafe_set_state(self, _new_state: torch.Generator) -> torch.Generator:
        with self._lock:
            return self._target().graphsafe_set_state(_new_state)

    def get_offset(self) -> int:
        with self._lock:
            return self._target().get_offset()

    def set_offset(self, offset: int) -> torch.Generator:
        with self._lock:
            return self._target().set_offset(offset)

    def manual_seed(self, seed: int) -> torch.Generator:
        with self._lock:
            return self._target().manual_seed(seed)

    def seed(self) -> int:
        with self._lock:
            return self._target().seed()

    def initial_seed(self) -> int:
        with self._lock:
            return self._target().initial_seed()


class _Place:
    """One accelerator: its default generator, what stands in for it, and who may use it."""

    __slots__ = ("device", "lock", "own", "stand_in")

    def __init__(
        self, device: torch.device, own: torch.Generator, current: Callable[[], Source | None]
    ) -> None:
        def target() -> torch.Generator:
            source = current()
            return own if source is None else source.on(device)

        self.device = device
        self.own = own
        # Reentrant, since the kernel of an op may call another one.
        self.lock = threading.RLock()
        self.stand_in = DefaultGenerator(target, self.lock, own.device)
        if own.device.type != "cpu":
            # C++ that is handed the stand-in then finds the default generator's state in it.
            torch.Generator.graphsafe_set_state(self.stand_in, own)


class Accelerators:
    """How ops on the accelerators of this process get their numbers.

    Args:
        kind: The type of device.
        current: Returns what the thread that asks draws from, None for the default generators.
    """

    def __init__(self, kind: str, current: Callable[[], Source | None]) -> None:
        self.key = torch._C._dispatch_key_for_device(kind)
        self._kind = kind
        self._module: Any = torch.get_device_module(kind)
        self._current = current
        self._places: tuple[_Place, ...] = ()
        self.lock = threading.Lock()
        self.are_met = False

    def meet(self, start: bool) -> None:
        """Put stand-ins in the place of the default generators, if torch has made them, or is to `start`.

        Where torch does not list them, or cannot share their states, they stay as they are.
        """
        if not start and self._generators() == ():
            return
        with self.lock:
            if self.are_met:
                return
            if start and hasattr(self._module, "init"):
                self._module.init()
            owns = self._generators()
            if owns == ():
                return
            if owns is not None and _share_states(owns):
                devices = [torch.device(self._kind, index) for index in range(len(owns))]
                self._places = tuple(_Place(*each, self._current) for each in zip(devices, owns, strict=True))
                self._module.default_generators = tuple(place.stand_in for place in self._places)
            self.are_met = True

    def _generators(self) -> tuple[torch.Generator, ...] | None:
        return getattr(self._module, "default_generators", None)

    def routed(self, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes a call of an op on an accelerator; a generator is given by name if at all."""
        if "generator" in names(op):
            return partial(self._draw, call)
        return partial(self._drop, names(op), call)

    def _draw(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        place = self._place(args, kwargs)
        given: Any = kwargs.get("generator")
        # The default generator itself is given by torch alone, to seed what all streams of a device share.
        if place is not None and (given is None or given._cdata == place.stand_in._cdata):  # type: ignore[attr-defined]
            source = self._current()
            given = kwargs["generator"] = place.own if source is None else source.on(place.device)
        if place is None or given._cdata != place.own._cdata:  # type: ignore[attr-defined]
            return call(*args, **kwargs)
        with place.lock:
            return call(*args, **kwargs)

    def _drop(self, arguments: list[str], call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        place, source = self._place(args, kwargs), self._current()
        if place is None:
            return call(*args, **kwargs)
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        if not drops(given):
            source = None
        if "dropout_state" in given:
            return call(*args, **kwargs) if source is None else call(**_with_state(given, place, source))
        with place.lock:
            if source is None:
                return call(*args, **kwargs)
            before = place.own.graphsafe_get_state()
            place.own.graphsafe_set_state(source.on(place.device))
            try:
                return call(*args, **kwargs)
            finally:
                place.own.graphsafe_set_state(before)

    def _place(self, args: Any, kwargs: Any) -> _Place | None:
        if not self.are_met:
            self.meet(start=False)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.device.type == self._kind:
                return self._places[value.device.index] if self._places else None
        return None


def _share_states(generators: tuple[torch.Generator, ...]) -> bool:
    try:
        for generator in generators:
            generator.graphsafe_get_state()
    except NotImplementedError:
        return False
    return True


def _with_state(given: dict[str, Any], place: _Place, source: Source) -> dict[str, Any]:
    """Give cuDNN's recurrent layers a state of dropout of their own, made for this call."""
    make = torch.ops.aten._cudnn_init_dropout_state.default
    state = make(given["dropout"], True, source.number(), dtype=torch.uint8, device=place.device)
    return {**given, "dropout_state": state}
