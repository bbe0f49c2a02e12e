"""How gradients pass from a loss to the parameters of a wrapper: one graph, one session per backward.

    parameters ── _Gathering ── _Lane, one per bucket ── stand-ins, with which forward computes

In a backward each lane starts the reduction of its bucket as soon as its gradients are there; at the end
_Gathering waits for all and hands the means on. It reaches every parameter whichever of them a loss used, so
ranks that took other branches still make the same operations, in the order of the buckets. The stand-ins
outlive a forward: several forwards in one backward are one session.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

import funcpar as fp
from compat._buckets import Bucket, Reduction, finish, is_own, layout_of, start
from compat._mean import mean_of
from compat._peers import Kind, Peers
from compat._session import Memory, Session

# Before nodes that were made later: a lane has to start while backward still runs.
_FIRST = 1 << 62
_MOST_SESSIONS = 8
Starter = Callable[..., Reduction]


class Lanes:
    """The stand-ins of the parameters that need a gradient, and the graph that they hang on.

    Args:
        peers: The ranks.
        params: By name, leaves.
        buckets: Of their places, in the order of reduction.
        is_synced: Whether a backward reduces; asked when it begins.
        starter: What starts a bucket's reduction.
        memory: What outlives the graph.
    """

    def __init__(
        self,
        peers: Peers,
        params: dict[str, Tensor],
        buckets: list[Bucket],
        is_synced: Callable[[], bool],
        starter: Starter,
        memory: Memory,
    ) -> None:
        self.peers, self.is_synced, self.memory = peers, is_synced, memory
        self._starter = starter
        self.names, self.params = list(params), list(params.values())
        self.buckets = buckets
        self._likes = [(p.shape, p.dtype, p.device) for p in self.params]
        told = [(n, tuple(p.shape), p.dtype, layout_of(p)) for n, p in params.items()]
        self._layout = zlib.crc32(repr(told).encode())
        # Small enough that sums of squares over ranks are exact: equal on all only if all sent the same.
        self._code = float(zlib.crc32(repr((self._layout, peers.number)).encode()) % 64)
        self._sessions: dict[int, Session] = {}

    def make_stand_ins(self) -> dict[int, Tensor]:
        """Return what forward computes with, by id of the parameter; it keeps the lanes alive."""
        # A graph made under a torch.func transform would end with it.
        with temporarily_clear_interpreter_stack(), torch.enable_grad(), torch.inference_mode(False):
            return self._make_graph()

    def _make_graph(self) -> dict[int, Tensor]:
        gathering: Any = _Gathering.apply
        lane_of: Any = _Lane.apply
        joined = gathering(self, *self.params)
        stand_ins: dict[int, Tensor] = {}
        self._lane_nodes: list[Callable[[], Any]] = []
        for lane, bucket in enumerate(self.buckets):
            outs = lane_of(self, lane, *(joined[k] for k in bucket.places))
            node = outs[0].grad_fn
            node._set_sequence_nr(_FIRST)
            self._lane_nodes.append(weakref.ref(node))
            for place, out in zip(bucket.places, outs, strict=True):
                out._is_param = True  # isinstance(..., nn.Parameter), as code in a forward may ask.
                stand_ins[id(self.params[place])] = out
        self._leaf_nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.params]
        me = weakref.ref(self)
        self._handles = [
            node.register_prehook(_Arrival(me, place)) for place, node in enumerate(self._leaf_nodes)
        ]
        return stand_ins

    def close(self) -> None:
        """Take what watches the parameters away from them."""
        for handle in self._handles:
            handle.remove()

    def session(self) -> Session:
        """Return the session of the running backward; start it if there is none."""
        task = torch._C._current_graph_task_id()
        session = self._sessions.get(task)
        if session is None:
            session = Session()
            if not self.is_synced():
                session.is_local = True
            elif not torch.is_grad_enabled() and not self._is_captured():
                session.waiting = {
                    lane for lane, node in enumerate(self._lane_nodes)
                    if torch._C._will_engine_execute_node(node())
                }  # fmt: skip
                session.reduces = True
                if self.peers.always_meet or self._layout not in self.memory.agreed:
                    session.meeting = self.peers.meet(Kind.BACKWARD, self._layout, len(self.params))
            while len(self._sessions) >= _MOST_SESSIONS:  # Of backwards that failed, or are over.
                del self._sessions[next(iter(self._sessions))]
            self._sessions[task] = session
        return session

    def _is_captured(self) -> bool:
        """Tell whether gradients are returned to a caller, as torch.autograd.grad does, not accumulated."""
        for node in self._leaf_nodes:
            try:
                torch._C._will_engine_execute_node(node)
            except RuntimeError:  # torch's way to say so.
                return True
        return False

    def arrive(self, lane: int, grads: tuple[Tensor | None, ...]) -> bool:
        """Take over the gradients of a lane, and start what can start; False if they are to go on."""
        session = self.session()
        if not session.reduces:
            return False
        for at, place in enumerate(self.buckets[lane].places):
            grad = grads[at]
            if grad is not None:
                session.grads[place] = (grad, is_own(grads, at))
        session.waiting.discard(lane)
        # Never wait here, while there is something to compute.
        if session.meeting is None or session.meeting.is_over():
            self._start_ready(session)
        return True

    def _start_ready(self, session: Session) -> None:
        active = self.peers.size
        if session.meeting is not None:
            active = len(session.meeting.wait())
            self.memory.agreed.add(self._layout)
        while len(session.started) < len(self.buckets) and len(session.started) not in session.waiting:
            self._add_local(session, self.buckets[len(session.started)])
            session.started.append(self._start(session, len(session.started), active))

    def _start(self, session: Session, lane: int, active: int) -> Reduction:
        is_last = lane == len(self.buckets) - 1
        share = active if self.peers.divides_by_active else self.peers.size
        bucket = self.buckets[lane]
        grads = {place: session.grads.pop(place) for place in bucket.places if place in session.grads}
        session.used.update(grads)
        extra: list[float] = []
        if is_last:
            extra = [float(place in session.used) for place in range(len(self.params))]
            extra += [self._code, self._code**2]
        return self._starter(self.peers, bucket, self.params, grads, share, extra)

    def _add_local(self, session: Session, bucket: Bucket) -> None:
        """Take what is in ``.grad`` of this rank alone into the mean, as no_sync promises."""
        for place in bucket.places:
            param = self.params[place]
            if id(param) not in self.memory.local or param.grad is None:
                continue
            if torch._C._will_engine_execute_node(self._leaf_nodes[place]):
                self.memory.local.discard(id(param))
                new, _ = session.grads.get(place, (None, False))
                session.grads[place] = (param.grad if new is None else param.grad + new, new is not None)
                param.grad = None

    def gather(self, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        """Return the gradients that go on to the parameters."""
        session = self.session()
        if session.is_local:
            return grads
        if session.reduces:
            session.waiting.clear()
            self._start_ready(session)
            means = self._finish(session.started)
            session.started.clear()
        elif self._starter is not start:
            raise NotImplementedError(
                f"{self.peers.call}: a communication hook has no derivative, so torch.autograd.grad and "
                f"create_graph=True do not go with it.\nUse loss.backward(), or register no hook."
            )
        else:
            means = mean_of(self.peers, grads, self._likes)
        session.returned = [None if mean is None else _mark(mean) for mean in means]
        if self.memory.looks_outside:
            self._look_outside(session)
        return means

    def _finish(self, started: list[Reduction]) -> list[Tensor | None]:
        found: dict[int, Tensor] = {}
        for reduction in started:
            found.update(finish(self.peers, reduction, self.params))
            reduction.grads = {}
        *counts, total, squares = started[-1].extra.tolist()
        if self.peers.size * squares != total**2 and not self.peers.always_meet:
            raise fp.ReplicaMismatchError(
                f"{self.peers.call}: the ranks ran backward through different wrappers at the same time.\n"
                f"Run them in the same order on every rank; TORCH_DISTRIBUTED_DEBUG=DETAIL shows the calls."
            )
        return [found.pop(k) if count else None for k, count in enumerate(counts)]

    def shadow(self, active: int) -> None:
        """Take part in a backward of other ranks with nothing."""
        session = Session()
        started = [self._start(session, lane, active) for lane in range(len(self.buckets))]
        self._finish(started)

    def note(self, place: int, grad: Tensor) -> None:
        """Note what a parameter is about to accumulate."""
        session = self._sessions.get(torch._C._current_graph_task_id())
        if session is None or session.is_local or session.returned is None:
            self.memory.local.add(id(self.params[place]))
        elif session.returned[place] != _mark(grad):
            session.outside.add(place)
            self._look_outside(session)

    def _look_outside(self, session: Session) -> None:
        if not session.will_look_outside:
            session.will_look_outside = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.reduce_outside(session.outside))

    def reduce_outside(self, places: set[int]) -> None:
        """Average ``.grad`` where something but the wrapper's forward added to it, on any rank."""
        self.memory.looks_outside = True
        with torch.no_grad():
            self.peers.meet(Kind.OUTSIDE, len(self.params)).wait()
            flags = [place in places for place in range(len(self.params))]
            found = [k for k, flag in enumerate(self.peers.agree(flags, Kind.OUTSIDE)) if flag]
        if not found:
            return
        totals = [self.params[k].grad for k in found]
        means = mean_of(self.peers, totals, [self._likes[k] for k in found])
        for place, total, mean in zip(found, totals, means, strict=True):
            if total is None or total.requires_grad:
                self.params[place].grad = mean
            elif mean is not None:
                total.copy_(mean)


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lanes: Lanes, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lanes = lanes
        return tuple(p.detach() for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.lanes.gather(grads)


class _Lane(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lanes: Lanes, lane: int, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lanes, ctx.lane = lanes, lane
        return tuple(p.detach() for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.lanes.arrive(ctx.lane, grads):
            return None, None, *(None for _ in grads)
        return None, None, *grads


class _Arrival:
    """What is called when a parameter is about to accumulate a gradient."""

    def __init__(self, lanes: weakref.ref[Lanes], place: int) -> None:
        self._lanes = lanes
        self._place = place

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        lanes, grad = self._lanes(), grads[0]
        if lanes is not None and grad is not None:
            lanes.note(self._place, grad)


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor._cdata, tensor._version
