"""DataParallel and data_parallel where torch defines what they do: equal to the plain module."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from compat_models import (
    Calling,
    Point,
    assert_close,
    assert_same_gradients,
    classifier,
    ids,
    mlp,
    pair,
    rand,
)
from torch import nn

import compat
import funcpar as fp
from tests.cycles import no_cycle_collection


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_outputs_and_gradients_are_those_of_the_plain_module(devices, rows):
    module, plain = pair(lambda: classifier().eval())
    x = rand(rows, 3, 8, 8)
    out = compat.DataParallel(module, device_ids=ids())(x)
    assert_close(out, plain(x))
    (out**2).mean().backward()
    (plain(x) ** 2).mean().backward()
    assert_same_gradients(module, plain)


def test_a_wrapper_is_an_instance_of_torchs_class():
    assert isinstance(compat.DataParallel(mlp()), torch.nn.DataParallel)


def test_the_functional_form_takes_one_input_a_tuple_none_and_keywords(devices):
    module, x, y = (
        Calling(lambda layer, x=None, y=2.0: layer.weight * 1 if x is None else layer(x) * y),
        rand(4, 3),
        3.0,
    )
    plain = module.layer
    assert_close(compat.data_parallel(module, x, ids()), plain(x) * 2)
    assert_close(compat.data_parallel(module, (x, y), ids(), ids()[-1]), plain(x) * 3)
    assert_close(compat.data_parallel(module, x, module_kwargs={"y": rand(4, 1).abs_() * 0 + 1}), plain(x))
    assert_close(compat.data_parallel(module, None), plain.weight)
    assert_close(compat.data_parallel(module, None, module_kwargs={"x": x}), plain(x) * 2)


def test_gradients_are_added_to_those_that_are_there():
    module, plain = pair(mlp)
    x = rand(5, 3)
    for _ in range(2):
        compat.DataParallel(module)(x).sum().backward()
        plain(x).sum().backward()
    assert_same_gradients(module, plain)


def test_several_inputs_are_split_together(devices):
    module, plain = pair(lambda: Calling(lambda layer, a, b, *, c: layer(a) * b + c))
    a, b, c = rand(7, 3), rand(7, 1, requires_grad=True), rand(7, 2)
    compat.DataParallel(module)(a, b, c=c).sum().backward()
    grad, b.grad = b.grad, None
    plain(a, b, c=c).sum().backward()
    assert_close(grad, b.grad)
    assert_same_gradients(module, plain)


def test_nested_inputs_and_outputs_keep_their_structure(devices):
    def fun(layer, given):
        point, (rest, number) = given["point"], given["rest"]
        return [layer(point.x), (point.y, {"r": rest * number}), Point(layer(rest), None)]

    module, plain = pair(lambda: Calling(fun))
    given = {"point": Point(rand(6, 3), rand(6)), "rest": [rand(6, 3), 2], "empty": {}}
    mine, theirs = compat.DataParallel(module)(given), plain(given)
    assert type(mine[2]) is Point
    assert mine[2].y is None
    assert_close(mine, theirs)


@pytest.mark.parametrize("empty", [{}, [], ()], ids=str)
def test_an_empty_container_beside_keyword_inputs_is_passed_on(devices, empty):
    def fun(layer, *, data, unused):
        assert unused == empty
        return layer(data["x"])

    module, x = Calling(fun), rand(5, 3)
    assert_close(compat.DataParallel(module)(data={"x": x}, unused=empty), module.layer(x))


def test_a_module_without_inputs_runs_once():
    calls = []
    module = Calling(lambda layer: calls.append(1) or layer.weight * 2)
    assert_close(compat.DataParallel(module)(), module.layer.weight * 2)
    assert calls == [1]


def test_a_0d_output_becomes_one_entry_per_replica_without_a_warning(devices):
    module, x = Calling(lambda layer, x: layer(x).sum()), rand(9, 3)
    out = compat.DataParallel(module)(x)
    assert_close(out.sum(), module.layer(x).sum())
    assert out.shape == ((len(devices),) if len(devices) > 1 else ())


def test_rows_may_be_along_another_dimension(devices):
    module, plain = pair(lambda: nn.LSTM(3, 4, num_layers=2).double())
    x = rand(5, 7, 3)
    mine, (h, c) = compat.DataParallel(module, dim=1)(x)
    theirs, (h2, c2) = plain(x)
    assert_close((mine, h, c), (theirs, h2, c2))
    mine.sum().backward()
    theirs.sum().backward()
    assert_same_gradients(module, plain)


def test_devices_are_used_in_the_order_given():
    seen = {}

    def fun(layer, x, tag):
        seen[int(x[0, 0])] = tag
        return layer(x)

    x = torch.arange(4.0).double().reshape(4, 1).expand(4, 3)
    module = Calling(fun)
    wrapper = compat.DataParallel(module, device_ids=(1, 2, 3, 0), output_device=2)
    assert wrapper.device_ids == [1, 2, 3, 0]
    assert wrapper.output_device == 2
    assert_close(wrapper(x, tag="a"), module.layer(x))
    assert seen == dict.fromkeys(range(4), "a")


@pytest.mark.parametrize("given", [["cpu:1", "cpu:3"], [torch.device("cpu", 1), 3]], ids=["names", "mixed"])
def test_devices_may_be_named_in_every_way(given):
    wrapper = compat.DataParallel(mlp(), device_ids=given, output_device=torch.device("cpu"))
    assert wrapper.device_ids == [1, 3]
    assert compat.DataParallel(mlp(), [fp.devices()[2]]).device_ids == [2]


def test_no_device_at_all_passes_calls_on_to_the_module():
    module, x = Calling(lambda layer, x: layer(x).sum()), rand(4, 3)
    assert compat.DataParallel(module, device_ids=[])(x).shape == ()
    assert compat.data_parallel(module, x, []).shape == ()


def test_no_grad_and_inference_mode_reach_the_replicas(devices):
    seen = []
    module = Calling(
        lambda layer, x: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())) or layer(x)
    )
    wrapper, x = compat.DataParallel(module), rand(4, 3)
    with torch.no_grad():
        assert not wrapper(x).requires_grad
    with torch.inference_mode():
        assert wrapper(x).is_inference()
    assert set(seen) == {(False, False), (False, True)}


def test_autocast_reaches_the_replicas_with_its_dtype(devices):
    module, x = nn.Linear(3, 2), torch.randn(8, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        out = compat.DataParallel(module)(x)
        assert out.dtype is torch.float16
        torch.testing.assert_close(out, module(x))


def test_sparse_gradients_stay_sparse(devices):
    module, plain = pair(lambda: nn.Embedding(10, 3, sparse=True).double())
    x = torch.tensor([1, 2, 2, 9, 1])
    compat.DataParallel(module)(x).sum().backward()
    plain(x).sum().backward()
    assert module.weight.grad.is_sparse
    assert_close(module.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_channels_last_is_kept(devices):
    module = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    x = rand(6, 3, 8, 8).to(memory_format=torch.channels_last)
    out = compat.DataParallel(module)(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert_close(out, module(x))
    out.sum().backward()
    assert module.weight.grad.is_contiguous(memory_format=torch.channels_last)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(rand(3)), nn.Parameter(rand(3, dtype=torch.complex128))])
        self.dict = nn.ParameterDict(
            {"a": nn.Parameter(rand(3)), "b": nn.Parameter(rand(3), requires_grad=False)}
        )

    def forward(self, x):
        return (x * self.list[0] + x * self.list[1]).real * self.dict["a"] + self.dict["b"]


def test_parameters_in_lists_and_dicts_complex_and_frozen_ones_work(devices):
    module, plain = pair(Lists)
    x = rand(5, 3)
    compat.DataParallel(module)(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(module, plain)


def test_a_gradient_penalty_has_the_gradients_of_the_plain_module(devices):
    module, plain = pair(mlp)

    def penalty(net):
        x = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(7, 3).requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).square().mean().backward()
        return x.grad

    assert_close(penalty(compat.DataParallel(module)), penalty(plain))
    assert_same_gradients(module, plain)


def test_an_unused_parameter_has_no_gradient_and_a_frozen_one_asks_for_none(devices):
    module, plain = pair(lambda: nn.ModuleDict({"used": mlp(), "unused": mlp()}))
    module.used[0].weight.requires_grad_(False)
    plain.used[0].weight.requires_grad_(False)
    seen = []

    class Wrapped(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            seen.append(self.parts.used[0].weight.requires_grad)
            return self.parts["used"](x)

    x = rand(8, 3)
    compat.DataParallel(Wrapped(module))(x).sum().backward()
    plain["used"](x).sum().backward()
    assert_same_gradients(module, plain)
    assert not any(seen)


def test_buffers_that_require_a_gradient_get_it(devices):
    module = Calling(lambda layer, x: x * layer.scale)
    module.layer.register_buffer("scale", rand(3).requires_grad_())
    x = rand(5, 3)
    compat.DataParallel(module)(x).sum().backward()
    assert_close(module.layer.scale.grad, x.sum(0))


def test_zero_grad_and_parameters_are_the_modules_own():
    module = mlp()
    wrapper = compat.DataParallel(module)
    wrapper(rand(4, 3)).sum().backward()
    assert all(a is b for a, b in zip(wrapper.parameters(), module.parameters(), strict=True))
    wrapper.zero_grad()
    assert all(param.grad is None for param in module.parameters())


def test_a_used_wrapper_pickles_copies_and_saves():
    wrapper = compat.DataParallel(mlp(), device_ids=[2, 0], buffers="mean")
    x = rand(5, 3)
    out = wrapper(x)
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    for other in (
        pickle.loads(pickle.dumps(wrapper)),
        copy.deepcopy(wrapper),
        torch.load(file, weights_only=False),
    ):
        assert type(other) is compat.DataParallel
        assert other.device_ids == [2, 0]
        assert other.module is not wrapper.module
        assert_close(other(x), out)


def test_nothing_keeps_a_wrapper_or_its_graph_alive():
    wrapper = compat.DataParallel(mlp())
    out = wrapper(rand(4, 3))
    out.sum().backward()
    alive = [weakref.ref(wrapper), weakref.ref(wrapper.module), weakref.ref(out)]
    with no_cycle_collection():
        del wrapper, out
        assert [ref() for ref in alive] == [None, None, None]


def test_hooks_run_once_per_replica_and_those_of_the_wrapper_once():
    inner, backward, outer = [], [], []
    module = mlp()
    module[0].register_forward_hook(lambda m, args, out: inner.append(len(args[0])))
    module[2].register_full_backward_hook(lambda m, gin, gout: backward.append(len(gout[0])))
    wrapper = compat.DataParallel(module)
    wrapper.register_forward_hook(lambda m, args, out: outer.append(len(out)))
    wrapper(rand(9, 3)).sum().backward()
    assert (sorted(inner), sorted(backward), outer) == ([2, 2, 2, 3], [2, 2, 2, 3], [9])
