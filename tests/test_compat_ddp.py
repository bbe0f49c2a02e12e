"""DistributedDataParallel on two processes: any module trains as in one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from compat_models import Result, assert_close, assert_same_gradients, classifier, mlp
from ddp_programs import (
    DDP,
    SIZE,
    Branches,
    check,
    in_two_processes,
    mean_loss,
    rand_images,
    rank,
    square,
    x_of,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import compat
import funcpar as fp


@in_two_processes
def test_training_equals_one_process() -> None:
    wrapper = check(mlp())
    assert isinstance(wrapper, nn.parallel.DistributedDataParallel)
    check(classifier(), lambda m, r: m(rand_images(r)).square().mean())


@in_two_processes
def test_many_buckets_and_large_leaves() -> None:
    module = nn.Sequential(
        nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)
    ).double()
    check(module)
    check(module, bucket_cap_mb=0.001)
    convolution = nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(256, 2)
    ).double()
    check(convolution.to(memory_format=torch.channels_last), lambda m, r: m(rand_images(r)).square().mean())


@in_two_processes
def test_unused_parameters_need_no_flag() -> None:
    check(Branches(), lambda m, r: m(x_of(r), 0).square().mean(), steps=3)


@in_two_processes
def test_branches_may_differ_between_ranks() -> None:
    check(Branches(), lambda m, r: m(x_of(r), r).square().mean(), steps=3)
    check(Branches(), lambda m, r: m(x_of(r), r).square().mean(), bucket_cap_mb=1e-5)
    check(
        Branches(), lambda m, r: m(x_of(r, rows=0), r).square().sum() if r else m(x_of(r), r).square().sum()
    )


@in_two_processes
def test_two_forwards_in_one_backward() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(model: Any, r: int) -> Tensor:
        return model(x_of(r)).square().mean() - model(x_of(r + 5)).mean()

    check(module, loss)
    # Where no buffers are sent, ranks may also call forward more or less often.
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    check(module, lambda m, r: loss(m, r) + (m(x_of(8)).mean() if r else 0))


@in_two_processes
def test_buffers_follow_rank_0_out_of_place() -> None:
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


@in_two_processes
def test_gradients_own_their_memory() -> None:
    for view in (False, True):
        wrapper = DDP(
            nn.Sequential(nn.Linear(3, 300), nn.Linear(300, 300)).double(), gradient_as_bucket_view=view
        )
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


@in_two_processes
def test_outputs_may_be_anything() -> None:
    class Wrapping(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(3, 2).double(), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(self.layer(x))

    for kind, name in ((Result, "logits"), (Opaque, "loss")):
        check(Wrapping(kind), lambda m, r, name=name: getattr(m(x_of(r)), name).square().mean())


@in_two_processes
def test_weight_norm_and_its_kind_under_processes() -> None:
    for norm in (
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    ):
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


@in_two_processes
def test_hooks_run_once_and_see_the_module_itself() -> None:
    module = mlp()
    wrapper = DDP(module)
    seen: list[Any] = []
    square(wrapper, rank()).backward()
    module[0].register_forward_hook(lambda m, *_: seen.append(m is module[0]))
    module[2].register_full_backward_hook(lambda m, *_: seen.append(m is module[2]))
    wrapper.register_forward_hook(lambda m, *_: seen.append(m is wrapper))
    module[0].weight.register_hook(seen.append)
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


@in_two_processes
def test_checkpoints_of_both_kinds() -> None:
    for reentrant in (False, True):
        for everything in (False, True):
            check(Blocks(reentrant, everything))


@in_two_processes
def test_recurrent_tied_and_frozen_parameters() -> None:
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


@in_two_processes
def test_two_networks_that_train_against_each_other():
    nets = [mlp(), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()]
    plain, wrapped = copy.deepcopy(nets), [DDP(net) for net in nets]

    def losses(makes: Any, judges: Any, r: int) -> tuple[Tensor, Tensor]:
        judges.requires_grad_(False)
        fooling = judges(makes(x_of(r))).mean()
        judges.requires_grad_(True)
        judging = judges(makes(x_of(r)).detach()).square().mean() + judges(x_of(r + 3)[:, :2]).mean()
        return fooling, judging

    for loss in losses(*wrapped, rank()):
        loss.backward()
    for both in zip(*(losses(*plain, r) for r in range(SIZE)), strict=True):
        (sum(both) / SIZE).backward()
    for mine, theirs in zip(nets, plain, strict=True):
        assert_same_gradients(mine, theirs)


@in_two_processes
def test_a_forward_that_fails_leaves_the_next_one_right():
    wrapper = DDP(mlp())
    try:
        wrapper(torch.ones(2, 9).double())
    except RuntimeError as error:
        assert "mat1 and mat2" in str(error)
    assert all(p.is_leaf for p in wrapper.parameters())
    check(wrapper.module)


@in_two_processes
def test_a_wrapper_of_devices_inside_one_of_processes():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = compat.DataParallel(nn.Linear(3, 2).double(), device_ids=[0, 1])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    fp.set_cpu_devices(2)
    check(Inner())
