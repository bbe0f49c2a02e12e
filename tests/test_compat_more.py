"""Versions in state dicts, means over replicas, packed sequences with gradients, and traces."""

import pytest
import torch
from compat_models import Calling, assert_close, mlp, pair, rand
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import compat
import funcpar as fp


class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize(
    "build",
    [lambda: Versioned(3, 2), lambda: nn.Sequential(Versioned(3, 2), nn.Tanh())],
    ids=["root", "child"],
)
def test_versions_of_layers_are_loaded_from_either_form(build):
    plain = build()
    wrap = compat.DataParallel
    sources = [plain, wrap(plain), torch.nn.DataParallel(plain), wrap(wrap(plain))]
    for source in sources:
        for target in (wrap(build()), wrap(wrap(build()))):
            state = source.state_dict()
            names = list(state._metadata)
            target.load_state_dict(state)
            assert list(state._metadata) == names


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_mean_over_replicas_is_weighted_by_rows(count):
    module = Calling(lambda layer, x: x - fp.pmean(x.mean(0)))
    x = rand(9, 3)
    assert_close(compat.DataParallel(module, list(range(count)))(x), x - x.mean(0))


def test_packed_sequences_pass_their_gradients(devices):
    module, plain = pair(lambda: nn.GRU(3, 2).double())
    rows = [rand(length, 3).requires_grad_() for length in (2, 4, 3, 1, 3)]
    whole = pack_sequence(rows, enforce_sorted=False)
    out, _ = compat.DataParallel(module, dim=1)(whole)
    expected, _ = plain(pack_sequence(rows, enforce_sorted=False))
    assert_close(pad_packed_sequence(out)[0], pad_packed_sequence(expected)[0])
    grads = torch.autograd.grad(pad_packed_sequence(out)[0].square().sum(), [*rows, *module.parameters()])
    theirs = torch.autograd.grad(
        pad_packed_sequence(expected)[0].square().sum(), [*rows, *plain.parameters()]
    )
    assert_close(grads, theirs)


def test_packed_sequences_pass_their_gradients_in_parallel_apply_too():
    fun = lambda packed: packed.data.square().sum()
    inputs = [pack_sequence([rand(2, 3)])._replace(data=rand(2, 3, requires_grad=True)) for _ in range(2)]
    one, two = compat.parallel_apply(fun, inputs)
    (one + two).backward()
    assert_close(inputs[1].data.grad, 2 * inputs[1].data.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_trace_is_that_of_the_module():
    wrapper = compat.DataParallel(mlp())
    traced = torch.jit.trace(wrapper, rand(4, 3))
    x = rand(5, 3)
    assert_close(traced(x), wrapper(x))


def test_a_buffer_that_forward_assigns_leaves_the_old_tensor_alone():
    def fun(layer, x):
        layer.last = x.sum(0).detach()
        layer.total += 1
        return layer(x)

    module = Calling(fun)
    module.layer.register_buffer("last", torch.zeros(3).double())
    module.layer.register_buffer("total", torch.zeros(()))
    last, total = module.layer.last, module.layer.total
    compat.DataParallel(module)(rand(8, 3))
    assert last.tolist() == [0, 0, 0]
    assert module.layer.last is not last
    assert module.layer.total is total
    assert total == 1


def test_a_patch_of_the_class_is_called(monkeypatch):
    calls = []
    whole = compat.DataParallel.replicate
    monkeypatch.setattr(compat.DataParallel, "replicate", lambda *args: calls.append(1) or whole(*args))
    compat.DataParallel(mlp())(rand(4, 3))
    assert calls == [1]
