"""What the processes of one axis say to each other, over torch.distributed.

Every exchange begins with a word: each process tells which call it is in, the how many-th that is, and
something small. The calls must be the same. A process whose call has failed says that instead,
wherever in the call the others are, so that all end together. Only then do tensors travel.

The processes speak in turns, so all must make the same exchanges in the same order.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from funcpar._background import stay_awake
from funcpar._errors import ProcessFailedError, ReplicaMismatchError
from funcpar._packing import packed, unpacked
from funcpar._whereabouts import Whereabouts

# A word up to this size travels in one message.
_ROOM = 1 << 10
_HEAD = 8
# Seconds that a process that leaves gives the others to leave too.
_FAREWELL = 5.0


class Link:
    """One process's end of the line to the others.

    Attributes:
        index: Which process this is.
        count: How many there are.
        turn: How many calls this process has made; the same everywhere.
        expected: What all processes have agreed on before: of each call the weight of all shards together.
        exchanging: The calls among them whose shards exchange.
    """

    def __init__(self, words: Any, tensors: Any, timeout: float) -> None:
        self.index: int = words.rank()
        self.count: int = words.size()
        self._words = words
        self._tensors = tensors
        self._lost: str | None = None
        self._said: list[Word] = []
        self.turn = 0
        self._has_spoken = False
        self.expected: dict[tuple[str, bytes], float] = {}
        self.exchanging: set[tuple[str, bytes]] = set()
        self._owner: int | None = None
        self._agreed_turn = -1
        self._held: Any = None
        self._whereabouts = Whereabouts(words.get_group_store(), self.index, self.count, timeout)

    @contextmanager
    def call(self, name: str, begins: bool = True) -> Iterator[None]:
        """Hold the line for one call; what it raises is told to the other processes.

        What does not begin a call (the shards' part of a backward) is part of one that does, in which
        the others wait: if it fails, that call is never made here.

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
            self.turn += begins
            self._has_spoken = not begins
        try:
            yield
        except BaseException as error:
            if outer is None:
                was_told = self.was_told()
                self.turn += not begins
                if not was_told:
                    self._tell_failure(name, error)
            raise
        finally:
            self._owner = outer

    def say(self, call: str, told: Any = None, token: Any = None) -> Word:
        """Begin an exchange: tell the others where this process is, without waiting for them."""
        while self._said:  # A failure that was told must have arrived before the next word.
            self._said.pop(0).settle()
        self.spoke()
        return Word(self, call, pickle.dumps((True, (self.turn, token), call, told)))

    def meet(self, call: str, told: Any = None, token: Any = None) -> list[Any]:
        """Return what every process tells, in order; each must be in the same call, with the same token.

        Raises:
            ReplicaMismatchError: Another process is in another call.
            ProcessFailedError: Another process failed, or is gone.
            CollectiveTimeoutError: Another process did not come in time.
        """
        return self.say(call, told, token).answers()

    def values(self, call: str, told: Any) -> list[Any]:
        """The same for anything that pickle takes and that holds plain tensors, of any size."""
        with _plain_tensors():
            skeleton, kinds, mine = packed(told)
            words = self.meet(call, (skeleton, kinds, mine.numel()))
            most = max(size for _, _, size in words)
            rows = [mine[:0]] * self.count
            if most:
                room = torch.zeros(most, dtype=torch.uint8)
                room[: mine.numel()] = mine
                rows = [torch.empty(most, dtype=torch.uint8) for _ in range(self.count)]
                self.wait(call, self._words.allgather([rows], [room]))
            return [
                told if k == self.index else unpacked(theirs, kinds, row)
                for k, ((theirs, kinds, _), row) in enumerate(zip(words, rows, strict=True))
            ]

    def start_sum(self, tensor: Tensor) -> Any:
        """Begin to replace a contiguous tensor by its sum over processes; :meth:`wait` ends it."""
        if self._lost is not None:
            self._raise(ProcessFailedError(self._lost))
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # The checks of dist.all_reduce take as long as a small layer.
        return (self._words if tensor.is_cpu else self._tensors).allreduce([flat])

    def wait(self, call: str, work: Any, on_cpu: bool = True) -> None:
        """Wait for what was begun; for what is not on the CPU the caller's stream waits.

        Raises:
            ProcessFailedError: Another process is gone.
            CollectiveTimeoutError: Another process did not come in time.
        """
        try:
            if on_cpu:
                stay_awake(work)
            work.wait()
        except RuntimeError as error:
            del work  # It would keep the connections open.
            self._lose(call, error)

    def spoke(self) -> None:
        """Note that the others know of the call, and would wait for its end."""
        if self._lost is not None:
            self._raise(ProcessFailedError(self._lost))
        self._has_spoken = True

    def hold(self, sent: Any) -> None:
        """Keep memory alive that is on its way, and that nobody here waits for."""
        self._held = sent

    def was_told(self) -> bool:
        """Tell whether every process that can be reached knows already that this call fails."""
        return self._agreed_turn == self.turn or self._lost is not None

    def agreed(self, error: BaseException) -> BaseException:
        """Note that every process raises, in this call."""
        self._agreed_turn = self.turn
        return error

    def close(self, call: str) -> None:
        """Note that this process leaves, end the line, and wait a moment for the others to leave too."""
        if self._lost is None:
            self._whereabouts.note_end(f"has left: {call}")
            for word in self._said:  # A failure that is told: the line would not end before the limit.
                with contextlib.suppress(RuntimeError):
                    word.work.wait(timeout_of(_FAREWELL))
            self._end()
            self._whereabouts.wait_for_ends(_FAREWELL)  # The notes may live in this process.
        self._lost = self._lost or "the line to the other processes is closed"
        self._said.clear()

    def _raise(self, error: BaseException) -> NoReturn:
        raise self.agreed(error)

    def _tell_failure(self, call: str, error: BaseException) -> None:
        """Say, in place of the next word, that the call has failed here; nobody waits for that."""
        if self._lost is not None or not self._has_spoken:
            return
        text = f"{type(error).__name__}: {error}"[: _ROOM // 2]
        # A note too, in case that the process ends before the word arrives.
        self._whereabouts.note_end(f"failed in {call}: {text}")
        self._said.append(Word(self, call, pickle.dumps((False, None, call, text))))

    def _lose(self, call: str, cause: RuntimeError) -> NoReturn:
        """Give up the line, find out who is missing, and raise."""
        self._lost = (
            f"the line to the other processes broke in an earlier call, {call}.\nStart them all again."
        )
        self._whereabouts.note_wait(call, self.turn)
        self._end()
        raise self.agreed(self._whereabouts.error(call, self.turn, cause)) from cause

    def _end(self) -> None:
        """Close the connections, which those who wait for this process are told by."""
        with contextlib.suppress(RuntimeError, ValueError):  # The user may have destroyed all groups.
            dist.destroy_process_group(self._words)
        # They are closed when nobody has them any more.
        self._tensors = None if self._tensors is self._words else self._tensors
        self._words = None


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
            self.work = link._words.allgather([self._rows], [torch.from_numpy(room)])

    def answers(self) -> list[Any]:
        """Wait for the others, and return what every process told, in order; see :meth:`Link.meet`."""
        if self._answers is None:
            self._answers = self._compared(self._received())
        return self._answers

    def settle(self) -> None:
        """Wait until the others have heard; what they said does not matter."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._received()

    def _received(self) -> list[bytes]:
        with _plain_tensors():
            return self._read()

    def _read(self) -> list[bytes]:
        link = self._link
        link.wait(self._call, self.work)
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
        failed = [(k, call, told) for k, (is_well, _, call, told) in enumerate(words) if not is_well]
        if failed:
            k, call, text = failed[0]
            link._raise(
                ProcessFailedError(
                    f"{self._call}: process {k} of {link.count} failed in {call}: {text}\n"
                    f"All processes leave the call; the first cause is what process {k} raised."
                )
            )
        calls = [(turn, call) for _, turn, call, _ in words]
        if any(call != calls[0] for call in calls):
            # Numbers only where they say more: one process made a call, and failed in it, alone.
            numbered = len({call for _, call in calls}) == 1
            lines = "".join(
                f"\n  process {k} is in {call}" + f", {_numbered(*place)}" * numbered
                for k, (place, call) in enumerate(calls)
            )
            link._raise(
                ReplicaMismatchError(
                    f"the processes of one axis made different calls:{lines}\n"
                    f"Every process must make the same calls in the same order."
                )
            )
        return [told for *_, told in words]


def _numbered(turn: int, token: Any) -> str:
    return f"its call {turn} of several processes" + (f", {token}" if token else "")


def _plain_tensors() -> AbstractContextManager[None]:
    """Let tensors be made that no torch.func transform around the call wraps."""
    return torch._C._DisableFuncTorch()


def timeout_of(seconds: float) -> datetime.timedelta:
    """Return a limit as torch.distributed takes it."""
    return datetime.timedelta(seconds=seconds)
