"""Devices are named by rank, counted from the environment or the program, and found in every spelling."""

from typing import Any

import processes
import pytest
import torch

import funcpar as fp

ROWS = torch.arange(8.0)


def ranks_of(devices: Any) -> list[int]:
    """Return the ranks of the devices that a call on `devices` runs on."""
    kept = fp.pmap(lambda x: x, in_axes=0, out_axes="shards", devices=devices)(ROWS)
    return [device.rank for device in kept.devices]


def test_devices_have_ranks_in_order_and_show_them() -> None:
    devices = fp.devices()
    assert repr(devices) == "(cpu[0], cpu[1], cpu[2], cpu[3])"
    assert [device.rank for device in devices] == [0, 1, 2, 3]
    assert all(device.torch_device == torch.device("cpu") for device in devices)
    assert fp.devices() is devices


def test_devices_are_equal_by_value_and_hashable() -> None:
    first = fp.devices()
    fp.set_cpu_devices(4, threads_per_device=1)
    assert fp.devices() == first
    assert len({*first, *fp.devices()}) == 4


def test_set_cpu_devices_changes_count_and_threads() -> None:
    fp.set_cpu_devices(7, threads_per_device=2)
    assert len(fp.devices()) == 7
    assert {device.threads for device in fp.devices()} == {2}
    assert ranks_of(None) == [0, 1, 2, 3, 4, 5, 6]


def test_set_cpu_devices_shares_the_callers_threads_by_default() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        fp.set_cpu_devices(3)
        assert {device.threads for device in fp.devices()} == {2}
        fp.set_cpu_devices(9)
        assert {device.threads for device in fp.devices()} == {1}
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)


def test_function_mapped_before_a_change_of_devices_runs_on_the_new_ones() -> None:
    kept = fp.pmap(lambda x: x, in_axes=0, out_axes="shards")
    assert len(kept(ROWS).parts) == 4
    fp.set_cpu_devices(2)
    assert len(kept(ROWS).parts) == 2


DEVICE = fp.Device(2, torch.device("cpu"), 1)
NAMED: list[tuple[Any, list[int]]] = [
    (None, [0, 1, 2, 3]),
    (1, [0]),
    (3, [0, 1, 2]),
    ([1], [1]),
    ([3, 0, 2], [3, 0, 2]),
    ((2, 1), [2, 1]),
    (range(1, 4), [1, 2, 3]),
    ([0, 0, 1, 0], [0, 0, 1, 0]),
    (DEVICE, [2]),
    ([DEVICE, 0], [2, 0]),
    ("cpu", [0]),
    ("cpu:3", [3]),
    (["cpu:1", "cpu"], [1, 0]),
    (torch.device("cpu"), [0]),
    (torch.device("cpu", 2), [2]),
    ([torch.device("cpu:1"), "cpu:0", 3, DEVICE], [1, 0, 3, 2]),
]


@pytest.mark.parametrize(("given", "ranks"), NAMED, ids=str)
def test_devices_are_found_in_every_spelling(given: Any, ranks: list[int]) -> None:
    assert ranks_of(given) == ranks
    kept = fp.pmap(lambda x: x, in_axes=0, out_axes="shards", devices=given)(ROWS)
    assert torch.equal(kept.gather(), ROWS)


def test_devices_given_as_an_iterator_last_for_every_call() -> None:
    step = fp.pmap(lambda x: x, in_axes=0, out_axes="shards", devices=iter([1, 0]))
    assert [[device.rank for device in step(ROWS).devices] for _ in range(2)] == [[1, 0], [1, 0]]


def test_device_of_an_older_setting_is_found_by_its_rank() -> None:
    old = fp.devices()[1]
    fp.set_cpu_devices(2, threads_per_device=3)
    assert ranks_of([old]) == [1]


ALL = r"'cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (
        5,
        ValueError,
        rf"devices=5 asks for 5 devices, and there are 4: {ALL}.\n"
        r"Give a count from 1 to 4, or make more with fp.set_cpu_devices\(5\).",
    ),
    (0, ValueError, r"devices=0 asks for 0 devices, and there are 4"),
    (-1, ValueError, r"devices=-1 asks for -1 devices, and there are 4"),
    (
        True,
        TypeError,
        r"devices=True is no count, device or list of devices.\n"
        r"Give a count \(devices=2\), or a list such as devices=\[0, 1\] or devices=\['cpu:0', 'cpu:1'\].",
    ),
    (2.0, TypeError, r"devices=2.0 is no count, device or list of devices"),
    ([], ValueError, rf"devices is empty.\nName at least one of {ALL}."),
    (
        [0, True],
        TypeError,
        rf"True in devices is not a device.\n"
        rf"Give an index, a fp.Device, a torch.device or a string, one of {ALL}.",
    ),
    ([0, None], TypeError, r"None in devices is not a device"),
    ([1.5], TypeError, r"1.5 in devices is not a device"),
    (
        [0, 4],
        ValueError,
        rf"there is no device 4; there are {ALL}.\n"
        r"Name one of those, or make more with fp.set_cpu_devices\(count\).",
    ),
    ([-1], ValueError, r"there is no device -1; there are"),
    ("cpu:4", ValueError, r"there is no device 'cpu:4'; there are"),
    ("cuda:0", ValueError, r"there is no device 'cuda:0'; there are"),
    (torch.device("meta"), ValueError, r"there is no device device\(type='meta'\); there are"),
    ([fp.Device(9, torch.device("cpu"))], ValueError, r"there is no device cpu\[9\]; there are"),
    (
        "gpu zero",
        ValueError,
        rf"'gpu zero' is no device name; there are {ALL}.\nWrite a type and an index, such as 'cpu:1'.",
    ),
    ("", ValueError, r"'' is no device name; there are"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED, ids=lambda v: str(v)[:20])
def test_devices_that_are_not_there_are_refused_with_those_that_are(
    given: Any, kind: type[Exception], message: str
) -> None:
    if given == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is one")

    def train_step(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing may start")

    with pytest.raises(kind, match=r"^pmap\(train_step\): " + message):
        fp.pmap(train_step, in_axes=0, devices=given)(ROWS)
    with pytest.raises(kind, match=r"^parallel_call: " + message):
        fp.parallel_call(train_step, [ROWS], given)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((0,), ValueError, r"^set_cpu_devices: count=0 is less than 1.\nGive a positive integer.$"),
        ((-3,), ValueError, r"count=-3 is less than 1"),
        ((True,), TypeError, r"^set_cpu_devices: count=True is not an integer.\nGive a positive integer.$"),
        ((2.0,), TypeError, r"count=2.0 is not an integer"),
        (("2",), TypeError, r"count='2' is not an integer"),
        ((2, 0), ValueError, r"threads_per_device=0 is less than 1"),
        ((2, 1.0), TypeError, r"threads_per_device=1.0 is not an integer"),
    ],
)
def test_set_cpu_devices_refuses_what_is_no_count(arguments: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        fp.set_cpu_devices(*arguments)
    assert len(fp.devices()) == 4


def counted() -> tuple[int, int]:
    return len(fp.devices()), len(fp.pmap(lambda x: x, in_axes=0, out_axes="shards")(torch.ones(9)).parts)


def test_environment_sets_the_number_of_devices() -> None:
    assert processes.values(counted, 1, FUNCPAR_CPU_DEVICES="3") == [(3, 3)]


def test_environment_that_is_no_count_is_refused() -> None:
    (outcome,) = processes.run(counted, 1, FUNCPAR_CPU_DEVICES="-2")
    assert outcome.error == (
        "ValueError: FUNCPAR_CPU_DEVICES='-2' is not a positive integer.\n"
        "Set it to the number of virtual CPU devices, or unset it."
    )
