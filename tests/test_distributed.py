"""Several processes give the numbers of one: values, derivatives, training, collectives, randomness."""

import copy
import functools
import math
import os
import sys
from typing import Any

import golden_processes
import processes
import pytest
import several_processes
import torch

import funcpar as fp
from funcpar import tree

# Processes, devices of each, rows of each.
LAYOUTS = {
    "2 x 2": (2, 2, (7, 6)),
    "2 x 2, one without rows": (2, 2, (13, 0)),
    "4 x 1": (4, 1, (4, 3, 3, 3)),
}
thorough = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="a long campaign")
every_layout = pytest.mark.parametrize(("count", "devices", "rows"), LAYOUTS.values(), ids=LAYOUTS)
ALONE = (several_processes.ROWS,)
STEPS = 50


def assert_close(found: Any, expected: Any, where: str, limit: float = 1e-12) -> None:
    """Assert that two trees agree to a part of a leaf's largest entry."""
    leaves, spec = tree.flatten(expected)
    columns = zip(tree.flatten_like(spec, found, where), leaves, strict=True)
    for one, other in [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in columns]:
        assert one.shape == other.shape, where
        if other.numel():
            assert (one - other).abs().max() <= limit * max(1.0, float(other.abs().max())), where


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process computes with one device, and with four."""
    fp.set_cpu_devices(1)
    found = {"training": several_processes.train(ALONE, STEPS), "results": several_processes.results(ALONE)}
    fp.set_cpu_devices(4)
    more = {"training on 4": several_processes.train(ALONE, STEPS), "shards": several_processes.shards(ALONE)}
    return found | more


@functools.cache
def everything(count: int, devices: int, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """What each process of a layout computes."""
    return processes.values(several_processes.everything, count, devices, rows, STEPS)


def each(what: str, *layout: Any) -> list[Any]:
    return [theirs[what] for theirs in everything(*layout)]


@every_layout
def test_training_gives_the_numbers_of_one_process_and_of_one_device(alone, count, devices, rows):
    found = each("training", count, devices, rows)
    for losses, params in found:
        for other in ("training", "training on 4"):
            assert_close(losses, alone[other][0], other, 1e-10)
            assert_close(params, alone[other][1], other, 1e-10)
        for name, param in params.items():  # The same bits in all processes, or they would drift apart.
            assert torch.equal(param, found[0][1][name])


STAY = ("rows", "grad of rows")


@every_layout
def test_values_and_derivatives_are_those_of_one_process(alone, count, devices, rows):
    expected = alone["results"]
    found = [copy.deepcopy(theirs) for theirs in each("results", count, devices, rows)]
    for name in STAY:
        assert_close(torch.cat([theirs.pop(name) for theirs in found]), expected[name], name)
    assert_close(torch.cat([theirs["several"].pop("b") for theirs in found]), expected["several"]["b"], "b")
    assert_close(
        torch.cat([theirs["fused, aux"][0][1] for theirs in found]), expected["fused, aux"][0][1], "aux"
    )
    for theirs in found:
        (value, _), grads = theirs.pop("fused, aux")
        assert_close((value, grads), (expected["fused, aux"][0][0], expected["fused, aux"][1]), "fused, aux")
        for name, leaf in theirs.items():
            wanted = expected[name]
            wanted = {k: v for k, v in wanted.items() if k != "b"} if name == "several" else wanted
            assert_close(leaf, wanted, name)


@every_layout
def test_shards_know_the_axis_of_all_processes(alone, count, devices, rows):
    found = each("shards", count, devices, rows)
    sizes = [max(1, min(devices, n)) for n in rows]
    total = sum(sizes)
    for process, (theirs, own) in enumerate(zip(found, rows, strict=True)):
        first = sum(sizes[:process])
        assert theirs["index"].tolist() == sorted(theirs["index"].tolist())
        assert set(theirs["index"].tolist()) == set(range(first, first + sizes[process]) if own else ())
        assert theirs["size"] == total and len(theirs["gathered"]) == total
        assert theirs["gathered"].sum() == several_processes.ROWS
        assert theirs["psum, local"] == own
        for name in ("pmean", "large"):
            assert_close(theirs[name], alone["shards"][name], name)
        assert_close(theirs["batch norm"][1], alone["shards"]["batch norm"][1], "running statistics")
    normed = torch.cat([theirs["batch norm"][0] for theirs in found])
    assert_close(normed, alone["shards"]["batch norm"][0], "batch norm")


def test_every_shard_of_every_process_has_a_dropout_mask_of_its_own():
    found, again = (each(name, *LAYOUTS["2 x 2"]) for name in ("shards", "shards again"))
    masks = [theirs["dropout"] for theirs in found]
    firsts = [masks[0][0], masks[0][4], masks[1][0], masks[1][3]]
    assert len({tuple(mask.tolist()) for mask in firsts}) == 4
    assert all(torch.equal(one["dropout"], other["dropout"]) for one, other in zip(found, again, strict=True))
    assert torch.equal(found[0]["dropout, fused"], found[1]["dropout, fused"])


@pytest.mark.parametrize(
    ("count", "sizes", "expected"),
    [
        (2, (4,), {"values": 63, "autograd": 44, "vjp": 44, "jvp": 17, "dual": 17}),
        (2, (2,), {"values": 34, "autograd": 25, "vjp": 25, "jvp": 6, "dual": 6}),
        pytest.param(
            4, (4,), {"values": 63, "autograd": 44, "vjp": 44, "jvp": 17, "dual": 17}, marks=thorough
        ),
    ],
    ids=["2 x 2", "2 x 1", "4 x 1"],
)
def test_collectives_give_what_jax_gives(count: int, sizes: tuple[int, ...], expected: dict[str, int]):
    for found in processes.values(golden_processes.check_cases, count, sizes, timeout=200):
        assert found == {**expected, "failed": []}


@pytest.mark.parametrize(
    ("count", "sizes", "programs", "gradients"),
    [(2, (2, 4), 19, 8), (4, (4,), 14, 5)],
    ids=["over 2 processes", "over 4 processes"],
)
def test_programs_give_what_jax_gives(count: int, sizes: tuple[int, ...], programs: int, gradients: int):
    for found in processes.values(golden_processes.check_programs, count, sizes, timeout=200):
        assert found == {"programs": programs, "gradients": gradients, "failed": []}


def test_a_process_sends_its_gradients_and_nothing_else():
    for sent, size in processes.values(several_processes.bytes_of_a_step, 2, 1):
        assert size < sent <= size + 9 * 8  # What rides behind them: the value, the weight, and the like.


def test_gradients_leave_by_the_route_of_their_own_call():
    # Which argument has the rows, and what a partial holds, tells calls apart as much as shapes do.
    for theirs in processes.values(several_processes.calls_that_look_alike, 2, 2, (7, 6)):
        for found, expected in theirs:
            assert_close(found, expected, "a call that looks like another")


def test_gradients_are_summed_by_name_whatever_the_order_of_keys():
    for found in processes.values(several_processes.orders_of_keys, 2, 2, (7, 6)):
        for step, backward, expected in zip(found[::3], found[1::3], found[2::3], strict=True):
            assert_close(step, expected, "step")
            assert_close(backward, expected, "backward")


def test_infinite_complex_gradients_have_their_imaginary_parts():
    for found in processes.values(several_processes.complex_gradients, 2, 1):
        assert found["a"].tolist() == [complex(math.inf, 0.0)] * 2 and found["b"].tolist() == [1.0] * 2


def test_weights_may_be_out_of_the_range_of_the_gradients():
    for found in processes.values(several_processes.extreme_weights, 2, 1):
        *steps, first, second = found
        assert len(steps) == 8 and all(each["value"].abs() < 1e-5 for each in steps)
        assert all(each["grad"].abs().max() < 1e-5 for each in steps)
        text = "pmap(loss_fn): the weights of all processes add up to infinity.\nScale them down."
        assert first == second == {"error": text}


def test_values_are_broadcast_from_one_process():
    for index, (found, given) in enumerate(processes.values(several_processes.broadcast, 3, 1)):
        assert torch.equal(found["w"], torch.full((2,), 1.0))
        assert found["steps"] == 1 and given.item() == index


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such a policy")
def test_threads_of_gloo_take_no_core_from_others():
    for policies in processes.values(several_processes.policies, 2, 1):
        assert len(policies["new"]) >= 2 and set(policies["new"]) == {os.SCHED_BATCH}
        assert policies["before"] and set(policies["before"]) == {os.SCHED_OTHER}
