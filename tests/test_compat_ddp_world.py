"""DistributedDataParallel on two processes: join, hooks, copies, groups, compilers, trainers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist
from compat_models import assert_close, assert_same_gradients, mlp, rand
from ddp_programs import (
    DDP,
    SIZE,
    in_two_processes,
    mean_loss,
    rank,
    square,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


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


@in_two_processes
def test_join_takes_uneven_numbers_of_batches() -> None:
    for batches in ([2, 3], [4, 2], [3, 3], [0, 2]):
        for by_initial in (True, False):
            torch.manual_seed(0)
            module, _ = _join(batches, divide_by_initial_world_size=by_initial)
            expected = _joined_alone(batches, by_initial=by_initial)
            assert_close(list(module.parameters()), list(expected.parameters()))
            everyones = [torch.zeros_like(module[1].running_mean) for _ in range(SIZE)]
            dist.all_gather(everyones, module[1].running_mean)
            assert_close(everyones[0], everyones[1])


@in_two_processes
def test_join_goes_with_no_sync() -> None:
    torch.manual_seed(0)
    module, _ = _join([4, 2], accumulate=2)
    assert_close(list(module.parameters()), list(_joined_alone([4, 2], accumulate=2).parameters()))


@in_two_processes
def test_join_answers_other_gradients_too() -> None:
    wrapper = DDP(mlp())
    with wrapper.join():
        if rank():
            grads = torch.autograd.grad(square(wrapper, 1), list(wrapper.parameters()), create_graph=True)
            sum(g.square().sum() for g in grads).backward()
    assert_close(wrapper.module[0].weight, wrapper.module[0].weight)


@in_two_processes
def test_join_can_end_all_ranks() -> None:
    wrapper = DDP(mlp())
    message = ""
    try:
        with wrapper.join(throw_on_early_termination=True):
            for _ in range(1 + rank()):
                square(wrapper, rank()).backward()
    except RuntimeError as error:
        message = str(error)
    assert "rank 0 has no more batches" in message, message


@in_two_processes
def test_communication_hooks_reduce_in_place_of_the_mean() -> None:
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
    power.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    )
    square(power, rank()).backward()


@in_two_processes
def test_state_dicts_copies_and_pickles() -> None:
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


@in_two_processes
def test_ranks_start_with_the_values_of_rank_0() -> None:
    torch.manual_seed(rank())
    wrapper = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    everyones = [torch.zeros(4, 3) for _ in range(SIZE)]
    dist.all_gather(everyones, wrapper.module[0].weight.detach())
    assert torch.equal(*everyones)


@in_two_processes
def test_a_group_of_some_ranks() -> None:
    groups = [dist.new_group([r]) for r in range(SIZE)]
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module, process_group=groups[rank()])
    square(wrapper, rank()).backward()
    square(plain, rank()).backward()
    assert_same_gradients(module, plain)


@in_two_processes
def test_a_compiled_module_and_a_compiled_wrapper() -> None:
    for outside in (False, True):
        module = mlp()
        plain = copy.deepcopy(module)
        compiling = lambda m: torch.compile(m, backend="eager")
        wrapper = compiling(DDP(module)) if outside else DDP(compiling(module))
        for _ in range(2):
            square(wrapper, rank()).backward()
            mean_loss(plain).backward()
        assert_same_gradients(module, plain)


@in_two_processes
def test_what_trainers_touch_is_there() -> None:
    wrapper = DDP(mlp(), find_unused_parameters=True, static_graph=True, check_reduction=True)
    wrapper._set_static_graph()
    wrapper.reducer.prepare_for_backward([])
    wrapper.reducer._rebuild_buckets()
    assert wrapper.broadcast_buffers and wrapper.require_backward_grad_sync and wrapper.logger is None
    assert wrapper._get_ddp_logging_data()["world_size"] == SIZE
    assert wrapper.device_ids is None and wrapper.output_device is None and wrapper.dim == 0
    assert rand(2).dtype is torch.float64


@in_two_processes
def test_masks_differ_between_ranks_if_seeds_do() -> None:
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)).double()
    wrapper = DDP(module)
    masks = []
    for seed in (7, 7 + rank()):
        torch.manual_seed(seed)
        both = [torch.zeros(4, 50, dtype=torch.float64) for _ in range(SIZE)]
        dist.all_gather(both, (wrapper(torch.ones(4, 3).double()) == 0).double())
        masks.append(torch.equal(*both))
    assert masks == [True, False]


@in_two_processes
def test_nothing_is_left_behind() -> None:

    wrapper = DDP(mlp())
    for _ in range(2):
        square(wrapper, rank()).backward()
    gone = weakref.ref(wrapper), weakref.ref(wrapper.lanes())
    del wrapper
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
