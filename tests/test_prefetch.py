"""stage and prefetch: batches in order, made ahead, and nothing left behind."""

import os
import signal
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import funcpar as fp
from funcpar import _prefetch
from tests.cycles import no_cycle_collection

LIMIT = 30


def background() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "funcpar-prefetch"]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_prefetch_keeps_order_and_every_batch(count, size):
    assert list(fp.prefetch(range(count), size)) == list(range(count))
    assert background() == []


def test_prefetch_shuffles_as_the_loader_does_and_repeats_with_a_seed():
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True)
    torch.manual_seed(5)
    plain = [batch for (batch,) in loader]
    for _ in range(3):
        torch.manual_seed(5)
        found = [batch for (batch,) in fp.prefetch(loader)]
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_prefetch_draws_the_same_numbers_whatever_the_caller_draws():
    def noisy():
        for _ in range(6):
            yield torch.rand(3)

    def run():
        torch.manual_seed(1)
        return [(batch, torch.rand(2)) for batch in fp.prefetch(noisy())]

    first, second = run(), run()
    assert all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_prefetch_makes_the_next_batch_while_the_current_one_is_used():
    made = [threading.Event() for _ in range(3)]

    def batches():
        for k, event in enumerate(made):
            event.set()
            yield k

    for k in fp.prefetch(batches()):
        if k < 2:
            assert made[k + 1].wait(LIMIT)


def test_prefetch_raises_where_the_batch_would_have_come():
    def batches():
        yield 1
        yield 2
        raise KeyError("third")

    seen = []
    with pytest.raises(KeyError, match="third"):
        seen.extend(fp.prefetch(batches()))  # extend keeps what came before the error
    assert background() == []
    seen = []
    with pytest.raises(KeyError, match="third"):
        for batch in fp.prefetch(batches()):
            seen.append(batch)
    assert seen == [1, 2]


def test_prefetch_left_early_ends_its_thread_and_frees_its_batches():
    class Batch:
        pass

    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    def batches():
        for _ in range(100):
            batch = Batch()
            alive.add(batch)
            yield batch
            del batch

    for _ in fp.prefetch(batches(), size=2):
        break
    iterator = fp.prefetch(batches())
    next(iterator)
    iterator.close()
    del iterator, _
    assert background() == []
    assert len(alive) == 0


def test_prefetch_loads_in_the_callers_world():
    def modes():
        for _ in range(3):
            yield torch.is_grad_enabled()

    with torch.no_grad():
        assert list(fp.prefetch(modes())) == [False] * 3


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (0, ValueError, r"prefetch: size=0 keeps no batch ready"),
        (1.5, TypeError, r"prefetch: size=1\.5 is not"),
    ],
)
def test_prefetch_refuses_a_size_that_is_none(size, error, match):
    with pytest.raises(error, match=match):
        fp.prefetch([1], size)


def test_stage_copies_nothing_on_cpu_and_checks_devices():
    params = {"w": torch.ones(2), "n": 3}
    staged = fp.stage(params)
    assert staged == params
    assert staged["w"] is params["w"]
    with pytest.raises(ValueError, match=r"stage: devices=9 asks for 9 devices, and there are 4"):
        fp.stage(params, devices=9)


def test_a_loop_takes_as_long_as_the_longer_of_loader_and_pmapped_step():
    took, count = 0.05, 10
    step = fp.pmap(lambda x: x * time_passed(took), in_axes=0)

    def batches():
        for k in range(count):
            time.sleep(took)
            yield torch.full((8,), float(k))

    def loop(iterator):
        start = time.perf_counter()
        found = [step(x)[0].item() for x in iterator]
        return time.perf_counter() - start, found

    # Both sleep, so that it does not matter what else the machine does.
    runs = [loop(fp.prefetch(batches())) for _ in range(3)]
    assert all(found == [float(k) for k in range(count)] for _, found in runs)
    assert min(seconds for seconds, _ in runs) < 1.15 * took * (count + 1)  # The first batch is made before.
    assert loop(batches())[0] > 1.9 * took * count


def time_passed(seconds):
    time.sleep(seconds)
    return 1.0


def test_an_exception_of_the_iterable_goes_when_nobody_has_it():
    class Failure(Exception):
        pass

    def batches():
        yield 1
        raise Failure

    with no_cycle_collection():
        with pytest.raises(Failure) as caught:
            list(fp.prefetch(batches()))
        gone = weakref.ref(caught.value)
        del caught
        assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_iteration_that_a_forked_child_goes_on_with_is_refused_there():
    iterator = fp.prefetch(range(100))
    assert next(iterator) == 0
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        try:
            next(iterator)
        except RuntimeError as error:
            os._exit(0 if "forked after the iteration had begun.\nCall prefetch in" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(iterator) == list(range(1, 100))
    assert background() == []


def test_a_thread_that_is_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(_prefetch, "_LOOK", 0.05)
    monkeypatch.setattr(_prefetch._Background, "_run", lambda self: None)
    with pytest.raises(RuntimeError, match=r"the thread that makes .* is not there; .*\nCall prefetch in"):
        list(fp.prefetch(range(3)))
