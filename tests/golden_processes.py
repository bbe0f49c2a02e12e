"""The golden cases over several processes, each with its rows: run in every process."""

from typing import Any

import golden
import golden_programs
import torch
from golden import AXIS, CASES, DATA, Case, assert_agrees
from torch import Tensor
from torch.autograd import forward_ad

import funcpar as fp
from funcpar import tree


def _own(values: Any, size: int) -> Any:
    """Return this process's part of values that are stacked over the shards."""
    index, count = fp.distributed.process_index(), fp.distributed.process_count()
    here = slice(index * size // count, (index + 1) * size // count)
    return tree.map(lambda leaf: leaf[here], values)


def check_case(case: Case) -> set[str]:
    """Compare values, gradients by both ways, and tangents by both ways; say which there were."""
    fp.set_cpu_devices(case.size // fp.distributed.process_count())
    mapped = fp.pmap(case.body, AXIS, in_axes=0, out_axes=0)
    leaves, spec = tree.flatten(_own(case.x, case.size))
    assert_agrees(mapped(tree.unflatten(spec, leaves)), _own(case.y, case.size), case.exact)
    smooth = [k for k, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]
    some = [leaves[k] for k in smooth]

    def call(*new: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for k, leaf in zip(smooth, new, strict=True):
            given[k] = leaf
        outs = tree.leaves(mapped(tree.unflatten(spec, given)))
        return tuple(out for out in outs if out.is_floating_point() or out.is_complex())

    done = {"values"}
    if case.x_bar is not None:
        cotangents, wanted = tree.leaves(_own(case.ct, case.size)), tree.leaves(_own(case.x_bar, case.size))
        inputs = [leaf.clone().requires_grad_() for leaf in some]
        assert_agrees(list(torch.autograd.grad(call(*inputs), inputs, cotangents)), wanted, case.exact)
        _, pull = torch.func.vjp(call, *some)
        assert_agrees(list(pull(tuple(cotangents))), wanted, case.exact)
        done |= {"autograd", "vjp"}
    if case.tangent is not None:
        tangents, wanted = (
            tree.leaves(_own(case.tangent, case.size)),
            tree.leaves(_own(case.y_dot, case.size)),
        )
        assert_agrees(list(torch.func.jvp(call, tuple(some), tuple(tangents))[1]), wanted, case.exact)
        with forward_ad.dual_level():
            outs = call(*map(forward_ad.make_dual, some, tangents))
            found = [forward_ad.unpack_dual(out).tangent for out in outs]
        assert_agrees(found, wanted, case.exact)
        done |= {"jvp", "dual"}
    return done


def check_cases(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Check every case of these axis sizes; return how often each was checked, and what went wrong."""
    fp.distributed.initialize(timeout=30)
    counts: dict[str, Any] = {"failed": []}
    for case in CASES:
        if case.size not in sizes:
            continue
        try:
            for done in check_case(case):
                counts[done] = counts.get(done, 0) + 1
        except Exception as error:
            counts["failed"].append(f"{case.id}: {type(error).__name__}: {error}")
    fp.distributed.shutdown()
    return counts


def _part(leaf: Tensor, axis: int | None, size: int) -> Tensor:
    """Return this process's part of a leaf that shards split along an axis."""
    if axis is None:
        return leaf
    count = fp.distributed.process_count()
    return leaf.chunk(count, axis)[fp.distributed.process_index()] if count <= size else leaf


def check_program(entry: dict[str, Any]) -> None:
    """Compare outputs and gradients of one program."""
    size = entry["axis_size"]
    fp.set_cpu_devices(size // fp.distributed.process_count())
    ins, outs = entry["in_axes"], entry["out_axes"]

    def body(*args: Tensor) -> dict[str, Tensor]:
        rows = [
            arg if axis is None else arg.squeeze(axis) for arg, axis in zip(args, ins.values(), strict=True)
        ]
        program = getattr(golden_programs, entry["program"])
        found = program(*rows, **entry["params"], grad=fp.grad)
        return {name: out.unsqueeze(outs[name]) for name, out in found.items()}

    run = fp.pmap(body, "i", in_axes=tuple(ins.values()), out_axes=outs)
    inputs = {name: _part(golden.array(node), ins[name], size) for name, node in entry["inputs"].items()}
    wanted = {name: _part(golden.array(node), outs[name], size) for name, node in entry["outputs"].items()}
    assert_agrees(run(*inputs.values()), wanted)
    if entry["input_grads"]:
        inputs = {name: leaf.clone().requires_grad_() for name, leaf in inputs.items()}
        found = run(*inputs.values())
        cotangents = {
            name: _part(golden.array(node), outs[name], size) for name, node in entry["cotangents"].items()
        }
        grads = torch.autograd.grad(
            [found[name] for name in cotangents],
            [inputs[name] for name in entry["input_grads"]],
            list(cotangents.values()),
        )
        assert_agrees(
            list(grads),
            [_part(golden.array(node), ins[name], size) for name, node in entry["input_grads"].items()],
        )


def check_programs(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Check every mapped program of these axis sizes; return how many, and what went wrong."""
    fp.distributed.initialize(timeout=30)
    counts: dict[str, Any] = {"programs": 0, "gradients": 0, "failed": []}
    for entry in DATA["composites"]:
        if entry["axis_size"] in sizes and entry["kind"] != "host":
            try:
                check_program(entry)
                counts["programs"] += 1
                counts["gradients"] += bool(entry["input_grads"])
            except Exception as error:
                counts["failed"].append(f"{entry['id']}: {type(error).__name__}: {error}")
    fp.distributed.shutdown()
    return counts
