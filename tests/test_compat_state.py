"""What a call leaves on the module: buffers, attributes, state dicts; and its other methods."""

import copy
import warnings

import pytest
import torch
from compat_models import (
    Calling,
    Counting,
    assert_close,
    assert_same_gradients,
    classifier,
    ids,
    mlp,
    pair,
    rand,
)
from torch import nn
from torch.nn.utils import parametrizations

import compat


def norm() -> nn.Module:
    return nn.BatchNorm1d(3).double()


def test_buffers_are_those_of_the_first_replica_in_the_modules_own_tensors(devices):
    module, plain = pair(norm)
    mean, x = module.running_mean, rand(9, 3)
    compat.DataParallel(module)(x)
    plain(compat.scatter(x, ids())[0])
    assert module.running_mean is mean
    assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_buffers_under_mean_are_weighted_by_rows(devices):
    module, x = norm(), rand(9, 3)
    compat.DataParallel(module, buffers="mean")(x)
    assert_close(module.running_mean, 0.1 * x.mean(0))
    assert int(module.num_batches_tracked) == 1


def test_buffers_that_do_not_change_are_not_written_to():
    module = classifier().eval()
    versions = [b._version for b in module.buffers()]
    compat.DataParallel(module)(rand(8, 3, 8, 8))
    assert versions == [b._version for b in module.buffers()]


def test_two_forwards_in_train_mode_before_one_backward_work():
    module, x = nn.Sequential(mlp(), nn.BatchNorm1d(2).double()), rand(8, 3)
    wrapper = compat.DataParallel(module)
    (wrapper(x) - wrapper(2 * x)).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_buffer_of_another_shape_takes_the_place_of_the_old_one():
    module = Calling(lambda layer, x: setattr(layer, "last", x.sum(0).detach()) or layer(x))
    module.layer.register_buffer("last", torch.zeros(()))
    compat.DataParallel(module)(torch.ones(8, 3).double())
    assert module.layer.last.tolist() == [2, 2, 2]
    assert "layer.last" in module.state_dict()


def test_spectral_norm_trains_and_evaluates_as_the_plain_module(devices):
    module, plain = pair(lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).double())
    wrapper, x = compat.DataParallel(module), rand(8, 3)
    assert_close(wrapper(x), plain(x))
    assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    module.eval()
    plain.eval()
    assert_close(wrapper(x), plain(x))


@pytest.mark.parametrize("old", [nn.utils.spectral_norm, nn.utils.weight_norm], ids=["spectral", "weight"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_old_style_norms_work_and_are_no_writes_of_forward(old):
    module, plain = nn.Sequential(old(nn.Linear(3, 2).double())), None
    wrapper, x = compat.DataParallel(module), rand(8, 3)
    out = wrapper(x)
    out.sum().backward()
    plain = module.eval()(x)
    assert_close(wrapper(x), plain)
    assert all(p.grad is not None for p in module.parameters())


def test_attributes_written_in_forward_are_kept_from_the_first_replica_and_warned_about_once():
    module = Counting()
    seen = module.seen
    wrapper, x = compat.DataParallel(module), rand(9, 3)
    with pytest.warns(UserWarning, match=r"DataParallel: forward writes calls, seen, feature on its module"):
        wrapper(x)
    wrapper(x)  # Silent: warnings are errors here.
    assert module.calls == 2
    assert seen == module.seen == [3, 3]
    assert_close(module.feature, module.layer(x[:3]))


def test_a_feature_kept_by_forward_still_carries_its_gradient():
    module, plain = pair(Counting)
    x = rand(8, 3)
    with pytest.warns(UserWarning, match=r"forward writes"):
        compat.DataParallel(module)(x)
    module.feature.sum().backward()
    plain.layer(x[:2]).sum().backward()
    assert_same_gradients(module, plain)


def test_one_replica_alone_writes_without_a_warning():
    module = Counting()
    compat.DataParallel(module)(rand(1, 3))
    compat.DataParallel(module, [2])(rand(4, 3))
    one, two = Counting(), Counting()
    compat.parallel_apply([one, two], [rand(2, 3), rand(3, 3)])
    assert (module.calls, one.calls, two.seen) == (2, 1, [3])


def test_a_module_that_runs_several_times_keeps_what_the_first_call_wrote():
    module = Counting()
    with pytest.warns(UserWarning, match=r"parallel_apply: forward writes calls, seen, feature"):
        compat.parallel_apply(module, [rand(2, 3), rand(3, 3)], devices=[0, 1])
    assert module.seen == [2]


def test_a_forward_that_makes_parameters_is_refused_unless_it_ran_before():
    class Late(nn.Module):
        def forward(self, x):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(x.shape[1], 2).double()
            return self.layer(x)

    module, x = Late(), rand(4, 3)
    with pytest.raises(
        ValueError, match=r"forward makes or replaces layer, which would be another one in every"
    ):
        compat.DataParallel(module)(x)
    expected = module(x)
    assert_close(compat.DataParallel(module)(x), expected)


def test_an_attribute_that_hides_a_gradient_is_not_kept():
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.found = nn.Linear(3, 2).double(), None

        def forward(self, x):
            self.found = torch.distributions.Normal(self.layer(x), 1.0)
            return self.found.mean

    module = Hiding()
    with pytest.warns(UserWarning, match=r"forward writes found on its module"):
        compat.DataParallel(module)(rand(4, 3))
    assert module.found is None


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_loads_with_or_without_the_prefix(strict):
    plain, other = mlp(), mlp()
    for source in (
        plain,
        compat.DataParallel(plain),
        torch.nn.DataParallel(plain),
        compat.DataParallel(compat.DataParallel(plain)),
    ):
        wrapper = compat.DataParallel(copy.deepcopy(other))
        state = source.state_dict()
        keys = list(state)
        assert str(wrapper.load_state_dict(state, strict=strict)) == "<All keys matched successfully>"
        assert list(state) == keys
        assert_close(wrapper.module.state_dict(), plain.state_dict())
    assert all(key.startswith("module.") for key in wrapper.state_dict())
    assert str(mlp().load_state_dict(wrapper.module.state_dict())) == "<All keys matched successfully>"


def test_a_wrapper_inside_a_model_loads_either_way_too():
    wrapped = nn.Sequential(compat.DataParallel(mlp()), nn.Linear(2, 1).double())
    plain = nn.Sequential(mlp(), nn.Linear(2, 1).double())
    wrapped.load_state_dict(plain.state_dict())
    compat.DataParallel(wrapped).load_state_dict(plain.state_dict())
    assert_close(wrapped[0].module.state_dict(), plain[0].state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"0\.module\.9\.bias\""):
        wrapped.load_state_dict({**plain.state_dict(), "0.9.bias": torch.ones(1)})


def test_methods_and_attributes_of_the_module_are_read_through_the_wrapper():
    module = Counting()
    wrapper = compat.DataParallel(module)
    assert wrapper.calls == 0
    assert wrapper.layer is module.layer
    assert wrapper.module is module
    assert not hasattr(wrapper, "nothing")
    with pytest.raises(AttributeError, match=r"'Counting' object has no attribute 'nothing'"):
        wrapper.nothing  # noqa: B018


def test_another_method_runs_in_parallel(devices):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def encode(self, x, scale=1.0):
            return self.layer(x) * scale

    module, plain = pair(Coder)
    wrapper, x = compat.DataParallel(module), rand(9, 3)
    out = wrapper.apply_method("encode", x, scale=2.0)
    assert_close(out, wrapper.encode(x, 2.0))
    out.sum().backward()
    plain.encode(x, 2.0).sum().backward()
    assert_same_gradients(module, plain)


def test_what_a_wrapper_cannot_wrap_is_refused():
    with pytest.raises(
        TypeError, match=r"DataParallel: function is not an nn.Module\.\nFor a function use fp.pmap"
    ):
        compat.DataParallel(lambda x: x)
    with pytest.raises(
        ValueError, match=r"DataParallel: buffers='last' is unknown\.\nGive \"first\" or \"mean\""
    ):
        compat.DataParallel(mlp(), buffers="last")
    with pytest.raises(
        ValueError,
        match=r"DataParallel: there is no device '7'; there are 'cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'",
    ):
        compat.DataParallel(mlp(), [0, 7])

    class Odd(compat.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return [(), ()], [{}]

    with pytest.raises(ValueError, match=r"scatter returned 2 tuples of arguments and 1 dicts"):
        Odd(mlp())(1)


def test_silence_is_the_rule_for_modules_that_write_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 3, 8):
            compat.DataParallel(classifier())(rand(rows, 3, 8, 8)).sum().backward()
