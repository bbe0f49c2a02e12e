"""Well-known models, untrained, under DistributedDataParallel in two processes: equal to one. Optional.

It needs torchvision and transformers, which nothing else here does: pip install torchvision transformers
"""

from __future__ import annotations

import copy

import processes
import pytest
import test_compat_zoo as zoo
import torch
import torch.distributed as dist

import compat

SIZE = 2
CASES = {"resnet18": "torchvision", "vit_tiny": "torchvision", "bert": "transformers", "gpt2": "transformers"}


def steps(name: str) -> float:
    """Take two steps, and return the largest difference from one process that has both ranks' rows."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module, inputs, pick = getattr(zoo, name)()
    module.double()
    rows = [4, 4]
    shards = [{k: v[sum(rows[:r]) : sum(rows[: r + 1])] for k, v in inputs.items()} for r in range(SIZE)]
    plain = copy.deepcopy(module)
    wrapper = compat.DistributedDataParallel(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (module, plain)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        pick(wrapper(**shards[dist.get_rank()])).square().mean().backward()
        (sum(pick(plain(**shard)).square().mean() for shard in shards) / SIZE).backward()
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()
    return max(
        float((p - q).detach().abs().max() / (q.detach().abs().max() + 1e-30))
        for p, q in zip(module.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", list(CASES))
def test_a_well_known_model_in_two_processes_equals_one(name):
    pytest.importorskip(CASES[name])
    for difference in processes.values(steps, SIZE, name, timeout=120):
        assert difference < 1e-10
