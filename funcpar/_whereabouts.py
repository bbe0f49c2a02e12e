"""Where the processes are once the line between them is broken: each leaves a note in torch's store."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

from funcpar._errors import CollectiveTimeoutError, ProcessFailedError, ReplicaMismatchError

# How long a process that lost the others waits for their notes.
_GRACE = 2.0


class Store(Protocol):
    """What is needed of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Whereabouts:
    """The notes of all processes. The store lives in process 0 or with torchrun's agent, and may be gone."""

    def __init__(self, store: Store, index: int, count: int, timeout: float) -> None:
        self._store = store
        self._index = index
        self._count = count
        self._timeout = timeout

    def note_end(self, reason: str) -> None:
        """Say why this process will not come to the calls of the others."""
        self._set("ended", reason)

    def note_wait(self, call: str, turn: int) -> None:
        """Say in which call this process has lost the others, and the how many-th that is."""
        self._set("waits", f"{turn} {call}")

    def wait_for_ends(self, seconds: float) -> None:
        """Wait until the others have noted their ends, or lost this process, so many seconds at most."""
        end = time.monotonic() + seconds
        waiting = {k for k in range(self._count) if k != self._index}
        with contextlib.suppress(RuntimeError):  # The store is gone.
            while waiting and time.monotonic() < end:
                waiting = {k for k in waiting if not self._has_noted(k)}
                time.sleep(0.01 * bool(waiting))

    def _has_noted(self, index: int) -> bool:
        return any(self._store.check([f"{what}/{index}"]) for what in ("ended", "waits"))

    def error(self, call: str, turn: int, cause: BaseException) -> Exception:
        """Return what to raise in a call where the line broke: it names who is missing, and why."""
        waits, ended = self._collected(call, turn)
        where = "".join(f"\n  process {k} waits in {there}" for k, there in sorted(waits.items()))
        where += "".join(f"\n  process {k} {reason}" for k, reason in sorted(ended.items()))
        missing = [k for k in range(self._count) if k not in waits]
        several = len(missing) > 1
        names = f"process{'es' * several} {', '.join(map(str, missing))} of {self._count}"
        timed_out = "imed out" in str(cause) or "imeout" in str(cause)
        if timed_out and not missing and set(waits.values()) == {call}:
            return CollectiveTimeoutError(
                f"{call}: the processes came to it more than {self._timeout:g} seconds apart:{where}\n"
                f"Let them do the same work between calls, or set initialize(timeout=) higher."
            )
        if not missing:
            return ReplicaMismatchError(
                f"{call}: the processes wait for each other, in other calls or with other shapes:{where}\n"
                f"Every process must make the same calls in the same order."
            )
        if timed_out:
            return CollectiveTimeoutError(
                f"{call}: {names} did not come within {self._timeout:g} seconds:{where}\n"
                f"Every process must make the same calls; initialize(timeout=) sets the limit."
            )
        return ProcessFailedError(
            f"{call}: {names} {'are' if several else 'is'} gone ({_first_line(cause)}):{where}\n"
            f"See its own output, and start all again, from a checkpoint."
        )

    def _collected(self, call: str, turn: int) -> tuple[dict[int, str], dict[int, str]]:
        """Return where processes wait, and why others have ended, as far as they say so within a moment."""
        waits: dict[int, str] = {self._index: call}
        ended: dict[int, str] = {}
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and len(waits) + len(ended) < self._count:
            for k in range(self._count):
                if k not in waits and (note := self._get("waits", k)) is not None:
                    theirs, there = note.split(" ", 1)
                    waits[k] = there if int(theirs) == turn else f"{there} (its call {theirs}, not {turn})"
                elif k not in waits and (note := self._get("ended", k)) is not None:
                    ended[k] = note
            time.sleep(0.02)
        return waits, ended

    def _set(self, what: str, note: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{what}/{self._index}", note)

    def _get(self, what: str, index: int) -> str | None:
        key = f"{what}/{index}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None


def _first_line(error: BaseException) -> Any:
    return str(error).split("] ", 1)[-1].split(". This is", 1)[0]
