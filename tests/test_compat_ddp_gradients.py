"""DistributedDataParallel on two processes: gradients taken by every means are the mean."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from compat_models import assert_close, assert_same_gradients, mlp
from ddp_programs import (
    DDP,
    SIZE,
    Branches,
    check,
    in_two_processes,
    mean_loss,
    rank,
    square,
    x_of,
)
from torch import Tensor, nn


@in_two_processes
def test_autograd_grad_returns_the_mean() -> None:
    for build, inputs in ((mlp, ()), (Branches, (rank(),))):
        module = build()
        plain, wrapper = copy.deepcopy(module), DDP(module)
        losses = [m(x_of(r), *((r,) if inputs else ())).square().mean() for r, m in ((0, plain), (1, plain))]
        params = list(plain.parameters())
        theirs = torch.autograd.grad(sum(losses) / SIZE, params, allow_unused=True)
        loss = wrapper(x_of(rank()), *inputs).square().mean()
        mine = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        assert_close([g for g in mine if g is not None], [g for g in theirs if g is not None])
        assert all(p.grad is None for p in module.parameters())


@in_two_processes
def test_a_gradient_penalty_and_create_graph_are_exact() -> None:
    def of_inputs(model: Any, r: int) -> Tensor:
        x = x_of(r).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + model(x).mean()

    check(mlp(), of_inputs)
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    mine = torch.autograd.grad(square(wrapper, rank()), list(module.parameters()), create_graph=True)
    theirs = torch.autograd.grad(mean_loss(plain), list(plain.parameters()), create_graph=True)
    # The loss of the second level has a part of the rank's own.
    (sum(g.square().sum() for g in mine) * (1 + rank())).backward()
    (sum(g.square().sum() for g in theirs) * 1.5).backward()
    assert_same_gradients(module, plain)
    module.zero_grad()
    plain.zero_grad()
    square(wrapper, rank()).backward(create_graph=True)
    mean_loss(plain).backward(create_graph=True)
    assert_same_gradients(module, plain)
    assert all(p.grad.requires_grad for p in module.parameters() if p is not module[2].bias)


@in_two_processes
def test_transforms_go_through_the_wrapper_of_processes() -> None:
    module = mlp()
    wrapper = DDP(module)
    params = dict(wrapper.named_parameters())
    call = torch.func.functional_call

    def loss(p: Any, x: Tensor) -> Tensor:
        return call(wrapper, p, (x,)).square().mean()

    def plain_loss(p: Any, x: Tensor) -> Tensor:
        return call(module, {k.removeprefix("module."): v for k, v in p.items()}, (x,)).square().mean()

    def mean(fun: Callable[[Tensor], Any]) -> Any:
        return torch.utils._pytree.tree_map(lambda *v: sum(v) / SIZE, *(fun(x_of(r)) for r in range(SIZE)))

    x = x_of(rank())
    assert_close(torch.func.grad(loss)(params, x), mean(lambda x: torch.func.grad(plain_loss)(params, x)))
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    plain_per_sample = torch.func.vmap(torch.func.grad(plain_loss), (None, 0))
    assert_close(per_sample(params, x), mean(lambda x: plain_per_sample(params, x)))
    tangents = {k: torch.ones_like(p) for k, p in params.items()}
    mine = torch.func.jvp(lambda p: loss(p, x), (params,), (tangents,))
    assert_close(mine, torch.func.jvp(lambda p: plain_loss(p, x), (params,), (tangents,)))
    # Forward over reverse: the tangent of the mean gradient.
    two = [torch.func.jvp(lambda p, x=x, f=f: torch.func.grad(f)(p, x), (params,), (tangents,))[1]
           for f, x in ((loss, x), (plain_loss, x_of(0)), (plain_loss, x_of(1)))]  # fmt: skip
    assert_close(two[0], {k: (two[1][k] + two[2][k]) / SIZE for k in two[1]})
    assert_close(torch.func.jacrev(wrapper)(x), torch.func.jacrev(module)(x))
    assert_close(torch.func.jacfwd(wrapper)(x), torch.func.jacfwd(module)(x))


@in_two_processes
def test_no_sync_keeps_gradients_and_the_next_backward_averages_all() -> None:
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    with wrapper.no_sync():
        square(wrapper, rank()).backward()
    local = copy.deepcopy(plain)
    square(local, rank()).backward()
    assert_same_gradients(module, local)
    square(wrapper, rank() + 2).backward()
    (mean_loss(plain) + mean_loss(plain, lambda m, r: square(m, r + 2))).backward()
    assert_same_gradients(module, plain)
    # Without zero_grad, what was averaged stays averaged.
    square(wrapper, rank()).backward()
    mean_loss(plain).backward()
    assert_same_gradients(module, plain)


@in_two_processes
def test_the_flag_counts_where_backward_runs() -> None:
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    for step in range(3):
        loss = square(wrapper, rank() + SIZE * step)
        wrapper.require_backward_grad_sync = step == 2
        loss.backward()
        mean_loss(plain, lambda m, r, s=step: square(m, r + SIZE * s)).backward()
    assert_same_gradients(module, plain)


@in_two_processes
def test_parameters_used_outside_of_forward_are_averaged_too() -> None:
    def penalty(model: Any, r: int) -> Tensor:
        return square(model, r) + sum(p.square().sum() for p in model.parameters())

    check(mlp(), penalty)

    def head(model: Any, r: int) -> Tensor:
        plain = model.module if isinstance(model, DDP) else model
        return square(model, r) + plain[2](plain[0](x_of(r + 7))).square().mean()

    check(mlp(), head)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
            self.double()
            self.held = [self.bias]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.held[0]

    module = Hidden()
    wrapper = DDP(module)
    square(wrapper, rank()).backward()
    mine = [p.grad for p in module.parameters()]
    module.zero_grad()
    mean_loss(module).backward()
    assert_close(mine, [p.grad for p in module.parameters()])


@in_two_processes
def test_requires_grad_may_change_between_steps() -> None:
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    for frozen in (True, False, True):
        for m in (module, plain):
            m.zero_grad()
            m[0].requires_grad_(not frozen)
        square(wrapper, rank()).backward()
        mean_loss(plain).backward()
        assert_same_gradients(module, plain)
    # A graph made before the change still has its gradients.
    module.requires_grad_(True)
    module.zero_grad()
    plain.requires_grad_(True)
    plain.zero_grad()
    losses = [square(wrapper, rank())]
    module[2].bias.requires_grad_(False)
    losses.append(square(wrapper, rank()))
    module[2].bias.requires_grad_(True)
    sum(losses).backward()
    (2 * mean_loss(plain)).backward()
    module[2].bias.grad = plain[2].bias.grad = None
    assert_same_gradients(module, plain)


class _Casting(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.w.dtype) @ self.w


@in_two_processes
def test_sparse_complex_and_low_precision_gradients() -> None:
    module = nn.EmbeddingBag(9, 4, mode="sum", sparse=True).double()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    for r, m in ((rank(), wrapper), (0, plain), (1, plain)):
        (m(torch.tensor([[r, 2 * r, 5]])).square().sum() / (1 if m is wrapper else SIZE)).backward()
    assert module.weight.grad.is_sparse
    assert_close(module.weight.grad.to_dense(), plain.weight.grad.to_dense())
    for dtype in (torch.bfloat16, torch.float16):
        low = nn.Linear(3, 2).to(dtype)
        DDP(low)(x_of(rank()).to(dtype)).sum().backward()
        assert low.weight.grad.dtype is dtype
    mixed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    check(_Casting(mixed), steps=1)
    check(_Complex(), lambda m, r: m(x_of(r)).abs().square().mean())


@in_two_processes
def test_scaled_losses_weight_unequal_batches() -> None:
    # A mean over ranks is not that over rows; scaled losses make it so.
    rows = [3, 5]
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    share = SIZE * rows[rank()] / sum(rows)
    (wrapper(x_of(rank(), rows[rank()])).square().mean() * share).backward()
    plain(torch.cat([x_of(r, rows[r]) for r in range(SIZE)])).square().mean().backward()
    assert_same_gradients(module, plain)


@in_two_processes
def test_second_derivatives_are_those_of_the_mean_loss():
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    batches = [x_of(r) for r in range(SIZE)]
    call = torch.func.functional_call

    def loss(model: Any, p: Any, x: Tensor) -> Tensor:
        return call(model, p, (x,)).square().mean()

    params = {name: p.detach() for name, p in module.named_parameters()}
    below = {f"module.{name}": p for name, p in params.items()}
    mine = torch.func.hessian(lambda p: loss(wrapper, p, batches[rank()]))(below)
    theirs = torch.func.hessian(lambda p: sum(loss(plain, p, x) for x in batches) / SIZE)(params)
    for one in params:
        for other in params:
            assert_close(mine[f"module.{one}"][f"module.{other}"], theirs[one][other])

    products = []
    for model, value in ((module, square(wrapper, rank())), (plain, mean_loss(plain))):
        grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        vectors = [torch.ones_like(g) for g in grads]
        products.append(torch.autograd.grad(grads, list(model.parameters()), vectors))
    assert_close(*products)


@in_two_processes
def test_backward_twice_and_for_some_inputs_alone():
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    for m, loss in ((module, square(wrapper, rank())), (plain, mean_loss(plain))):
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward(inputs=[m[0].weight])
    assert_same_gradients(module, plain)


@in_two_processes
def test_an_optimizer_that_steps_in_backward_sees_the_mean():
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)

    def step(p: Tensor) -> None:
        p.data.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    square(wrapper, rank()).backward()
    mean_loss(plain).backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), theirs.detach() - 0.1 * theirs.grad)
