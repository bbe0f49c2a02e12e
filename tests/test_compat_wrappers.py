"""Subclasses with ways of their own, and wrappers inside wrappers, parallel_apply and pmap."""

import pytest
import torch
from compat_models import Calling, assert_close, assert_same_gradients, ids, mlp, pair, rand
from torch import nn

import compat
import funcpar as fp


class Listed(compat.DataParallel):
    """As graph libraries do: a list of samples is made into batches by scatter."""

    def scatter(self, inputs, kwargs, device_ids):
        pieces = compat.scatter(torch.arange(len(inputs[0])), device_ids)
        return [(torch.stack([inputs[0][i] for i in piece]),) for piece in pieces], [{} for _ in pieces]


def test_a_subclass_may_scatter_in_its_own_way(devices):
    module, plain = pair(mlp)
    rows = [rand(3) for _ in range(5)]
    out = Listed(module, ids())(rows)
    assert_close(out, plain(torch.stack(rows)))
    out.sum().backward()
    plain(torch.stack(rows)).sum().backward()
    assert_same_gradients(module, plain)


def test_a_subclass_may_replicate_apply_and_gather_in_its_own_way():
    calls = []

    class Own(compat.DataParallel):
        def replicate(self, module, device_ids):
            calls.append(("replicate", list(device_ids)))
            return super().replicate(module, device_ids)

        def parallel_apply(self, replicas, inputs, kwargs):
            calls.append(("parallel_apply", len(replicas)))
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            calls.append(("gather", output_device))
            return list(outputs)

    module, plain = pair(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(2).double()))
    outs = Own(module, [1, 0])(rand(5, 3))
    assert [len(out) for out in outs] == [3, 2]
    assert calls == [("replicate", [1, 0]), ("parallel_apply", 2), ("gather", 1)]
    torch.cat(outs).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert not torch.equal(module[1].running_mean, plain[1].running_mean)


def test_one_object_may_have_its_own_gather():
    wrapper = compat.DataParallel(mlp())
    wrapper.gather = lambda outputs, device: [len(out) for out in outputs]
    assert wrapper(rand(9, 3)) == [3, 2, 2, 2]


@pytest.mark.parametrize("wrap", [compat.DataParallel, torch.nn.DataParallel], ids=["compat", "torch"])
def test_a_wrapper_in_a_wrapper_uses_the_device_it_is_on(devices, wrap):
    module, plain = pair(mlp)
    x = rand(9, 3)
    for outer in (
        compat.DataParallel(wrap(module)),
        compat.DataParallel(nn.Sequential(wrap(module), nn.Tanh())),
    ):
        expected = plain(x) if isinstance(outer.module, nn.DataParallel) else plain(x).tanh()
        out = outer(x)
        assert_close(out, expected)
        module.zero_grad()
        plain.zero_grad()
        out.sum().backward()
        expected.sum().backward()
        assert_same_gradients(module, plain)


def test_a_wrapper_inside_parallel_apply_and_pmap_uses_the_device_it_is_on():
    module, x = mlp(), rand(8, 3)
    wrapper = compat.DataParallel(Calling(lambda layer, x: module(x).sum()))
    assert [out.shape for out in compat.parallel_apply([wrapper, wrapper], [x, x])] == [(), ()]
    assert_close(fp.pmap(compat.DataParallel(module), in_axes=0)(x), module(x))
