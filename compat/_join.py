"""join: ranks that are out of batches take part with nothing until all are."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch

from compat._lanes import Lanes
from compat._mean import DTYPES
from compat._peers import Kind, Peers
from compat._sameness import copy_from, send_nothing, tensors_of


class Joinable(Protocol):
    """What join needs to know of a wrapper."""

    peers: Peers
    module: torch.nn.Module
    parameters_to_ignore: set[str]

    def lanes(self) -> Lanes:
        """Return the wrapper's lanes for the parameters as they are now."""
        ...


class Joining:
    """The context that ``DistributedDataParallel.join`` returns.

    On leaving it a rank answers every meeting of the others until none is left, then takes the parameters
    and buffers of one of the last.
    """

    def __init__(self, wrapper: Joinable, by_initial_size: bool, enable: bool, throws: bool) -> None:
        self._wrapper = wrapper
        self._by_initial_size, self._enable, self._throws = by_initial_size, enable, throws

    def __enter__(self) -> None:
        if self._enable:
            peers = self._wrapper.peers
            peers.divides_by_active, peers.always_meet = not self._by_initial_size, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peers = self._wrapper.peers
        if not self._enable:
            return
        try:
            if kind is None:
                self._answer(peers)
        finally:
            peers.divides_by_active, peers.always_meet = False, peers.debugs

    def _answer(self, peers: Peers) -> None:
        came_last = True
        while True:
            meeting = peers.meet(Kind.STOP if self._throws else Kind.JOINED, came_last)
            active = meeting.wait()
            if not active:
                break
            came_last = False
            self._answer_call(peers, active, meeting.rows()[active[0]])
        # Some rank left after all the others, and has stepped as often as any.
        source = next(rank for rank, row in enumerate(meeting.rows()) if row[2])
        tensors = tensors_of(self._wrapper.module, self._wrapper.parameters_to_ignore, True)
        copy_from(peers, source, list(tensors.values()))

    def _answer_call(self, peers: Peers, active: list[int], row: list[int]) -> None:
        kind, _, *details = row
        if kind == Kind.BACKWARD:
            self._wrapper.lanes().shadow(len(active))
        elif kind in (Kind.GRADIENT, Kind.OUTSIDE):
            peers.agree([False] * details[0], Kind(kind))
        elif kind == Kind.MEAN:
            zeros = torch.zeros(details[0], dtype=DTYPES[details[1]], device=peers.device)
            peers.wait(peers.all_reduce(zeros, Kind.MEAN), Kind.MEAN)
        elif kind == Kind.BUFFERS:
            send_nothing(peers, active[0], details[0])
