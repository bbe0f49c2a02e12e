"""Batch normalisation over all shards: torch's BatchNorm on one device, in everything that it does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import funcpar as fp
from funcpar._group import Group

D = torch.float64
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
IN, OUT = (None, None, 0), (0, None)


def pair(
    channels: int = 3, dims: int = 2, dtype: torch.dtype = D, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a BatchNorm with parameters of no special value, and its twin."""
    norm = NORMS[dims](channels, dtype=dtype, **options)
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0)
    return norm, fp.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))


def difference(one: Any, other: Any) -> float:
    """Return the largest difference, relative to a leaf's largest entry."""
    pairs = zip(fp.tree.leaves(one), fp.tree.leaves(other), strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in pairs)


def losses(**options: Any) -> tuple[dict[str, Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """Return params, and the same loss over a BatchNorm and over its twin."""
    made = [fp.functionalize_with_buffers(norm) for norm in pair(**options)]

    def over(apply: Callable[..., Any], buffers: dict[str, Tensor]) -> Callable[..., Tensor]:
        return lambda params, x, t: (torch.sin(apply(params, buffers, x)[0]) * t).mean()

    return made[0][1], *(over(apply, buffers) for apply, _, buffers in made)


@pytest.mark.parametrize("rows", [2, 3, 7, 13])
@pytest.mark.parametrize("dims", NORMS)
def test_values_and_running_statistics_are_those_of_the_whole_batch(devices, dims, rows):
    norm, sync = pair(dims=dims)
    apply, params, buffers = fp.functionalize_with_buffers(sync)
    step = fp.pmap(apply, in_axes=IN, out_axes=OUT)
    for turn in range(3):
        x = torch.randn(rows, 3, *[2] * (dims - 2), dtype=D) * 2 + turn
        out, buffers = step(params, buffers, x)
        assert difference(out, norm(x)) < 1e-12
    assert int(buffers["num_batches_tracked"]) == int(norm.num_batches_tracked) == 3
    assert difference(buffers, dict(norm.named_buffers())) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.0},
        {"affine": False},
        {"bias": False},
        {"eps": 0.3},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_every_option_is_torchs(options):
    norm, sync = pair(dims=4, **options)
    apply, params, buffers = fp.functionalize_with_buffers(sync)
    step = fp.pmap(apply, in_axes=IN, out_axes=OUT)
    for _ in range(3):
        x = torch.randn(6, 3, 2, 3, dtype=D)
        out, buffers = step(params, buffers, x)
        assert difference(out, norm(x)) < 1e-12
    for name, buffer in norm.named_buffers():
        assert difference(buffers[name], buffer) < 1e-12
    # Without running statistics batch statistics are used in eval mode too.
    x = torch.randn(6, 3, 2, 3, dtype=D)
    norm.eval(), sync.eval()
    assert difference(step(params, buffers, x)[0], norm(x)) < 1e-12


GRADIENTS = {
    "grad of pmap": lambda f: fp.grad(fp.pmap(f), argnums=(0, 1)),
    "pmap of grad": lambda f: fp.pmap(fp.grad(f, argnums=(0, 1))),
    "pmap of value_and_grad": lambda f: lambda *a: fp.pmap(fp.value_and_grad(f, argnums=(0, 1)))(*a)[1],
    "torch.func.grad of pmap": lambda f: torch.func.grad(fp.pmap(f), argnums=(0, 1)),
}


@pytest.mark.parametrize("way", GRADIENTS)
@pytest.mark.parametrize("dims", [2, 4])
def test_gradients_are_those_of_the_whole_batch_by_every_means(devices, dims, way):
    params, loss, sync_loss = losses(dims=dims)
    x, t = torch.randn(2, 7, 3, *[2] * (dims - 2), dtype=D)
    wanted = torch.func.grad(loss, argnums=(0, 1))(params, x, t)
    assert difference(GRADIENTS[way](sync_loss)(params, x, t), wanted) < 1e-12


def test_backward_fills_grad_as_on_one_device(devices):
    params, loss, sync_loss = losses(dims=4)
    x, t = torch.randn(2, 7, 3, 2, 2, dtype=D)
    found = []
    for fun in (loss, fp.pmap(sync_loss)):
        own = {name: param.clone().requires_grad_() for name, param in params.items()}
        leaf = x.clone().requires_grad_()
        fun(own, leaf, t).backward()
        found.append([leaf.grad, own["weight"].grad, own["bias"].grad])
    assert difference(*found) < 1e-12


@pytest.mark.parametrize("grad", [fp.grad, torch.func.grad], ids=["fp", "torch.func"])
def test_second_derivatives_are_those_of_the_whole_batch(devices, grad):
    params, loss, sync_loss = losses()
    x, t = torch.randn(2, 7, 3, dtype=D)

    def penalty(fun):
        first = lambda *args: sum((g**2).sum() for g in fp.tree.leaves(grad(fun, argnums=(0, 1))(*args)))
        return grad(first, argnums=(0, 1))(params, x, t)

    assert difference(penalty(fp.pmap(sync_loss)), penalty(loss)) < 1e-12


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_hessians_are_those_of_the_formula():
    # Not those of torch's kernel, whose mixed derivatives are wrong under torch.func's jacobians.
    params, _, sync_loss = losses()
    x, t = torch.randn(2, 7, 3, dtype=D)

    def formula(params, x, t):
        var, mean = torch.var_mean(x, 0, correction=0)
        out = (x - mean) * torch.rsqrt(var + 1e-5) * params["weight"] + params["bias"]
        return (torch.sin(out) * t).mean()

    wanted = torch.func.hessian(formula, argnums=(0, 1))(params, x, t)
    mapped = fp.pmap(sync_loss)
    for outer, inner in ((torch.func.jacfwd, torch.func.jacrev), (torch.func.jacrev, torch.func.jacrev)):
        found = outer(inner(mapped, argnums=(0, 1)), argnums=(0, 1))(params, x, t)
        assert all(
            torch.allclose(a, b, atol=1e-13)
            for a, b in zip(*map(fp.tree.leaves, (found, wanted)), strict=True)
        )


def test_derivatives_taken_inside_a_shard_pass_finite_differences():
    sync = fp.SyncBatchNorm(2, dtype=D, track_running_stats=False)
    apply, params = fp.functionalize(sync)
    mapped = fp.pmap(lambda x, w: apply({**params, "weight": w}, x).sin(), in_axes=(0, None))
    x, w = torch.randn(5, 2, dtype=D, requires_grad=True), torch.rand(2, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(mapped, (x, w))
    assert torch.autograd.gradgradcheck(mapped, (x, w))


def test_a_weight_of_the_call_changes_the_mean_and_not_the_statistics():
    params, loss, sync_loss = losses()
    x, t = torch.randn(2, 8, 3, dtype=D)
    t[2:4] = 0
    counts = t[:, :1].ne(0).to(D)
    weight = lambda params, x, t, counts: counts.sum()
    body = lambda fun: lambda params, x, t, counts: fun(params, x, t) * len(x) / counts.sum()
    # The second of four shards counts nothing, and its 0/0 is left out; its rows are normalised over.
    mapped = fp.pmap(fp.value_and_grad(body(sync_loss), argnums=(0, 1)), weight=weight)
    wanted = fp.value_and_grad(body(loss), argnums=(0, 1))(params, x, t, counts)
    assert difference(mapped(params, x, t, counts), wanted) < 1e-12
    assert (
        difference(
            fp.grad(fp.pmap(body(sync_loss), weight=weight), argnums=(0, 1))(params, x, t, counts), wanted[1]
        )
        < 1e-12
    )


def test_a_shard_may_bring_no_rows():
    apply, params, buffers = fp.functionalize_with_buffers(pair()[1])
    norm, _, _ = fp.functionalize_with_buffers(pair()[0])
    x, keep = torch.randn(6, 3, dtype=D), torch.tensor([0, 0, 1, 1, 1, 0]).bool()
    mapped = fp.pmap(
        lambda p, b, x, keep: apply(p, b, x[keep]), in_axes=(None, None, 0, 0), out_axes=("shards", None)
    )
    out, new = mapped(params, buffers, x, keep)
    wanted, wanted_buffers = norm(params, buffers, x[keep])
    assert [len(part) for part in out.parts] == [0, 2, 1, 0]
    assert difference(torch.cat(out.parts), wanted) < 1e-12
    assert difference(new, wanted_buffers) < 1e-12


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_a_large_mean_costs_no_accuracy(offset):
    # At 1e4 torch's own float32 kernels on CPU are off by 5e-4 in the output and 1e-4 in the gradient.
    norm, sync = pair(dims=4, dtype=torch.float32)
    apply, params, buffers = fp.functionalize_with_buffers(sync)
    x, t = torch.randn(13, 3, 4, 4) + offset, torch.randn(13, 3, 4, 4)
    exact = norm.double()
    wide = x.double().requires_grad_()
    wanted = exact(wide)
    (wanted_grad,) = torch.autograd.grad((wanted * t).sum(), wide)
    out, new = fp.pmap(apply, in_axes=IN, out_axes=OUT)(params, buffers, x)
    loss = lambda x, t: (apply(params, buffers, x)[0] * t).sum()
    grad = fp.grad(fp.pmap(loss, in_axes=0, out_axes="sum"))(x, t)
    assert difference(out, wanted) < 1e-6
    assert difference(grad, wanted_grad) < 1e-6
    assert difference(new, dict(exact.named_buffers())) < 5e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_its_statistics_in_float32(dtype):
    norm, sync = pair(dims=4, dtype=torch.float32)
    apply, params, buffers = fp.functionalize_with_buffers(sync)
    x = (torch.randn(8, 3, 4, 4) * 300).to(dtype)
    out, new = fp.pmap(apply, in_axes=IN, out_axes=OUT)(params, buffers, x)
    wanted = norm(x.float())
    assert out.dtype is dtype and new["running_var"].dtype is torch.float32
    assert difference(out.float(), wanted) < torch.finfo(dtype).eps
    assert difference(new, dict(norm.named_buffers())) < 1e-6


def test_it_is_plain_batch_norm_in_eval_mode_and_outside_of_every_pmap():
    norm, sync = pair(dims=4)
    x = torch.randn(7, 3, 2, 2, dtype=D)
    assert torch.equal(sync(x), norm(x))
    assert difference(sync.state_dict(), norm.state_dict()) == 0
    assert sync.state_dict().keys() == norm.state_dict().keys()
    norm.eval(), sync.eval()
    # Nothing is synchronised: an axis that is not there is not missed.
    sync.axis_name = "nowhere"
    assert torch.equal(fp.pmap(sync, in_axes=0)(x), norm(x))
    assert repr(sync) == repr(norm).replace("BatchNorm2d", "SyncBatchNorm")[:-1] + ", axis_name='nowhere')"


def test_shards_of_different_modules_meet_in_parallel_call():
    norm, sync = pair()
    made = [fp.functionalize_with_buffers(copy.deepcopy(sync)) for _ in range(3)]
    x = torch.randn(9, 3, dtype=D)
    parts = x.split([4, 3, 2])
    outs = fp.parallel_call(
        [apply for apply, _, _ in made], [(p, b, part) for (_, p, b), part in zip(made, parts, strict=True)]
    )
    assert difference(torch.cat([out for out, _ in outs]), norm(x)) < 1e-12
    assert all(difference(new, dict(norm.named_buffers())) < 1e-12 for _, new in outs)


def test_shards_meet_once_forward_and_once_backward(monkeypatch):
    apply, params, buffers = fp.functionalize_with_buffers(pair(dims=4)[1])
    names, exchange = [], Group.exchange
    counted = lambda group, rank, call, *rest, **options: (
        names.append(call.name) or exchange(group, rank, call, *rest, **options)
    )
    monkeypatch.setattr(Group, "exchange", counted)
    x = torch.randn(6, 3, 4, 4, dtype=D)
    loss = lambda p, x: apply(p, buffers, x)[0].pow(3).mean()
    fp.pmap(fp.grad(loss, argnums=(0, 1)), devices=2)(params, x)
    assert sorted(name for name in names if "gather" in name) == [
        *["all_gather"] * 2,
        *["the transpose of all_gather"] * 2,
    ]


def test_the_same_call_gives_the_same_bits():
    made = fp.functionalize_with_buffers(
        nn.Sequential(nn.Conv2d(1, 4, 3), pair(4, 4)[1], nn.Flatten()).double()
    )
    apply, params, buffers = made
    step = fp.pmap(fp.value_and_grad(lambda p, x: apply(p, buffers, x)[0].pow(3).mean()))
    x = torch.randn(11, 1, 5, 5, dtype=D)
    first = step(params, x)
    for _ in range(3):
        again = step(params, x)
        assert all(map(torch.equal, fp.tree.leaves(first), fp.tree.leaves(again)))


def test_a_closed_over_module_without_running_statistics_is_right():
    norm, sync = pair(track_running_stats=False)
    x = torch.randn(8, 3, dtype=D)
    assert difference(fp.pmap(sync, in_axes=0)(x), norm(x)) < 1e-12
    fp.pmap(lambda x: sync(x).pow(3).mean(), in_axes=0)(x).backward()
    norm(x).pow(3).mean().backward()
    assert difference(sync.weight.grad, norm.weight.grad) < 1e-12


def test_a_batch_without_values_leaves_running_statistics_alone():
    norm, sync = pair(dims=3)
    apply, params, buffers = fp.functionalize_with_buffers(sync)
    x = torch.zeros(4, 3, 0, dtype=D)
    out, new = fp.pmap(apply, in_axes=IN, out_axes=OUT)(params, buffers, x)
    assert out.shape == norm(x).shape
    assert difference(new, dict(norm.named_buffers())) == 0
