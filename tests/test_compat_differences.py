"""Where torch.nn.parallel is known to be wrong: every case of a public report, and what is right."""

import subprocess
import sys
import warnings
from collections import OrderedDict, defaultdict
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from compat_models import (
    Calling,
    Named,
    Point,
    Result,
    assert_close,
    assert_same_gradients,
    classifier,
    ids,
    mlp,
    pair,
    rand,
)  # fmt: skip
from torch import nn
from torch.utils.checkpoint import checkpoint

import compat
import funcpar as fp


def through(fun, *args, **kwargs):
    return compat.DataParallel(Calling(lambda layer, *a, **k: fun(*a, **k)))(*args, **kwargs)


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 13])
def test_plain_keywords_never_call_a_replica_without_rows(devices, rows):  # DP-01, DP-02
    x, sizes = rand(rows, 3), []
    out = through(lambda x, delta, *, flag: sizes.append(len(x)) or x + delta, x, 3, flag="a")
    assert_close(out, x + 3)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, len(devices))
    assert max(sizes) - min(sizes) <= 1


def test_a_row_is_never_dropped():  # DP-03
    with pytest.raises(
        ValueError, match=r"inputs\[0\]    5 rows\n  kwargs\['y'\]  1 row\nGive them all the same"
    ):
        through(lambda x, y: x, rand(5, 3), y=rand(1))


def test_one_device_takes_whatever_the_plain_module_takes():  # DP-03
    module = Calling(lambda layer, x, y: layer(x) + y)
    assert_close(compat.DataParallel(module, [1])(x := rand(5, 3), y := rand(1)), module(x, y))


def test_0d_tensors_go_to_every_replica(devices):  # DP-04
    x, n = rand(5, 3), torch.tensor(2.0)
    assert_close(through(lambda x, batch: x * batch["n"], x, {"n": n}), 2 * x)


def test_a_batch_of_one_and_of_none_goes_the_same_way(devices):  # DP-06, DP-07
    module = classifier().eval()
    for rows in (0, 1):
        x = rand(rows, 3, 8, 8)
        assert_close(compat.DataParallel(module)(x), module(x))


def test_packed_sequences_are_split_by_sequence(devices):  # DP-08
    module, plain = pair(lambda: nn.GRU(2, 3).double())
    packed = nn.utils.rnn.pack_sequence([rand(n, 2) for n in (2, 5, 1, 3, 3)], enforce_sorted=False)
    unpacked = nn.utils.rnn.unpack_sequence(
        compat.DataParallel(Calling(lambda layer, p: module(p)[0]))(packed)
    )
    assert_close(unpacked, nn.utils.rnn.unpack_sequence(plain(packed)[0]))


def test_lengths_in_a_list_are_whole_and_the_mistake_is_located():  # DP-09
    with pytest.raises(RuntimeError, match=r"lengths") as caught:
        through(
            lambda x, n: nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True),
            rand(4, 5, 1),
            [5, 3, 2, 1],
        )
    assert any("in shard" in note or "raised in" in note for note in caught.value.__notes__)


def test_inputs_in_any_container_by_any_name_are_split(devices):  # DP-11, DP-14
    x = rand(5, 3)
    for batch in ({"x": x}, OrderedDict(x=x), defaultdict(int, x=x), Named("n", {"x": x})):
        assert_close(through(lambda batch: batch["x"] * 2, batch), 2 * x)
        assert_close(through(lambda *, batch: batch["x"] * 2, batch=batch), 2 * x)
    assert_close(through(lambda p: p.x + p.y, Point(x, 1.0)), x + 1)
    assert_close(through(lambda r: r.logits, Result(x)), x)


def test_outputs_of_every_kind_keep_their_kind(devices):  # DP-18, DP-19, DP-20, DP-22
    x = rand(9, 3)

    def fun(x):
        rest = {"n": 4, "lr": 0.1, "flag": True, "none": None, "text": "abc", "where": (7, 7)}
        return Result(x * 2, "b", {"d": defaultdict(int, x=x), **rest}), Point(x, "p"), Named("m", {"x": x})

    result, point, named = through(fun, x)
    assert (result.name, point.y, named.name) == ("b", "p", "m")
    assert_close((result.logits, point.x, named["x"], result.extra["d"]["x"]), (2 * x, x, x, x))
    kept = {key: value for key, value in result.extra.items() if key != "d"}
    assert kept == {"n": 4, "lr": 0.1, "flag": True, "none": None, "text": "abc", "where": (7, 7)}
    assert type(result.extra["d"]) is defaultdict


def test_lists_of_strings_are_in_row_order_and_other_values_that_differ_are_listed():  # DP-20, DP-21, DP-22
    x = torch.arange(9)
    names, nested, number = through(
        lambda x: ([f"row {i}" for i in x], [["a"] * int(i) for i in x], len(x)), x
    )
    assert names == [f"row {i}" for i in range(9)]
    assert nested == [["a"] * i for i in range(9)]
    assert number == [3, 2, 2, 2]


def test_ragged_lists_of_tensors_and_other_keys_are_refused_by_place():  # DP-21, DP-23
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"disagree on output\['boxes'\]:\n  replica 0  a list of 3\n"
    ):
        through(lambda x: {"boxes": list(x)}, rand(9, 3))
    with pytest.raises(fp.ReplicaMismatchError, match=r"replica 1  a dict with the keys '1'"):
        through(lambda x: {f"{int(x[0])}": x}, torch.arange(4))


def test_an_object_that_would_lose_a_gradient_is_refused():
    module = Calling(lambda layer, x: torch.distributions.Normal(layer(x), 1.0))
    with pytest.raises(
        TypeError, match=r"returned a Normal, whose tensor \.loc would lose its gradient\.\nReturn its"
    ):
        compat.DataParallel(module)(rand(4, 3))


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
        assert "fp._" not in text, source.name


def test_import_of_compat_is_silent_and_starts_no_thread():
    code = "import compat, threading; assert threading.active_count() == 1"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100,
                          cwd=Path(compat.__file__).parent.parent, check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_scalar_loss_does_not_warn():  # DP-17
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert through(lambda x: x.sum(), rand(4, 3)).shape == (4,)
        assert ids() == [0, 1, 2, 3]
