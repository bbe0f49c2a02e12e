"""donate_argnums: results in the memory of arguments, and arguments that say they are gone."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import funcpar as fp
from tests.cycles import settle


def step(params, x):
    grads = fp.psum(fp.grad(lambda p, x: (x @ p["w"] + p["b"]).square().mean())(params, x))
    return {name: params[name] - 0.1 * grads[name] for name in params}


def params():
    return {"w": torch.randn(3, 2), "b": torch.randn(2)}


def pointers(tree):
    return [leaf.data_ptr() for leaf in fp.tree.leaves(tree)]


def test_updated_params_live_where_the_old_ones_did(devices):
    plain, donating = fp.pmap(step, out_axes=None), fp.pmap(step, out_axes=None, donate_argnums=0)
    p, x = params(), torch.randn(9, 3)
    q = fp.tree.map(torch.clone, p)
    before = pointers(p)
    for _ in range(3):
        p, q = donating(p, x), plain(q, x)
        assert pointers(p) == before
        assert all(torch.equal(p[name], q[name]) for name in p)


def test_rows_live_where_the_old_ones_did(devices):
    double = fp.pmap(lambda s: 2 * s, in_axes=0, donate_argnums=0)
    state = torch.randn(9, 3)
    before, wanted = state.data_ptr(), 4 * state
    state = double(double(state))
    assert state.data_ptr() == before
    assert torch.equal(state, wanted)


def test_an_argument_that_is_given_by_name_is_donated_too():
    state = torch.randn(9, 3)
    before = state.data_ptr()
    out = fp.pmap(lambda scale, state: scale * state, donate_argnums=1)(2.0, state=state)
    assert out.data_ptr() == before
    with pytest.raises(RuntimeError, match="state was donated"):
        state.sum()


def test_gradients_take_the_memory_of_params_that_are_donated(devices):
    p, x = params(), torch.randn(9, 3)
    fun = fp.value_and_grad(lambda p, x: (x @ p["w"] + p["b"]).square().mean())
    value, grads = fun(p, x)
    before = pointers(p)
    found, found_grads = fp.pmap(fun, donate_argnums=0)(p, x)
    assert pointers(found_grads) == before
    torch.testing.assert_close((found, found_grads), (value, grads))


def test_one_shard_may_update_in_place_what_it_was_given():
    def update(p, x):
        p["w"].sub_(x.mean())
        return p

    p = {"w": torch.ones(3)}
    given, before = p["w"], p["w"].data_ptr()
    out = fp.pmap(update, devices=1, out_axes=None, donate_argnums=0)(p, torch.ones(4))
    assert out["w"].data_ptr() == before
    assert torch.equal(out["w"], torch.zeros(3))
    assert type(out["w"]) is torch.Tensor
    with pytest.raises(RuntimeError, match="was donated"):
        given.sum()


USES = {
    "add": lambda t: t + 1,
    "reversed add": lambda t: torch.ones(2) + t,
    "in place": lambda t: t.add_(1),
    "item": lambda t: t[0],
    "bool": bool,
    "function": lambda t: torch.cat([t, t]),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "aten": lambda t: torch.ops.aten.add(t, 1),
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "data": lambda t: t.data,
    "grad": lambda t: t.grad,
    "pointer": lambda t: t.data_ptr(),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "iterate": list,
    "optimizer": lambda t: torch.optim.SGD([t], lr=0.1),
    "another call": lambda t: fp.pmap(lambda p, x: p["w"] * x)({"w": t}, torch.ones(4, 2)),
}


@pytest.mark.parametrize("use", USES)
def test_using_a_donated_tensor_says_which_and_where(use):
    p = params()
    old = p["w"]
    fp.pmap(step, out_axes=None, donate_argnums=0)(p, torch.randn(9, 3))
    with pytest.raises(RuntimeError, match=r"pmap\(step\): params\['w'\] was donated to this call"):
        USES[use](old)
    assert isinstance(old, torch.Tensor)
    assert repr(old) == "<tensor of shape [3, 2], donated to pmap(step)>"


def refusals():
    base = torch.ones(4, 3)
    leaf = torch.ones(4, 3, requires_grad=True)
    array = torch.ones(4, 3)
    array.numpy()
    saved = torch.ones(4, 3)
    return {
        "a view": (base[:2], base, "shares its memory with another tensor, an array or a graph"),
        "its base": (base, base[:2], "shares its memory with another tensor, an array or a graph"),
        "an array": (array, None, "shares its memory with another tensor, an array or a graph"),
        "a graph": (
            saved,
            (leaf * saved).sum(),
            "shares its memory with another tensor, an array or a graph",
        ),
        "a leaf": (leaf, None, "requires a gradient, so that a graph needs it"),
        "a result": (leaf * 2, None, "requires a gradient, so that a graph needs it"),
        "sparse": (torch.ones(2, 2).to_sparse(), None, "has the layout torch.sparse_coo"),
        "a subclass": (torch.ones(2).as_subclass(Own), None, "is a Own, and only plain tensors can end"),
    }


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", refusals())
def test_what_others_can_see_is_refused_and_stays_what_it_was(kind):
    given, _kept, reason = refusals()[kind]
    with pytest.raises(ValueError, match=rf"pmap\(fun\): these arguments cannot be donated:\n  x  {reason}"):
        fp.pmap(fun, in_axes=0, donate_argnums=0)(given)
    assert type(given) in (torch.Tensor, Own)


def fun(x, y=None):
    return x * 1


def test_all_offenders_are_named_and_one_that_is_passed_twice():
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"\n  x\[0\]  is passed more than once\n  x\[1\]  is passed"):
        fp.pmap(lambda x: x[0], in_axes=0, donate_argnums=0)([x, x])
    with pytest.raises(ValueError, match=r"\n  x  is passed more than once"):
        fp.pmap(lambda x, y: x + y, in_axes=0, donate_argnums=0)(x, x)


def test_a_function_that_closes_over_what_is_donated_is_refused():
    w = torch.ones(3)
    with pytest.raises(ValueError, match=r"p is donated, and the function closes over it"):
        fp.pmap(lambda p, x: x * w, donate_argnums=0)(w, torch.ones(4, 3))


def test_donation_in_a_shard_or_under_a_transform_is_refused():
    inner = fp.pmap(fun, in_axes=0, donate_argnums=0)
    with pytest.raises(ValueError, match=r"donate_argnums in a shard, or under a torch\.func transform"):
        fp.pmap(lambda x: inner(x * 1), in_axes=0)(torch.ones(4))
    with pytest.raises(ValueError, match=r"donate_argnums in a shard, or under a torch\.func transform"):
        torch.func.vmap(inner)(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (2, ValueError, r"pmap\(fun\): donate_argnums=2, and the function has 2 parameters"),
        ("x", TypeError, r"pmap\(fun\): donate_argnums='x' is not an integer"),
    ],
)
def test_wrong_positions_are_refused_before_any_call(given, error, match):
    with pytest.raises(error, match=match):
        fp.pmap(fun, donate_argnums=given)


def test_a_call_that_fails_keeps_its_arguments():
    def fails(x):
        raise KeyError("no")

    x = torch.ones(4)
    with pytest.raises(KeyError):
        fp.pmap(fails, in_axes=0, donate_argnums=0)(x)
    assert torch.equal(x + 1, torch.full((4,), 2.0))


def test_a_call_whose_results_cannot_be_merged_keeps_no_tensor_that_was_written_to():
    x, y = torch.arange(8.0), torch.ones(8)
    with pytest.raises(fp.ReplicaMismatchError, match=r"output\[1\] was promised equal"):
        fp.pmap(
            lambda x, y: (2 * x, fp.axis_index() + y.mean()),
            in_axes=0,
            out_axes=(0, None),
            donate_argnums=(0, 1),
        )(x, y)
    with pytest.raises(RuntimeError, match="x was donated"):
        x.sum()
    assert torch.equal(y, torch.ones(8))


def test_memory_that_a_result_or_the_function_still_sees_is_not_written_to():
    kept = []

    def both(x):
        kept.append(x)
        return x * 2, x

    x = torch.arange(9.0)
    wanted = x.clone()
    double, same = fp.pmap(both, in_axes=0, donate_argnums=0)(x)
    assert torch.equal(double, 2 * wanted)
    assert torch.equal(same, wanted)
    assert torch.equal(torch.cat(sorted(kept, key=lambda part: part[0].item())), wanted)


def test_a_graph_that_needs_donated_rows_keeps_them():
    w = torch.randn(3, requires_grad=True)
    x = torch.randn(9, 3)
    wanted = x.sum(0)
    out = fp.pmap(lambda w, x: x * w, donate_argnums=1)(w, x)
    out.sum().backward()
    torch.testing.assert_close(w.grad, wanted)


def test_check_compares_a_function_that_is_donated_its_arguments():
    fp.check(fp.pmap(lambda s: 2 * s, in_axes=0, donate_argnums=0), torch.randn(9, 3))


def peak(call) -> float:
    """Return how far the process's memory rose above where it was during a call, in MB."""
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # Sets the peak back to what there is now.
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(what: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_the_peak_of_memory_falls_by_what_is_donated():
    fp.set_cpu_devices(2)
    size = 160  # MB: more than 32 for each shard, which the C library gives back to the system at once.
    state = {"now": torch.ones(size << 18)}

    def call(mapped):
        state["now"] = mapped(state["now"])

    plain = fp.pmap(lambda s: s * 1.5, in_axes=0)
    donating = fp.pmap(lambda s: s * 1.5, in_axes=0, donate_argnums=0)
    for mapped in (plain, donating):  # The first call starts workers.
        call(mapped)
    # How much the C library had kept differs from call to call; what is joined to is not needed again.
    saved = sorted(peak(lambda: call(plain)) - peak(lambda: call(donating)) for _ in range(3))
    assert saved[1] > 0.9 * size, saved
