"""What forward writes on its module: kept as by a plain call, named where it cannot be, or refused."""

from collections import deque
from functools import partial

import pytest
import torch
from compat_models import Calling, assert_close, assert_same_gradients, pair, rand
from torch import nn
from torch.nn import functional as F

import compat


class Writing(nn.Module):
    """A module whose forward begins with a function of the module itself."""

    def __init__(self, write, **attributes):
        super().__init__()
        self.fc, self.other, self.write = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), write
        self.norm = nn.BatchNorm1d(3).double()
        for name, value in attributes.items():
            setattr(self, name, value)

    def fast(self, x):
        return self.fc(x)

    def forward(self, x):
        out = self.write(self, x)
        return self.fc(x) if out is None else out


def told(names, call="DataParallel"):
    return pytest.warns(UserWarning, match=rf"{call}: forward writes {names} on its module")


def use_list(s, x):
    s.found = s.found or [s.fc]
    return s.found[0](x)


def use_method(s, x):
    s.found = s.found or s.fast
    return s.found(x)


def use_function(s, x):
    s.found = s.found or (lambda x: s.fc(x) + 0)
    return s.found(x)


def use_partial(s, x):
    s.found = s.found or partial(F.linear, weight=s.fc.weight)
    return s.found(x)


def use_parameters(s, x):
    s.found = s.found or {"w": s.fc.weight}
    return F.linear(x, s.found["w"])


REFERENCES = [use_list, use_method, use_function, use_partial, use_parameters]


@pytest.mark.parametrize("write", REFERENCES)
def test_what_refers_to_the_replica_does_not_replace_the_module(write):
    module, plain = pair(lambda: Writing(write, found=None))
    wrapper, x = compat.DataParallel(module), rand(8, 3)
    with told("found"):
        wrapper(x)
    for _ in range(2):
        module.zero_grad()
        wrapper(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(module, plain)


@pytest.mark.parametrize("write", REFERENCES)
@pytest.mark.filterwarnings("ignore:parallel_apply. forward writes found:UserWarning")
def test_parallel_apply_of_several_modules_keeps_their_gradients_too(write):
    one, two = Writing(write, found=None), Writing(write, found=None)
    x = rand(8, 3)
    for _ in range(2):
        outs = compat.parallel_apply([one, two], [x, x])
    torch.cat(outs).sum().backward()
    assert one.fc.weight.grad is not None
    assert two.fc.weight.grad is not None


def test_references_are_mapped_to_the_module_itself():
    def write(s, x):
        s.layers, s.call, s.weights = [s.fc, s.other], s.fast, (s.fc.weight,)

    module = Writing(write)
    with told("layers, call, weights"):
        compat.DataParallel(module)(rand(8, 3))
    assert module.layers[0] is module.fc
    assert module.call == module.fast
    assert module.weights[0] is module.fc.weight


def test_a_function_of_the_replica_is_lost_and_named():
    module = Writing(lambda s, x: setattr(s, "found", lambda x: s.fc(x) + 0), found=None)
    with told("found"):
        compat.DataParallel(module)(rand(8, 3))
    with told("found", "parallel_apply"):
        compat.parallel_apply([module, nn.Identity()], [rand(2, 3)] * 2)
    assert module.found is None


def test_other_names_for_submodules_and_parameters_stay():
    def write(s, x):
        s.active, s.fc.bias, s.other.weight = s.fc, None, s.fc.weight

    module = Writing(write)
    with told("active, fc.bias, other.weight"):
        compat.DataParallel(module)(rand(8, 3)).sum().backward()
    assert module.active is module.fc
    assert module.fc.bias is None
    assert module.other.weight is module.fc.weight
    assert module.fc.weight.grad is not None


def clip(s, x):
    s.fc.weight.data = s.fc.weight.data.clamp(-0.1, 0.1)


def test_other_data_for_a_parameter_is_refused_in_several_replicas_and_kept_in_one():
    module, x = Writing(clip), rand(8, 3)
    with pytest.raises(ValueError, match=r"forward gives fc\.weight other data, and every replica does"):
        compat.DataParallel(module)(x)
    plain = Writing(clip)
    plain.load_state_dict(module.state_dict())
    outs = compat.parallel_apply([module, nn.Identity()], [x, x])
    assert_close(outs[0], plain(x))
    assert_close(module.fc.weight, plain.fc.weight)
    assert module.fc.weight.abs().max() <= 0.1


class Helper:
    def __init__(self):
        self.count, self.inner = 0, {"list": [1], "deque": deque([1], maxlen=2)}


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


def test_helpers_and_nested_containers_are_written_to_in_place():
    def write(s, x):
        s.helper.count += len(x)
        s.helper.inner["list"].append(len(x))
        s.helper.inner["deque"].append(s.fc)
        s.slotted.count += 1
        s.nested["a"][0]["b"] = len(x)

    helper, slotted, nested = Helper(), Slotted(), {"a": [{}]}
    module = Writing(write, helper=helper, slotted=slotted, nested=nested)
    with told("helper, slotted, nested"):
        compat.DataParallel(module)(rand(8, 3))
    assert (module.helper, module.slotted, module.nested) == (helper, slotted, nested)
    assert (helper.count, helper.inner["list"], slotted.count) == (2, [1, 2], 1)
    assert list(helper.inner["deque"]) == [1, module.fc]
    assert nested == {"a": [{"b": 2}]}


def test_attributes_of_torchs_own_layers_stay():
    def write(s, x):
        s.fc.calls = len(x)
        s.norm.momentum = 0.5
        s.other.eval()
        s.other.weight.requires_grad_(False)

    module = Writing(write)
    with told(r"other.weight.requires_grad, fc.calls, other.training, norm.momentum"):
        compat.DataParallel(module)(rand(8, 3))
    assert (module.fc.calls, module.norm.momentum, module.other.training) == (2, 0.5, False)
    assert not module.other.weight.requires_grad


def test_hooks_may_write_on_the_layer_they_are_on():
    module = Writing(lambda s, x: None)
    module.fc.register_forward_hook(lambda m, args, out: setattr(m, "out", out))
    x = rand(8, 3)
    with told(r"fc.out"):
        compat.DataParallel(module)(x)
    assert_close(module.fc.out, F.linear(x[:2], module.fc.weight, module.fc.bias))
    module.fc.out.sum().backward()
    assert module.fc.weight.grad is not None


def test_a_buffer_that_was_none_is_kept():
    module = Writing(lambda s, x: setattr(s, "last", x.detach()))
    module.register_buffer("last", None, persistent=False)
    x = rand(8, 3)
    with told("last"):
        compat.DataParallel(module)(x)
    assert_close(module.last, x[:2])
    assert "last" not in module.state_dict()


def test_a_hook_registered_in_forward_is_named_as_lost():
    module = Writing(lambda s, x: s.fc.register_forward_hook(lambda m, args, out: None) and None)
    with told("fc._forward_hooks"):
        compat.DataParallel(module)(rand(8, 3))
    assert not module.fc._forward_hooks


def test_what_another_replica_alone_writes_is_named_too():
    def write(s, x):
        if x[0, 0] > 5:
            s.flag = True

    module = Writing(write, flag=False)
    with told("flag"):
        compat.DataParallel(module)(torch.arange(24).reshape(8, 3).double())
    assert module.flag is False


def test_a_value_that_is_gone_is_gone():
    module = Writing(lambda s, x: delattr(s, "flag"), flag=True)
    with told("flag"):
        compat.DataParallel(module)(rand(8, 3))
    assert not hasattr(module, "flag")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.MultiheadAttention])
def test_torchs_layers_write_nothing(layer):
    net = layer(4, 2).double()
    fun = (lambda x: net(x, x, x)[0]) if layer is nn.MultiheadAttention else (lambda x: net(x)[0])
    module = Calling(lambda _, x: fun(x))
    module.net = net
    wrapper = compat.DataParallel(module)
    for _ in range(2):  # Silent: warnings are errors here.
        wrapper(rand(8, 4)).sum().backward()


class Opaque:
    def __init__(self, value):
        self._fields = {"value": value}


class InSlots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


HIDING = {
    "field": Opaque,
    "slot": InSlots,
    "independent": lambda t: torch.distributions.Independent(torch.distributions.Normal(t, 1.0), 1),
    "partial": lambda t: partial(torch.add, t),
    "set": lambda t: {t},
    "iterator": lambda t: iter([t]),
    "generator": lambda t: (t * k for k in range(3)),
    "lambda": lambda t: lambda: t,
    "default": lambda t: lambda given=t: given,
}


@pytest.mark.parametrize("name", HIDING)
def test_an_output_that_hides_a_gradient_is_refused(name):
    module = Calling(lambda layer, x: HIDING[name](layer(x)))
    with pytest.raises(
        TypeError, match=r"DataParallel: a replica returned a \w+, whose tensor .* would lose"
    ):
        compat.DataParallel(module)(rand(4, 3))
    with torch.no_grad():
        assert len(compat.parallel_apply(module, [rand(4, 3)] * 2)) == 2


def test_a_function_may_return_a_module_and_its_optimizer():
    def train(rows):
        module = nn.Linear(3, 2)
        module(torch.ones(rows, 3)).sum().backward()
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    (one, _), (two, _) = compat.parallel_apply(train, [2, 3])
    assert one.weight.grad.sum() == 12
    assert two.weight.grad.sum() == 18
