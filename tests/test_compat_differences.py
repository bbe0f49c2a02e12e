"""Where torch.nn.parallel is known to be wrong: every case of a public report, and what is right."""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from compat_models import Calling, assert_close, assert_same_gradients, mlp, pair, rand
from torch import nn
from torch.utils.checkpoint import checkpoint

import compat


def through(fun, *args, **kwargs):
    return compat.DataParallel(Calling(lambda layer, *a, **k: fun(*a, **k)))(*args, **kwargs)


def test_rows_of_a_loss_give_the_gradient_of_the_whole_batch(devices):  # DP-17, DP-26, DP-27
    module, plain = pair(lambda: Calling(lambda layer, x, y: (layer(x) - y).square().mean(1)))
    x, y = rand(13, 3), rand(13, 2)
    compat.DataParallel(module)(x, y).mean().backward()
    plain(x, y).mean().backward()
    assert_same_gradients(module, plain)


def test_parameters_are_complete_inside_forward_and_carry_gradients(devices):  # DP-28
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x):
            assert [name for name, _ in self.named_parameters()] == ["layer.weight", "layer.bias"]
            return self.layer(x) + sum(p.square().sum() for p in self.parameters())

    module, plain = pair(Penalized)
    x = rand(5, 3)
    out, expected = compat.DataParallel(module)(x), plain(x)
    assert_close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert_same_gradients(module, plain)


def test_tensors_in_plain_attributes_are_seen_and_keep_their_gradients(devices):  # DP-32
    module = Calling(lambda layer, x: x * layer.scale)
    module.layer.scale = rand(3).requires_grad_()
    x = rand(5, 3)
    compat.DataParallel(module)(x).sum().backward()
    assert_close(module.layer.scale.grad, x.sum(0))


def test_gradients_taken_inside_forward_stay_inside(devices):  # DP-39, DP-40
    class Saliency(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x):
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                self.layer(x).square().sum().backward()
            self.zero_grad()
            return x.grad

    module, plain = pair(Saliency)
    x = rand(5, 3)
    assert_close(compat.DataParallel(module)(x), plain(x))
    assert module.layer.weight.grad is None or len(devices) == 1


def test_functional_call_takes_other_parameters_through_the_wrapper(devices):  # DP-47
    module, x = mlp(), rand(5, 3)
    wrapper = compat.DataParallel(module)
    params = {name: rand(*p.shape).requires_grad_() for name, p in wrapper.named_parameters()}
    out = torch.func.functional_call(wrapper, params, (x,))
    plain = {name.removeprefix("module."): p for name, p in params.items()}
    expected = torch.func.functional_call(module, plain, (x,))
    assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), list(params.values()))
    assert_close(grads, torch.autograd.grad(expected.sum(), list(params.values())))
    with pytest.raises(
        ValueError, match=r"the names are not the wrapper's:\n  'module\.9\.bias'  unknown\nGive names"
    ):
        torch.func.functional_call(wrapper, {"module.9.bias": x}, (x,))


def test_torch_func_works_through_the_wrapper(devices):  # DP-48
    module, x = mlp(), rand(5, 3)
    wrapper = compat.DataParallel(module)
    names = [name for name, _ in wrapper.named_parameters()]

    def loss(net, names, values, x):
        return (
            torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))
            .square()
            .mean(1)
            .sum()
        )

    values = tuple(p.detach() for p in module.parameters())
    plain = [name.removeprefix("module.") for name in names]
    mine = torch.func.grad(lambda v: loss(wrapper, names, v, x))(values)
    assert_close(mine, torch.func.grad(lambda v: loss(module, plain, v, x))(values))
    assert_close(
        torch.func.grad(lambda x: wrapper(x).sum())(x), torch.func.grad(lambda x: module(x).sum())(x)
    )
    assert_close(torch.func.jacrev(wrapper)(x), torch.func.jacrev(module)(x))


label = ContextVar("label", default="none")


def test_the_callers_world_reaches_every_replica(devices):  # DP-51, DP-52
    seen = []

    def fun(x):
        seen.append(
            (
                label.get(),
                torch.get_default_dtype(),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            )
        )
        return x

    token = label.set("caller")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            through(fun, rand(8, 3))
    finally:
        torch.set_default_dtype(torch.float32)
        label.reset(token)
    assert set(seen) == {("caller", torch.float64, torch.float16, False)}


class Particular(Exception):
    def __init__(self, row, why):
        super().__init__(row, why)
        self.row = row


@pytest.mark.parametrize("kind", [Particular, SystemExit, KeyboardInterrupt])
def test_an_exception_keeps_its_type_and_arguments(kind):  # DP-53
    def fun(x):
        if int(x[0]) >= 2:
            raise kind(int(x[0]), "bad")
        return x

    with pytest.raises(kind) as caught:
        through(fun, torch.arange(4))
    assert caught.value.args == (2, "bad")
    assert "raised in shard 2 of 4 on cpu[2]" in caught.value.__notes__[0]


def test_checkpoints_inside_and_around_work(devices):  # DP-56
    module, plain = pair(mlp)
    x = rand(5, 3, requires_grad=True)
    inside = Calling(lambda layer, x: checkpoint(module, x, use_reentrant=False))
    compat.DataParallel(inside)(x).square().sum().backward()
    plain(x.detach()).square().sum().backward()
    assert_same_gradients(module, plain)
    module.zero_grad()
    checkpoint(compat.DataParallel(module), x, use_reentrant=False).square().sum().backward()
    assert_same_gradients(module, plain)


def test_inputs_may_be_written_to_in_place_as_with_the_plain_module(devices):
    first, head = mlp(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1).double())
    x = rand(5, 3)
    compat.DataParallel(head)(first(x)).sum().backward()
    grad = first[0].weight.grad.clone()
    first.zero_grad()
    head(first(x)).sum().backward()
    assert_close(grad, first[0].weight.grad)


def test_inputs_without_a_gradient_may_be_written_to_in_place_too(devices):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.table = nn.Parameter(rand(3)), nn.Embedding(5, 3).double()

        def forward(self, x, index):
            x.mul_(self.scale)
            return x * self.table(index.clamp_(max=2))

    module, plain = pair(Scaling)
    x, index = rand(9, 3), torch.randint(5, (9,))
    compat.DataParallel(module)(x.clone(), index.clone()).sum().backward()
    plain(x.clone(), index).sum().backward()
    assert_same_gradients(module, plain)


def test_masks_repeat_with_the_seed_and_differ_between_replicas():  # DP-70
    wrapper, x = compat.DataParallel(nn.Dropout()), torch.ones(8, 50)
    torch.manual_seed(3)
    first, second = wrapper(x), wrapper(x)
    torch.manual_seed(3)
    assert torch.equal(wrapper(x), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:2], first[2:4])


def test_helpers_that_forward_writes_to_belong_to_a_replica():  # DP-38, DP-42
    module = Calling(lambda layer, x: (layer.kept.append(len(x)), layer(x))[1])
    module.layer.kept = []
    compat.DataParallel(module, [0])(rand(4, 3))
    assert module.layer.kept == [4]


def test_no_module_of_compat_uses_a_private_name_of_funcpar():
    sources = list(Path(compat.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        text = source.read_text()
        assert "funcpar." not in text.replace("funcpar.readthedocs", ""), source.name
        assert "from funcpar" not in text, source.name
        assert "fp._" not in text, source.name


def test_a_scalar_loss_does_not_warn():  # DP-17
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert through(lambda x: x.sum(), rand(4, 3)).shape == (4,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapper_in_a_compiled_graph_runs_as_ever():  # DP-54
    module, x = mlp(), rand(5, 3)
    for net in (compat.DataParallel(module), nn.Sequential(compat.DataParallel(module), nn.Tanh())):
        expected = net(x)
        out = torch.compile(net, backend="eager")(x)
        assert_close(out, expected)
        grads = torch.autograd.grad(out.sum(), list(module.parameters()))
        assert_close(grads, torch.autograd.grad(expected.sum(), list(module.parameters())))


def test_calls_from_many_threads_do_not_mix():
    wrapper, inputs = compat.DataParallel(mlp()), [rand(5, 3) for _ in range(20)]
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(wrapper, inputs, timeout=60))
    assert_close(outs, [wrapper.module(x) for x in inputs])


def test_code_in_the_documentation_runs():
    text = (Path(compat.__file__).parent.parent / "docs" / "compat.md").read_text()
    assert text.splitlines()[2].startswith("**0-d outputs stay torch's vector, one entry per replica")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})
