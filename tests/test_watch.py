"""Who waits too long is rescued; who does not is left alone."""

import threading
import time

import pytest

from funcpar import _watch
from funcpar._watch import Watch, watched

LIMIT = 60.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Return the watch of the process, a new one."""
    new = Watch()
    monkeypatch.setattr(_watch, "_watch", new)
    return new


def test_a_block_that_takes_too_long_is_rescued(watch):
    rescued = threading.Event()
    with watched(rescued.set):
        assert rescued.wait(LIMIT)
    assert not watch.running


def test_short_blocks_are_not_and_each_counts_alone(watch):
    rescued: list[int] = []
    for number in range(100):  # Longer together than a watch waits.
        with watched(lambda: rescued.append(number)):
            time.sleep(0.0005)
    assert not watch.running
    assert len(rescued) < 10  # This process itself may have had to wait.


def test_a_watch_sleeps_while_nothing_runs_and_wakes_up(watch):
    for _ in range(2):
        with watched(lambda: None):
            assert watch.is_needed.is_set()
        deadline = time.monotonic() + LIMIT
        while watch.is_needed.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rescued = threading.Event()
        with watched(rescued.set):
            assert rescued.wait(LIMIT)


def test_a_rescue_that_fails_is_tried_again(watch):
    rescued = threading.Event()
    tries: list[int] = []

    def rescue() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("can't start new thread")
        rescued.set()

    with watched(rescue):
        assert rescued.wait(LIMIT)
