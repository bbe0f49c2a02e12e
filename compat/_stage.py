"""Where a wrapper's forward runs: the live module, with stand-ins in the place of its parameters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compat._buckets import buckets_of, start
from compat._checkpoint import stage
from compat._lanes import Lanes, Starter
from compat._mean import Through
from compat._peers import Peers
from compat._session import Memory
from compat._stand_ins import Survey, standing_in, survey


class Stage:
    """Runs forward, and keeps the graph that its parameters' gradients pass.

    Args:
        module: The wrapped module.
        ignored: Names of parameters to leave alone.
        peers: The ranks.
        cap: Bytes of a bucket.
        is_synced: Whether a backward reduces.
    """

    def __init__(
        self, module: nn.Module, ignored: set[str], peers: Peers, cap: int, is_synced: Callable[[], bool]
    ) -> None:
        self._module, self._ignored, self._peers = module, ignored, peers
        self._cap, self._is_synced = cap, is_synced
        self._starter: Starter = start
        self._memory = Memory()
        self._lanes: Lanes | None = None
        self._own: Mapping[int, Tensor] = {}
        self._known: tuple[Any, ...] = ()  # What the own stand-ins stand for.
        self._thread: int | None = None

    @property
    def has_hook(self) -> bool:
        """Whether a user's function reduces."""
        return self._starter is not start

    def use(self, starter: Starter) -> None:
        """Let another function reduce, from the next forward on."""
        self._starter = starter
        self._known = ()

    def survey(self) -> Survey:
        """Return where the module's tensors are."""
        return survey(self._module, self._ignored)

    def call(self, found: Survey, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module; also from within its own forward."""
        if self._thread is not None:
            if self._thread != threading.get_ident():
                raise RuntimeError(
                    f"{self._peers.call}: two threads call it at the same time.\nCall it from one thread."
                )
            return self._module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            return self._module(*inputs, **kwargs)
        stand_ins = self._stand_ins(found)

        @contextlib.contextmanager
        def staged() -> Iterator[None]:
            before, self._thread = self._thread, threading.get_ident()
            try:
                with standing_in(found, stand_ins):
                    yield
            finally:
                self._thread = before

        token = stage.set(staged)
        try:
            with staged():
                return self._module(*inputs, **kwargs)
        finally:
            stage.reset(token)

    def lanes(self) -> Lanes:
        """Return the graph for the module's parameters as they are."""
        self._stand_ins(self.survey())
        assert self._lanes is not None
        return self._lanes

    def _stand_ins(self, found: Survey) -> Mapping[int, Tensor]:
        """Return what computes in the place of each parameter that needs a gradient, by its id."""
        params: dict[int, tuple[str, Tensor]] = {}
        for table, key, name in found.params:
            param = table[key]
            if param.requires_grad and id(param) not in params:
                params[id(param)] = (name, param)
        trained = dict(params.values())
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if any(not p.is_leaf or is_wrapped(p) for p in trained.values()):
            # Not the module's own, as under torch.func.functional_call.
            outs = Through.apply(self._peers, self._is_synced, *trained.values())  # type: ignore[no-untyped-call]
            return {id(p): out for p, out in zip(trained.values(), outs, strict=True)}
        return self._lasting(trained) if trained else {}

    def _lasting(self, trained: dict[str, Tensor]) -> Mapping[int, Tensor]:
        known = tuple((name, id(p), p.data_ptr(), p.dtype) for name, p in trained.items())
        if self._lanes is None or known != self._known:
            if self._lanes is not None:
                self._lanes.close()
            sparse = {
                id(m.weight) for m in self._module.modules()
                if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
            }  # fmt: skip
            params = list(trained.values())
            buckets = buckets_of(params, [id(p) in sparse for p in params], self._cap)
            self._lanes = Lanes(self._peers, trained, buckets, self._is_synced, self._starter, self._memory)
            self._own = self._lanes.make_stand_ins()
            self._known = known
        return self._own
