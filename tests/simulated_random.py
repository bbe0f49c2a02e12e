"""The random numbers of the simulated accelerator: generators, and the kernels that draw from them.

A generator has its numbers from one of the CPU, its state, which several can share, as in CUDA. Ops take the
way of a device of torch's own: through the dispatcher to a kernel, which draws from the generator that it is
given, or else from the default one of its device. Dropout and recurrent layers take none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import simulated
import torch
from simulated import COUNT, Sim, books, kernels

aten = torch.ops.aten
known: dict[int, Generator] = {}


class Generator(torch.Generator):
    """A generator of a simulated device; `source` makes its numbers."""

    source: torch.Generator

    def __new__(cls, device: Any = None) -> Generator:
        made = super().__new__(cls)
        made.source = torch.Generator()
        known[made._cdata] = made
        return made

    def get_state(self) -> torch.Tensor:
        return self.source.get_state()

    def set_state(self, state: torch.Tensor) -> Generator:
        self.source.set_state(state)
        return self

    def manual_seed(self, seed: int) -> Generator:
        self.source.manual_seed(seed)
        return self

    def initial_seed(self) -> int:
        return self.source.initial_seed()

    def graphsafe_get_state(self) -> Generator:
        made = Generator()
        made.source = self.source
        return made

    def graphsafe_set_state(self, other: torch.Generator) -> Generator:
        self.source = known[other._cdata].source
        return self


class Backend:
    """What torch wants of the module of a device."""

    default_generators: tuple[torch.Generator, ...] = ()

    def __init__(self) -> None:
        self.here = threading.local()
        self.early_seed = 0
        self._initialized = False

    def init(self) -> None:
        """Make the generators, and give them the last seed that came before."""
        if not self.default_generators:
            self.default_generators, self._initialized = own.generators, True
            self.manual_seed_all(self.early_seed)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self._initialized

    def current_device(self) -> int:
        return getattr(self.here, "index", 0)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.here.index = self.current_device(), index
        yield
        self.here.index = before

    def device_count(self) -> int:
        return COUNT

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.default_generators[self._index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.default_generators[self._index(device)].set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        self.early_seed = seed
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index


class Own:
    """The default generators that kernels know, whatever Python finds in the backend's module."""

    def __init__(self) -> None:
        self.generators = tuple(Generator() for _ in range(COUNT))

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]


own = Own()


def _with_generator(op: Any) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("generator")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("generator", None) if len(args) <= position else args[position]
        sims = [t for t in (*args, *kwargs.values()) if isinstance(t, Sim)]
        place = sims[0].device
        generator = own.generators[place.index] if given is None else known[given._cdata]
        kwargs["generator"] = generator.source
        return simulated.computed(op, place, args[:position], kwargs, sims)

    return kernel


def _native_dropout(input: Sim, p: float, train: bool | None) -> tuple[Sim, Sim]:
    generator = own.generators[input.device.index]
    time.sleep(1e-3)  # Other threads have their turn, as in a kernel without the GIL.
    mask, keep = torch.ones(input.shape, dtype=torch.bool), 1.0
    if train is not False:
        keep = 1 - p
        mask.bernoulli_(keep, generator=generator.source)
    out = Sim(input.inner * mask / keep, input.device.index), Sim(mask, input.device.index)
    books.done("dropout", books.current(input.device), [input], list(out))
    return out


def _init_dropout_state(dropout: float, train: bool, seed: int, *, device: Any, **_: Any) -> Sim:
    return Sim(torch.tensor([seed]).view(torch.uint8), device.index)


def _cudnn_rnn(*args: Any) -> tuple[Any, ...]:
    """Drop, and nothing else, from the state that is given; GRUs have no second state to return."""
    input, dropout, state = args[0], args[11], args[15]
    seed = int(state.inner.view(torch.int64))
    mask = torch.empty(input.shape).bernoulli_(1 - dropout, generator=torch.Generator().manual_seed(seed))
    made = [Sim(value, input.device.index) for value in (input.inner * mask, torch.ones(1), torch.ones(1))]
    books.done("rnn", books.current(input.device), [input, state], made)
    return made[0], made[1], None, made[2], None


def register() -> Backend:
    """Give the device its kernels, before it is installed."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            if any(argument.name == "generator" for argument in op._schema.arguments):
                kernels[op] = _with_generator(op)
    kernels[aten.native_dropout.default] = _native_dropout
    kernels[aten._cudnn_rnn.default] = _cudnn_rnn
    kernels[aten._cudnn_init_dropout_state.default] = _init_dropout_state
    return Backend()
