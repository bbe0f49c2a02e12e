"""Collectives give what JAX gives: values, gradients and tangents, one by one and in programs."""

import functools
from typing import Any

import golden_programs
import pytest
import torch
from golden import AXIS, CASES, DATA, Case, array, assert_agrees
from torch import Tensor
from torch.autograd import forward_ad

import funcpar as fp
from funcpar import tree

# Torch's own, where forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

every_case = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
_smooth = [case for case in CASES if case.x_bar is not None]
every_smooth_case = pytest.mark.parametrize("case", _smooth, ids=[case.id for case in _smooth])
_moving = [case for case in CASES if case.tangent is not None]
every_moving_case = pytest.mark.parametrize("case", _moving, ids=[case.id for case in _moving])


def test_all_of_the_data_is_used():
    assert len(CASES) == len({case.id for case in CASES}) == 131
    assert (len(_smooth), len(_moving)) == (92, 33)
    assert len(COMPOSITES) == 26
    programs = {name for name, value in vars(golden_programs).items() if name in DATA["programs"]}
    assert programs == set(DATA["programs"]) == {entry["program"] for entry in COMPOSITES}


@every_case
def test_a_collective_gives_what_jax_gives(case: Case):
    fp.set_cpu_devices(case.size)
    assert_agrees(case.mapped(case.x), case.y, case.exact)


@every_case
def test_a_collective_gives_the_same_bits_under_torch_func(case: Case):
    fp.set_cpu_devices(case.size)
    leaves, spec = tree.flatten(case.x)
    batched = [leaf[None] for leaf in leaves]
    outs = torch.func.vmap(lambda *some: tree.leaves(case.mapped(tree.unflatten(spec, some))))(*batched)
    for found, expected in zip(outs, tree.leaves(case.mapped(case.x)), strict=True):
        assert torch.equal(found[0], expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.constant is not None], ids=lambda case: case.id)
def test_a_constant_stays_a_number(case: Case):
    seen = []
    body = lambda x: seen.append(getattr(fp, case.collective)(case.constant, AXIS, **case.kwargs))
    fp.pmap(body, AXIS, in_axes=0, devices=case.size)(case.x)
    assert [type(value) for value in seen] == [type(case.constant)] * case.size


@every_smooth_case
def test_the_gradient_of_a_collective_is_jaxs_by_autograd(case: Case):
    fp.set_cpu_devices(case.size)
    call, leaves, cotangents = case.by_leaves()
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(call(*leaves), leaves, cotangents)
    assert_agrees(list(grads), tree.leaves(case.x_bar), case.exact)


@every_smooth_case
def test_the_gradient_of_a_collective_is_jaxs_by_torch_func(case: Case):
    fp.set_cpu_devices(case.size)
    call, leaves, cotangents = case.by_leaves()
    _, pull = torch.func.vjp(call, *leaves)
    assert_agrees(list(pull(tuple(cotangents))), tree.leaves(case.x_bar), case.exact)


@every_moving_case
def test_the_tangent_of_a_collective_is_jaxs_by_torch_func(case: Case):
    fp.set_cpu_devices(case.size)
    call, leaves, _ = case.by_leaves()
    _, tangents = torch.func.jvp(call, tuple(leaves), tuple(tree.leaves(case.tangent)))
    assert_agrees(list(tangents), tree.leaves(case.y_dot), case.exact)


@every_moving_case
def test_the_tangent_of_a_collective_is_jaxs_in_a_dual_level(case: Case):
    fp.set_cpu_devices(case.size)
    call, leaves, _ = case.by_leaves()
    with forward_ad.dual_level():
        outs = call(*map(forward_ad.make_dual, leaves, tree.leaves(case.tangent)))
        tangents = [forward_ad.unpack_dual(out).tangent for out in outs]
    assert_agrees(tangents, tree.leaves(case.y_dot), case.exact)


COMPOSITES = DATA["composites"]
every_composite = pytest.mark.parametrize("entry", COMPOSITES, ids=[entry["id"] for entry in COMPOSITES])
_graded = [entry for entry in COMPOSITES if entry["input_grads"]]
_pushed = [entry for entry in COMPOSITES if entry["tangents"]]
GRADS = {"fp": fp.grad, "torch.func": torch.func.grad}


def _arrays(nodes: dict[str, Any] | None) -> dict[str, Tensor]:
    return {name: array(node) for name, node in (nodes or {}).items()}


def _program(entry: dict[str, Any], grad: Any) -> Any:
    """Return a composite as a function of its stacked inputs."""
    fp.set_cpu_devices(entry["axis_size"])
    program = functools.partial(getattr(golden_programs, entry["program"]), **entry["params"], grad=grad)
    if entry["kind"] == "host":
        return program
    ins, outs = entry["in_axes"], entry["out_axes"]

    def body(*args: Tensor) -> dict[str, Tensor]:
        rows = [
            arg if axis is None else arg.squeeze(axis) for arg, axis in zip(args, ins.values(), strict=True)
        ]
        return {name: out.unsqueeze(outs[name]) for name, out in program(*rows).items()}

    return fp.pmap(body, "i", in_axes=tuple(ins.values()), out_axes=outs)


@pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)
@every_composite
def test_a_program_gives_what_jax_gives(entry: dict[str, Any], grad: Any):
    assert_agrees(_program(entry, grad)(*_arrays(entry["inputs"]).values()), _arrays(entry["outputs"]))


@pytest.mark.parametrize("entry", _graded, ids=[entry["id"] for entry in _graded])
def test_the_gradients_of_a_program_are_jaxs_by_autograd(entry: dict[str, Any]):
    inputs = {name: leaf.requires_grad_() for name, leaf in _arrays(entry["inputs"]).items()}
    outs, cotangents = _program(entry, fp.grad)(*inputs.values()), _arrays(entry["cotangents"])
    wanted = [inputs[name] for name in entry["input_grads"]]
    found = torch.autograd.grad([outs[name] for name in cotangents], wanted, list(cotangents.values()))
    assert_agrees(list(found), list(_arrays(entry["input_grads"]).values()))


@pytest.mark.parametrize("entry", _graded, ids=[entry["id"] for entry in _graded])
def test_the_gradients_of_a_program_are_jaxs_by_torch_func(entry: dict[str, Any]):
    inputs, cotangents = _arrays(entry["inputs"]), _arrays(entry["cotangents"])
    run = _program(entry, torch.func.grad)
    _, pull = torch.func.vjp(lambda *args: {k: run(*args)[k] for k in cotangents}, *inputs.values())
    found = dict(zip(inputs, pull(cotangents), strict=True))
    assert_agrees({name: found[name] for name in entry["input_grads"]}, _arrays(entry["input_grads"]))


@pytest.mark.parametrize("level", ["torch.func", "dual"])
@pytest.mark.parametrize("entry", _pushed, ids=[entry["id"] for entry in _pushed])
def test_the_tangents_of_a_program_are_jaxs(entry: dict[str, Any], level: str):
    inputs, given = _arrays(entry["inputs"]), _arrays(entry["tangents"])
    tangents = {name: given.get(name, torch.zeros_like(leaf)) for name, leaf in inputs.items()}
    run = _program(entry, fp.grad)
    if level == "dual":
        with forward_ad.dual_level():
            outs = run(*map(forward_ad.make_dual, inputs.values(), tangents.values()))
            found = {name: forward_ad.unpack_dual(out).tangent for name, out in outs.items()}
    else:
        _, found = torch.func.jvp(run, tuple(inputs.values()), tuple(tangents.values()))
    expected = _arrays(entry["output_tangents"])
    assert_agrees({name: found[name] for name in expected}, expected)
