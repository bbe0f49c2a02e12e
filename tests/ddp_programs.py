"""Programs that run in two processes, each against the mean of both ranks' losses in one process."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compat_models import Result, assert_close, assert_same_gradients, classifier, mlp, rand
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import compat

SIZE = 2
DDP = compat.DistributedDataParallel
Loss = Callable[[Any, int], Tensor]
PROGRAMS: dict[str, Callable[[], None]] = {}


def program(fun: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[fun.__name__] = fun
    return fun


def run_all(*names: str) -> dict[str, str]:
    """Run every program after another; return what failed."""
    import traceback  # noqa: PLC0415

    dist.init_process_group("gloo")
    failed = {}
    for name in names or PROGRAMS:
        torch.manual_seed(0)
        try:
            PROGRAMS[name]()
        except Exception:
            failed[name] = traceback.format_exc()
            break  # The other rank may wait for ever in what comes next.
    dist.destroy_process_group()
    return failed


def rank() -> int:
    return dist.get_rank()


def x_of(r: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(100 + r), dtype=torch.float64)


def square(model: Any, r: int) -> Tensor:
    return model(x_of(r)).square().mean()


def mean_loss(plain: nn.Module, loss: Loss = square) -> Tensor:
    return sum((loss(plain, r) for r in range(SIZE)), torch.zeros(())) / SIZE


def check(module: nn.Module, loss: Loss = square, steps: int = 2, **options: Any) -> Any:
    """Compare gradients and two steps of training with those of one process; return the wrapper."""
    plain = copy.deepcopy(module)
    wrapper = DDP(module, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(wrapper, rank()).backward()
        mean_loss(plain, loss).backward()
        assert_same_gradients(module, plain)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs)
    return wrapper


@program
def plain_training() -> None:
    wrapper = check(mlp())
    assert isinstance(wrapper, nn.parallel.DistributedDataParallel)
    check(classifier(), lambda m, r: m(rand_images(r)).square().mean())


def rand_images(r: int) -> Tensor:
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(r), dtype=torch.float64)


@program
def many_buckets_and_large_leaves() -> None:
    module = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)).double()
    check(module)
    check(module, bucket_cap_mb=0.001)
    convolution = nn.Sequential(nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(256, 2)).double()
    check(convolution.to(memory_format=torch.channels_last), lambda m, r: m(rand_images(r)).square().mean())


class Branches(nn.Module):
    """A layer for each rank, one that nobody uses, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 2) for _ in range(SIZE)])
        self.unused = nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.own[branch](self.first(x).tanh())


@program
def unused_parameters_need_no_flag() -> None:
    check(Branches(), lambda m, r: m(x_of(r), 0).square().mean(), steps=3)


@program
def branches_differ_between_ranks() -> None:
    check(Branches(), lambda m, r: m(x_of(r), r).square().mean(), steps=3)
    check(Branches(), lambda m, r: m(x_of(r), r).square().mean(), bucket_cap_mb=1e-5)
    check(Branches(), lambda m, r: m(x_of(r, rows=0), r).square().sum() if r else m(x_of(r), r).square().sum())


@program
def two_forwards_in_one_backward() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(model: Any, r: int) -> Tensor:
        return model(x_of(r)).square().mean() - model(x_of(r + 5)).mean()

    check(module, loss)
    # Where no buffers are sent, ranks may also call forward more or less often.
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    check(module, lambda m, r: loss(m, r) + (m(x_of(8)).mean() if r else 0))


@program
def buffers_follow_rank_0_out_of_place() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    first = copy.deepcopy(module)
    wrapper = DDP(module)
    for step in range(3):
        first(x_of(step * SIZE))
        wrapper(x_of(step * SIZE + rank()))
    wrapper.eval()
    with torch.no_grad():
        assert_close(wrapper(x_of(9)), first.eval()(x_of(9)))
    for mine, theirs in zip(module.buffers(), first.buffers(), strict=True):
        assert_close(mine, theirs)
    # Evaluation on one rank alone waits for nobody.
    if rank() == 0:
        wrapper(x_of(3))
        with torch.no_grad():
            wrapper(x_of(3))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1).double()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x) * self.scale
            self.scale = self.scale + x.mean().detach() ** 2
            return out

    # A graph that holds the old buffer is not spoilt by the new one.
    wrapper = DDP(Scaled(), forward_sync_buffers=True)
    scale = wrapper.module.scale.clone()
    out = [wrapper(x_of(rank())), wrapper(x_of(rank()))]
    weight = wrapper.module.layer.weight
    second = scale + x_of(0).mean() ** 2
    (out[0].sum() + out[1].sum()).backward()
    expected = sum(x_of(r).sum(0) * (scale + second) for r in range(SIZE)) / SIZE
    assert_close(weight.grad[0], expected)


@program
def autograd_grad_is_the_mean() -> None:
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


@program
def gradient_penalty_and_create_graph() -> None:
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


@program
def torch_func_goes_through() -> None:
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
    assert_close(torch.func.jacrev(lambda x: wrapper(x))(x), torch.func.jacrev(lambda x: module(x))(x))
    assert_close(torch.func.jacfwd(lambda x: wrapper(x))(x), torch.func.jacfwd(lambda x: module(x))(x))


@program
def no_sync_keeps_gradients_and_the_next_backward_averages_all() -> None:
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


@program
def the_flag_counts_where_backward_runs() -> None:
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    for step in range(3):
        loss = square(wrapper, rank() + SIZE * step)
        wrapper.require_backward_grad_sync = step == 2
        loss.backward()
        mean_loss(plain, lambda m, r, s=step: square(m, r + SIZE * s)).backward()
    assert_same_gradients(module, plain)


def _join(batches: list[int], accumulate: int = 1, **options: Any) -> tuple[nn.Module, list[int]]:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    wrapper = DDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with wrapper.join(**options):
        for step in range(batches[rank()]):
            if (step + 1) % accumulate:
                with wrapper.no_sync():
                    square(wrapper, 10 * step + rank()).backward()
                continue
            square(wrapper, 10 * step + rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module, batches


def _joined_alone(batches: list[int], accumulate: int = 1, by_initial: bool = True) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(max(batches)):
        ranks = [r for r in range(SIZE) if step < batches[r]]
        share = SIZE if by_initial else len(ranks)
        (sum(square(module, 10 * step + r) for r in ranks) / share).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return module


@program
def join_takes_uneven_batches() -> None:
    for batches in ([2, 3], [4, 2], [3, 3], [0, 2]):
        for by_initial in (True, False):
            torch.manual_seed(0)
            module, _ = _join(batches, divide_by_initial_world_size=by_initial)
            expected = _joined_alone(batches, by_initial=by_initial)
            assert_close(list(module.parameters()), list(expected.parameters()))
            everyones = [torch.zeros_like(module[1].running_mean) for _ in range(SIZE)]
            dist.all_gather(everyones, module[1].running_mean)
            assert_close(everyones[0], everyones[1])


@program
def join_goes_with_no_sync() -> None:
    torch.manual_seed(0)
    module, _ = _join([4, 2], accumulate=2)
    assert_close(list(module.parameters()), list(_joined_alone([4, 2], accumulate=2).parameters()))


@program
def join_answers_other_gradients_too() -> None:
    wrapper = DDP(mlp())
    with wrapper.join():
        if rank():
            grads = torch.autograd.grad(square(wrapper, 1), list(wrapper.parameters()), create_graph=True)
            sum(g.square().sum() for g in grads).backward()
    assert_close(wrapper.module[0].weight, wrapper.module[0].weight)


@program
def join_can_end_all_ranks() -> None:
    wrapper = DDP(mlp())
    message = ""
    try:
        with wrapper.join(throw_on_early_termination=True):
            for _ in range(1 + rank()):
                square(wrapper, rank()).backward()
    except RuntimeError as error:
        message = str(error)
    assert "rank 0 has no more batches" in message, message


@program
def gradients_own_their_memory() -> None:
    for view in (False, True):
        wrapper = DDP(nn.Sequential(nn.Linear(3, 300), nn.Linear(300, 300)).double(), gradient_as_bucket_view=view)
        square(wrapper, rank()).backward()
        grads = [p.grad for p in wrapper.parameters()]
        assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)
        for p in wrapper.parameters():
            assert p.grad.untyped_storage().nbytes() == p.numel() * 8 and p.grad.stride() == p.stride()
            p.grad.detach_()
        for to_none in (False, True):
            wrapper.zero_grad(set_to_none=to_none)
            square(wrapper, rank()).backward()


@dataclasses.dataclass
class Opaque:
    loss: Tensor

    def __iter__(self) -> Any:
        raise TypeError("no")


@program
def outputs_may_be_anything() -> None:
    class Wrapping(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(3, 2).double(), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(self.layer(x))

    for kind, name in ((Result, "logits"), (Opaque, "loss")):
        check(Wrapping(kind), lambda m, r, name=name: getattr(m(x_of(r)), name).square().mean())


@program
def weight_norm_and_its_kind() -> None:
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        module = nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2))).double()
        if norm is not nn.utils.weight_norm:  # deepcopy refuses the old one after a forward.
            check(module.eval())  # The spectral norm iterates once per forward in training.
            continue
        wrapper = DDP(module)
        square(wrapper, rank()).backward()
        mine = [p.grad for p in module.parameters()]
        module.zero_grad()
        mean_loss(module).backward()
        assert_close(mine, [p.grad for p in module.parameters()])


@program
def hooks_run_once_and_see_the_module_itself() -> None:
    module = mlp()
    wrapper = DDP(module)
    seen: list[Any] = []
    square(wrapper, rank()).backward()
    module[0].register_forward_hook(lambda m, *_: seen.append(m is module[0]))
    module[2].register_full_backward_hook(lambda m, *_: seen.append(m is module[2]))
    wrapper.register_forward_hook(lambda m, *_: seen.append(m is wrapper))
    module[0].weight.register_hook(lambda g: seen.append(g))
    module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    module.zero_grad()
    square(wrapper, rank()).backward()
    assert seen[:3] == [True] * 3 and len(seen) == 5
    assert_close(seen[3], module[0].weight.grad)
    assert_close(seen[4], module[0].weight.grad)


class Blocks(nn.Module):
    def __init__(self, reentrant: bool, everything: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.dropout = nn.Dropout(0.5)
        self.reentrant, self.everything = reentrant, everything
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.everything:
            return checkpoint(self._run, x.requires_grad_(), use_reentrant=self.reentrant)
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(lambda h, b=block: b(h).tanh(), h, use_reentrant=self.reentrant)
        return h

    def _run(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h).tanh()
        return h


@program
def checkpoints_of_both_kinds() -> None:
    for reentrant in (False, True):
        for everything in (False, True):
            check(Blocks(reentrant, everything))


@program
def recurrent_tied_and_frozen_parameters() -> None:
    class Speaker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True)
            self.out, self.frozen = nn.Linear(4, 7, bias=False), nn.Linear(4, 4)
            self.out.weight = self.embed.weight
            self.frozen.requires_grad_(False)
            self.double()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.frozen(self.lstm(self.embed(tokens))[0]))

    def loss(model: Any, r: int) -> Tensor:
        tokens = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(r))
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    wrapper = check(Speaker(), loss)
    assert wrapper.module.out.weight is wrapper.module.embed.weight
    weights = [id(w) for w in wrapper.module.lstm._flat_weights]
    assert weights == [id(p) for p in wrapper.module.lstm.parameters()]


@program
def sparse_and_low_precision_gradients() -> None:
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


@program
def requires_grad_may_change_between_steps() -> None:
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


@program
def parameters_used_outside_of_forward() -> None:
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


@program
def weights_for_unequal_batches_are_the_users() -> None:
    # A mean over ranks is not that over rows; scaled losses make it so.
    rows = [3, 5]
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module)
    share = SIZE * rows[rank()] / sum(rows)
    (wrapper(x_of(rank(), rows[rank()])).square().mean() * share).backward()
    plain(torch.cat([x_of(r, rows[r]) for r in range(SIZE)])).square().mean().backward()
    assert_same_gradients(module, plain)


@program
def masks_differ_if_seeds_do() -> None:
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)).double()
    wrapper = DDP(module)
    masks = []
    for seed in (7, 7 + rank()):
        torch.manual_seed(seed)
        both = [torch.zeros(4, 50, dtype=torch.float64) for _ in range(SIZE)]
        dist.all_gather(both, (wrapper(torch.ones(4, 3).double()) == 0).double())
        masks.append(torch.equal(*both))
    assert masks == [True, False]


@program
def communication_hooks_reduce_in_place_of_the_mean() -> None:
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module, bucket_cap_mb=1e-4)
    seen = []

    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append((bucket.index(), bucket.is_last(), [p.shape for p in bucket.parameters()]))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] * state)

    wrapper.register_comm_hook(2.0, doubled)
    for _ in range(2):
        module.zero_grad()
        square(wrapper, rank()).backward()
    (mean_loss(plain) * 4).backward()
    assert_same_gradients(module, plain)
    assert [one[0] for one in seen[: len(seen) // 2]] == list(range(len(seen) // 2)) and seen[-1][1]
    for state, hook in ((None, default_hooks.allreduce_hook), (None, default_hooks.fp16_compress_hook)):
        other = copy.deepcopy(plain)
        other.zero_grad()
        hooked = DDP(other)
        hooked.register_comm_hook(state, hook)
        square(hooked, rank()).backward()
        for p, q in zip(other.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad * 4, q.grad, rtol=1e-2, atol=1e-3)
    power = DDP(copy.deepcopy(plain))
    power.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    square(power, rank()).backward()


@program
def state_dicts_copies_and_pickles() -> None:
    module = mlp()
    wrapper = DDP(module)
    assert all(name.startswith("module.") for name in wrapper.state_dict())
    wrapper.load_state_dict(wrapper.state_dict())
    wrapper.load_state_dict(module.state_dict())
    for again in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert type(again) is DDP
        square(again, rank()).backward()
        plain = copy.deepcopy(module)
        plain.zero_grad()
        mean_loss(plain).backward()
        assert_same_gradients(again.module, plain)
    assert all(p.grad is None for p in module.parameters())


@program
def ranks_start_with_the_values_of_rank_0() -> None:
    torch.manual_seed(rank())
    wrapper = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    everyones = [torch.zeros(4, 3) for _ in range(SIZE)]
    dist.all_gather(everyones, wrapper.module[0].weight.detach())
    assert torch.equal(*everyones)


@program
def a_group_of_some_ranks() -> None:
    groups = [dist.new_group([r]) for r in range(SIZE)]
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module, process_group=groups[rank()])
    square(wrapper, rank()).backward()
    square(plain, rank()).backward()
    assert_same_gradients(module, plain)


@program
def a_compiled_module_and_a_compiled_wrapper() -> None:
    for outside in (False, True):
        module = mlp()
        plain = copy.deepcopy(module)
        compiling = lambda m: torch.compile(m, backend="eager")
        wrapper = compiling(DDP(module)) if outside else DDP(compiling(module))
        for _ in range(2):
            square(wrapper, rank()).backward()
            mean_loss(plain).backward()
        assert_same_gradients(module, plain)


@program
def what_trainers_touch_is_there() -> None:
    wrapper = DDP(mlp(), find_unused_parameters=True, static_graph=True, check_reduction=True)
    wrapper._set_static_graph()
    wrapper.reducer.prepare_for_backward([])
    wrapper.reducer._rebuild_buckets()
    assert wrapper.broadcast_buffers and wrapper.require_backward_grad_sync and wrapper.logger is None
    assert wrapper._get_ddp_logging_data()["world_size"] == SIZE
    assert wrapper.device_ids is None and wrapper.output_device is None and wrapper.dim == 0
    assert rand(2).dtype is torch.float64


@program
def nothing_is_left_behind() -> None:
    import gc  # noqa: PLC0415
    import weakref  # noqa: PLC0415

    wrapper = DDP(mlp())
    for _ in range(2):
        square(wrapper, rank()).backward()
    gone = weakref.ref(wrapper), weakref.ref(wrapper._lanes)
    del wrapper
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
