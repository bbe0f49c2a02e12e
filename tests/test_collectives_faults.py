"""Shards that do not make the same calls end in an error on all of them, at once; nothing ever hangs."""

import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import funcpar as fp

Body = Callable[[int, Tensor], Any]
HERE = __file__


class Failed:
    """What each shard of a call got, and how long the call took."""

    def __init__(self) -> None:
        self.seen: dict[int, BaseException] = {}
        self.seconds = 0.0

    def record(self, body: Body) -> Callable[[Tensor], Any]:
        def recorded(x: Tensor) -> Any:
            try:
                return body(fp.axis_index(), x)
            except BaseException as error:
                self.seen[fp.axis_index()] = error
                raise

        return recorded


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"FUNCPAR_TIMEOUT": str(seconds)}):
        yield


def fail(
    body: Body, size: int = 3, error: type[BaseException] = fp.ReplicaMismatchError, match: str = ""
) -> Failed:
    """Run a body that must fail at once and leave the workers usable."""
    failed = Failed()
    mapped = fp.pmap(failed.record(body), "i", in_axes=0, out_axes="stack", devices=size)
    start = time.monotonic()
    with timeout(20), pytest.raises(error, match=match):
        mapped(torch.arange(float(2 * size)))
    failed.seconds = time.monotonic() - start
    assert failed.seconds < 2
    assert_usable(size)
    return failed


def assert_usable(size: int = 4) -> None:
    for _ in range(2):
        found = fp.pmap(fp.psum, in_axes=0, out_axes=None, devices=size)(torch.ones(size))
        assert found.tolist() == [size]


def test_another_operation_is_named_with_its_place():
    def body(rank: int, x: Tensor) -> Tensor:
        if rank == 1:
            return fp.pmax(x)  # other
        return fp.psum(x)  # usual

    start = inspect.getsourcelines(body)[1]
    failed = fail(
        body, match=r"the shards of one axis made different calls:\n  shard \d called .*\n  shard \d"
    )
    message = str(failed.seen[1])
    assert "shard 1 called pmax(float32[2]" in message
    assert f"{HERE}:{start + 2}" in message
    assert "called psum(float32[2]" in message
    assert f"{HERE}:{start + 3}" in message
    assert sorted(failed.seen) == [0, 1, 2]
    assert {type(error) for error in failed.seen.values()} == {fp.ReplicaMismatchError}
    assert len({str(error).split("\nraised in")[0] for error in failed.seen.values()}) == 1


GRADIENT = "a gradient in one shard"
MISMATCHES: dict[str, tuple[Body, str]] = {
    "shape": (lambda r, x: fp.psum(x[: 1 + (r == 0)]), r"psum\(float32\[2\].*\n.*psum\(float32\[1\]"),
    "dimensions": (lambda r, x: fp.psum(x[None] if r == 2 else x), r"float32\[2\].*\n.*float32\[1, 2\]"),
    "dtype": (lambda r, x: fp.psum(x.double() if r else x), r"psum\(float32\[2\].*\n.*psum\(float64\[2\]"),
    "structure": (lambda r, x: fp.psum([x, x] if r == 0 else (x, x)), r"\[\*, \*\].*\n.*\(\*, \*\)"),
    "keys": (lambda r, x: fp.psum({"ab"[r == 0]: x}), r"\{'b': \*\}.*\n.*\{'a': \*\}"),
    "None": (lambda r, x: fp.psum([x, None if r else x]), r"\[\*, \*\].*\n.*\[\*, None\]"),
    "number of leaves": (lambda r, x: fp.psum([x] * (1 + r)), r"shard \d called.*\n.*shard \d called"),
    "axis option": (lambda r, x: fp.all_gather(x, axis=r % 2), r"all_gather.*axis=\d.*\n.*axis=\d"),
    "tiled": (lambda r, x: fp.all_gather(x, tiled=r == 2), r"tiled=False.*\n.*tiled=True"),
    "perm": (lambda r, x: fp.ppermute(x, perm=[(0, 1 + r % 2)]), r"ppermute.*\(0, \d\).*\n.*\(0, \d\)"),
    "source": (lambda r, x: fp.pbroadcast(x, source=r), r"source=\d.*\n.*source=\d"),
    "groups": (
        lambda r, x: fp.psum(x, axis_index_groups=[[0, 1], [2]] if r else None),
        r"psum\(float32\[2\]\).*\n.*axis_index_groups=\(\(0, 1\), \(2,\)\)",
    ),
    "order": (
        lambda r, x: (fp.psum(x), fp.pmax(x)) if r else (fp.pmax(x), fp.psum(x)),
        r"shard 0 called pmax.*\n.*shard [12] called psum",
    ),
    "a number": (lambda r, x: fp.psum(1 if r else 1.0), r"psum\(float64\[\].*\n.*psum\(int64\[\]"),
    "early return": (
        lambda r, x: x if r == 1 else fp.psum(x),
        r"shard [02] called psum\(float32\[2\].*\n  shard 1 returned without it",
    ),
    "two calls": (
        lambda r, x: (fp.psum(x), fp.psum(x) if r == 2 else x),
        r"shard 2 called psum\(float32\[2\].*\n  shard [01] returned without it",
    ),
    "none at all": (lambda r, x: fp.psum(x) if r == 0 else x, r"shard 0 called psum.*\n  shard [12] return"),
    GRADIENT: (
        lambda r, x: fp.grad(lambda a: fp.psum(a).sum())(x) if r == 0 else fp.psum(x),
        r"shard 0 called backward.*\n  shard [12] returned without it",
    ),
    "another gradient": (
        lambda r, x: fp.grad(lambda a: (fp.psum(a) if r else fp.pmean(a)).sum())(x),
        r"shard 0 called pmean|shard [12] called psum",
    ),
}  # fmt: skip


def assert_told(failed: Failed, name: str) -> None:
    """Assert that every shard that had not returned got the error, with the place of the calls."""
    early = {"early return": {1}, "two calls": {0, 1}, "none at all": {1, 2}, GRADIENT: {1, 2}}
    assert set(failed.seen) == {0, 1, 2} - early.get(name, set())
    assert {type(error) for error in failed.seen.values()} == {fp.ReplicaMismatchError}
    for error in failed.seen.values():
        assert str(error).count("\n  shard ") == 2
        assert HERE in str(error)


@pytest.mark.parametrize("records", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_an_error_on_every_shard(name: str, records: bool):
    body, match = MISMATCHES[name]
    failed = fail(lambda rank, x: body(rank, x.clone().requires_grad_(records)), match=match)
    assert_told(failed, name)


@pytest.mark.parametrize("name", [name for name in MISMATCHES if "gradient" not in name])
def test_a_mismatch_under_a_transform_around_pmap_is_an_error_on_every_shard(name: str):
    body, match = MISMATCHES[name]
    failed = Failed()
    mapped = fp.pmap(failed.record(body), "i", in_axes=0, out_axes="stack", devices=3)
    with timeout(20), pytest.raises(fp.ReplicaMismatchError, match=match):
        torch.func.vjp(mapped, torch.arange(6.0))
    assert_told(failed, name)
    assert_usable(3)


def test_a_shard_that_raises_frees_the_others_with_its_own_error():
    def body(rank: int, x: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("mine")
        return fp.psum(x)

    failed = fail(body, error=KeyError, match="mine")
    assert sorted(failed.seen) == [0, 1, 2]
    assert failed.seen[1].__notes__[0].startswith("raised in shard 1 of 3 on cpu[1], in pmap(")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_shard_that_exits_frees_the_others(kind: type[BaseException]):
    def body(rank: int, x: Tensor) -> Tensor:
        if rank == 2:
            raise kind("enough")
        return fp.psum(x)

    assert sorted(fail(body, error=kind, match="enough").seen) == [0, 1, 2]


def test_a_shard_that_catches_a_mismatch_gets_it_again():
    def body(rank: int, x: Tensor) -> Tensor:
        for _ in range(3):
            try:
                fp.psum(x) if rank else fp.pmax(x)
            except fp.ReplicaMismatchError:
                continue
        return fp.psum(x)

    assert sorted(fail(body, match="different calls").seen) == [0, 1, 2]


class Meets(torch.autograd.Function):
    """A function of the user's whose backward calls a collective, or what one shard does instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.call = call
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.call(grad), None


def broken(grad: Tensor) -> Tensor:
    raise KeyError("in backward")


BACKWARDS: dict[str, tuple[Callable[[Tensor], Tensor], type[BaseException], str]] = {
    "another operation": (fp.pmax, fp.ReplicaMismatchError, r"shard 1 called pmax"),
    "another shape": (
        lambda g: fp.psum(g[:1]),
        fp.ReplicaMismatchError,
        r"shard 1 called psum\(float32\[1\]",
    ),
    "no call": (lambda g: g, fp.ReplicaMismatchError, r"shard [02] called psum.*\n.*shard 1|shard 1"),
    "a failure": (broken, KeyError, r"in backward"),
    "two calls": (lambda g: fp.psum(fp.psum(g)), fp.ReplicaMismatchError, r"shard 1 called psum"),
}


@pytest.mark.parametrize("way", ["inside", "fused", "outside"])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_mismatch_in_backward_is_an_error_at_once(name: str, way: str):
    other, error, match = BACKWARDS[name]

    def loss(x: Tensor) -> Tensor:
        return Meets.apply(x, other if fp.axis_index() == 1 else fp.psum).sum()

    ways = {
        "inside": fp.pmap(lambda x: fp.grad(loss)(x)[None], in_axes=0, out_axes="stack", devices=3),
        "fused": fp.pmap(fp.grad(loss), in_axes=0, out_axes="sum", devices=3),
        "outside": fp.grad(fp.pmap(loss, in_axes=0, out_axes="sum", devices=3)),
    }
    start = time.monotonic()
    with timeout(20), pytest.raises(error, match=match):
        ways[way](torch.arange(6.0))
    assert time.monotonic() - start < 2
    assert_usable(3)


@pytest.mark.parametrize("way", ["inside", "fused", "outside"])
def test_a_collective_in_the_users_backward_works_where_all_shards_make_it(way: str):
    loss = lambda x: Meets.apply(x, fp.psum).sum()
    found = {
        "inside": fp.pmap(lambda x: fp.grad(loss)(x), in_axes=0, out_axes=0, devices=3),  # noqa: PLW0108
        "fused": fp.pmap(fp.grad(loss), in_axes=0, out_axes="sum", devices=3),
        "outside": fp.grad(fp.pmap(loss, in_axes=0, out_axes="sum", devices=3)),
    }[way](torch.arange(6.0))
    assert found.tolist() == [3.0] * 6


def test_a_hook_that_one_shard_alone_communicates_in_is_a_mismatch():
    def loss(x: Tensor) -> Tensor:
        y = x * 2
        if fp.axis_index() == 0:
            y.register_hook(fp.psum)
        return fp.psum(y).sum()

    with (
        timeout(20),
        pytest.raises(fp.ReplicaMismatchError, match=r"shard 0 called psum.*|transpose of psum"),
    ):
        fp.pmap(fp.grad(loss), in_axes=0, out_axes="sum")(torch.ones(4))
    assert_usable()


def test_a_shard_that_does_not_come_in_time_is_named():
    awake = threading.Event()

    def body(x: Tensor) -> Tensor:
        if fp.axis_index() == 2:
            awake.wait(timeout=20)
        return fp.psum(x)

    waiting = (
        r"shard 2 of 4 did not come within 0.2 seconds:"
        r"\n  shard 0 waits in psum\(float32\[1\].*:\d+\n  shard 1 waits.*\n  shard 3 waits"
    )
    start = time.monotonic()
    releaser = threading.Timer(0.6, awake.set)  # Later than the limit of the others.
    releaser.start()
    with timeout(0.2), pytest.raises(fp.CollectiveTimeoutError, match=waiting):
        fp.pmap(body, in_axes=0)(torch.ones(4))
    releaser.join(timeout=20)
    assert time.monotonic() - start < 3
    assert_usable()


def test_two_callers_with_collectives_on_the_same_devices_never_wait_for_each_other():
    calls = int(os.environ.get("FUNCPAR_TEST_CALLS", "150"))
    wrong: list[Any] = []

    def body(w: Tensor, x: Tensor) -> Tensor:
        total = fp.psum((x * w).sum())
        return fp.pmean(x.mean()) * w + fp.ppermute(total, perm=[(k, (k + 1) % 4) for k in range(4)])

    def caller(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        mapped = fp.pmap(body, in_axes=(None, 0), out_axes=None)
        step = fp.pmap(fp.grad(body), in_axes=(None, 0))
        for k in range(calls):
            w, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((), (8,)))
            expected = x.mean() * w + (x * w).sum()
            found, slope = mapped(w, x), step(w, x)
            if not torch.allclose(found, expected) or not torch.allclose(slope, x.mean() + x.sum()):
                wrong.append((seed, k, found, expected))

    threads = [threading.Thread(target=caller, args=(seed,), daemon=True) for seed in (1, 2)]
    with timeout(30):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
