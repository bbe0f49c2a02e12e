"""What the processes of one axis say to each other, over torch.distributed.

Every exchange begins with a word: each process tells which call it is in, and something small. The
calls must be the same. A process whose call has failed says that instead, wherever the others are,
so that all end together. Only then do tensors travel.

The processes speak in turns, so all must make the same exchanges in the same order.
"""

from __future__ import annotations

import datetime
import io
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from funcpar._errors import CollectiveTimeoutError, ProcessFailedError, ReplicaMismatchError

# A word up to this size travels in one message.
_ROOM = 1 << 10
_HEAD = 8
# How long a process that lost the others waits for them to say where they are.
_GRACE = 2.0


class Link:
    """One process's end of the line to the others.

    Attributes:
        index: Which process this is.
        count: How many there are.
        timeout: Seconds that a process waits for the others.
    """

    def __init__(self, words: Any, tensors: Any, timeout: float) -> None:
        self.index: int = words.rank()
        self.count: int = words.size()
        self.timeout = timeout
        self._words = words
        self._tensors = tensors
        self._lost: str | None = None
        self._said: Word | None = None
        self._turn = 0
        self._has_spoken = False
        # What all processes have agreed on before: of each call the weight of all shards together.
        self.expected: dict[tuple[str, bytes], float] = {}
        self._owner: int | None = None
        self._known: set[int] = set()
        self._held: Any = None

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Hold the line for one call; what it raises is told to the other processes.

        Raises:
            RuntimeError: Another thread is in such a call.
        """
        thread, outer = threading.get_ident(), self._owner
        if outer not in (None, thread):
            raise RuntimeError(
                f"{name}: another thread of this process is in a call that spans all processes, and the "
                f"order of two such calls could differ from process to process.\n"
                f'Make them from one thread, or keep this one here with processes="local".'
            )
        self._owner = thread
        if outer is None:
            self._turn += 1
            self._has_spoken = False
        try:
            yield
        except BaseException as error:
            if outer is None and not self.was_told(error):
                self._tell_failure(name, error)
            raise
        finally:
            self._owner = outer

    def say(self, call: str, told: Any = None) -> Word:
        """Begin an exchange: tell the others where this process is, without waiting for them."""
        if self._said is not None:  # A failure that was told must have arrived before the next word.
            said, self._said = self._said, None
            said.settle()
        self.spoke()
        return Word(self, call, pickle.dumps((True, call, told)))

    def meet(self, call: str, told: Any = None) -> list[Any]:
        """Return what every process tells, in order; each must be in the same call.

        Raises:
            ReplicaMismatchError: Another process is in another call.
            ProcessFailedError: Another process failed, or is gone.
            CollectiveTimeoutError: Another process did not come in time.
        """
        return self.say(call, told).answers()

    def values(self, call: str, told: Any) -> list[Any]:
        """The same for anything that pickle takes and that holds plain tensors, of any size."""
        with _plain_tensors():
            return self._values(call, told)

    def _values(self, call: str, told: Any) -> list[Any]:
        tensors: list[Tensor] = []
        skeleton = _taken_apart(told, tensors)
        shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        mine = torch.cat([torch.zeros(0, dtype=torch.uint8), *map(_bytes, tensors)])
        words = self.meet(call, (skeleton, shapes, mine.numel()))
        most = max(size for _, _, size in words)
        rows = [mine[:0]] * self.count
        if most:
            room = torch.zeros(most, dtype=torch.uint8)
            room[: mine.numel()] = mine
            rows = [torch.empty(most, dtype=torch.uint8) for _ in range(self.count)]
            self.wait(call, self._words.allgather([rows], [room]))
        return [
            told if k == self.index else _put_together(theirs, _unpacked(row, kinds))
            for k, ((theirs, kinds, _), row) in enumerate(zip(words, rows, strict=True))
        ]

    def start_sum(self, tensor: Tensor) -> Any:
        """Begin to replace a contiguous tensor by its sum over processes; :meth:`wait` ends it."""
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        group = self._words if tensor.is_cpu else self._tensors
        return dist.all_reduce(flat, group=group, async_op=True)

    def wait(self, call: str, work: Any) -> None:
        """Wait for what was begun.

        Raises:
            ProcessFailedError: Another process is gone.
            CollectiveTimeoutError: Another process did not come in time.
        """
        try:
            work.wait()
        except RuntimeError as error:
            self._lose(call, error)

    def is_lost(self) -> bool:
        """Tell whether the others cannot be reached any more."""
        return self._lost is not None

    def spoke(self) -> None:
        """Note that the others know of the call, and would wait for its end."""
        if self._lost is not None:
            self._raise(ProcessFailedError(self._lost))
        self._has_spoken = True

    def hold(self, sent: Any) -> None:
        """Keep memory alive that is on its way, and that nobody here waits for."""
        self._held = sent

    def was_told(self, error: BaseException) -> bool:
        """Tell whether every process that can be reached knows of an error already."""
        return id(error) in self._known or self._lost is not None

    def agreed(self, error: BaseException) -> BaseException:
        """Mark an error that every process raises."""
        self._known = {id(error)}
        return error

    def close(self, call: str) -> None:
        """Tell the others that this process leaves, and end the line."""
        if self._lost is None and self._said is None:
            self._said = Word(self, call, pickle.dumps((False, call, "it has ended")))
            self._said.settle()
        self._lost = self._lost or "the line to the other processes is closed"
        self._said = None

    def _raise(self, error: BaseException) -> NoReturn:
        raise self.agreed(error)

    def _tell_failure(self, call: str, error: BaseException) -> None:
        """Say, in place of the next word, that the call has failed here; nobody waits for that."""
        if self._lost is not None or self._said is not None or not self._has_spoken:
            return
        text = f"{type(error).__name__}: {error}"[: _ROOM // 2]
        self._said = Word(self, call, pickle.dumps((False, call, text)))

    def _lose(self, call: str, error: RuntimeError) -> NoReturn:
        """Give up the line, find out who is missing, and raise."""
        late = "imed out" in str(error) or "imeout" in str(error)
        present = self._who_is_here(call)
        self._lost = f"the line to the other processes broke in an earlier call, {call}.\nStart them all again."
        missing = [k for k in range(self.count) if k not in present]
        where = "".join(f"\n  process {k} waits in {there}" for k, there in sorted(present.items()))
        names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.count}"
        if not missing:
            failure: BaseException = ReplicaMismatchError(
                f"{call}: the processes wait for each other in different calls, or sent different shapes:{where}\n"
                f"Every process must make the same calls in the same order."
            )
        elif late:
            failure = CollectiveTimeoutError(
                f"{call}: {names} did not come within {self.timeout:g} seconds:{where}\n"
                f"Every process must make the same calls; initialize(timeout=) sets the limit."
            )
        else:
            failure = ProcessFailedError(
                f"{call}: {names} is gone ({_first_line(error)}):{where}\n"
                f"See its own output, and start all again, from a checkpoint."
            )
        raise self.agreed(failure) from error

    def _who_is_here(self, call: str) -> dict[int, str]:
        """Return where the processes are that say so within a moment, this one included."""
        here = {self.index: call}
        try:
            store = self._words.get_group_store()
            store.set(f"lost/{self.index}", f"{self._turn} {call}")
            self._words.abort()  # Those who wait for this process are told by that.
            end = time.monotonic() + _GRACE
            while time.monotonic() < end and len(here) < self.count:
                for k in range(self.count):
                    if k not in here and store.check([f"lost/{k}"]):
                        turn, there = store.get(f"lost/{k}").decode().split(" ", 1)
                        here[k] = there if int(turn) == self._turn else f"{there} (another call of it)"
                time.sleep(0.02)
        except RuntimeError:  # The store lives in process 0, or with torchrun's agent.
            pass
        return here


class Word:
    """What one process tells the others, on its way."""

    def __init__(self, link: Link, call: str, payload: bytes) -> None:
        self._link = link
        self._call = call
        self._payload = payload
        self._answers: list[Any] | None = None
        room = np.zeros(_ROOM, dtype=np.uint8)
        room[:_HEAD] = np.frombuffer(len(payload).to_bytes(_HEAD, "little"), dtype=np.uint8)
        fits = payload[: _ROOM - _HEAD]
        room[_HEAD : _HEAD + len(fits)] = np.frombuffer(fits, dtype=np.uint8)
        with _plain_tensors():
            self._rows = [torch.empty(_ROOM, dtype=torch.uint8) for _ in range(link.count)]
            self._work = link._words.allgather([self._rows], [torch.from_numpy(room)])

    def answers(self) -> list[Any]:
        """Wait for the others, and return what every process told, in order; see :meth:`Link.meet`."""
        if self._answers is None:
            self._answers = self._compared(self._received())
        return self._answers

    def settle(self) -> None:
        """Wait until the others have heard; what they said does not matter."""
        with _ignored():
            self._received()

    def _received(self) -> list[bytes]:
        with _plain_tensors():
            return self._read()

    def _read(self) -> list[bytes]:
        link = self._link
        link.wait(self._call, self._work)
        heads = [row.numpy().tobytes() for row in self._rows]
        sizes = [int.from_bytes(head[:_HEAD], "little") for head in heads]
        if (most := max(sizes)) <= _ROOM - _HEAD:
            return [head[_HEAD : _HEAD + size] for head, size in zip(heads, sizes, strict=True)]
        room = np.zeros(most, dtype=np.uint8)
        room[: len(self._payload)] = np.frombuffer(self._payload, dtype=np.uint8)
        rows = [torch.empty(most, dtype=torch.uint8) for _ in range(link.count)]
        link.wait(self._call, link._words.allgather([rows], [torch.from_numpy(room)]))
        return [row.numpy().tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def _compared(self, payloads: list[bytes]) -> list[Any]:
        link = self._link
        words = [pickle.loads(payload) for payload in payloads]
        failed = [(k, call, told) for k, (is_well, call, told) in enumerate(words) if not is_well]
        if failed:
            k, call, text = failed[0]
            link._raise(
                ProcessFailedError(
                    f"{self._call}: process {k} of {link.count} failed in {call}: {text}\n"
                    f"All processes leave the call; the first cause is what process {k} raised."
                )
            )
        calls = [call for _, call, _ in words]
        if any(call != calls[0] for call in calls):
            lines = "".join(f"\n  process {k} is in {call}" for k, call in enumerate(calls))
            link._raise(
                ReplicaMismatchError(
                    f"the processes of one axis made different calls:{lines}\n"
                    f"Every process must make the same calls in the same order."
                )
            )
        return [told for _, _, told in words]


def _plain_tensors() -> AbstractContextManager[None]:
    """Let tensors be made that no torch.func transform around the call wraps."""
    return torch._C._DisableFuncTorch()  # type: ignore[no-any-return]


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TimeoutError):
        pass


def _first_line(error: BaseException) -> str:
    return str(error).split("] ", 1)[-1].split(". This is", 1)[0]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _unpacked(row: Tensor, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
    tensors, start = [], 0
    for dtype, shape in kinds:
        stop = start + shape.numel() * dtype.itemsize
        tensors.append(row[start:stop].clone().view(dtype).reshape(shape))
        start = stop
    return tensors


def _taken_apart(value: Any, tensors: list[Tensor]) -> bytes:
    """Pickle a value without its tensors, which go into the list."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> int | None:
            if not isinstance(found, Tensor):
                return None
            tensors.append(found)
            return len(tensors) - 1

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _put_together(skeleton: bytes, tensors: list[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return tensors[place]

    return Unpickler(io.BytesIO(skeleton)).load()


def timeout_of(seconds: float) -> datetime.timedelta:
    """Return a limit as torch.distributed takes it."""
    return datetime.timedelta(seconds=seconds)
