"""SyncBatchNorm as a module: how it is made from others, and what it refuses."""

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import funcpar as fp

IN, OUT = (None, None, 0), (0, None)
D = torch.float64
convert = fp.SyncBatchNorm.convert_sync_batchnorm


def test_conversion_keeps_parameters_buffers_mode_and_everything_else():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, eps=0.1, momentum=None, bias=False),
        nn.Sequential(nn.BatchNorm2d(4)),
    ).to(torch.bfloat16)
    model[2][0].eval()
    model[1].weight.requires_grad_(False)
    before, kept = (
        copy.deepcopy(model.state_dict()),
        dict(model.named_parameters()) | dict(model.named_buffers()),
    )
    assert convert(model, "batch") is model
    assert isinstance(model[1], fp.SyncBatchNorm) and isinstance(model[2][0], fp.SyncBatchNorm)
    assert model[1].axis_name == model[2][0].axis_name == "batch"
    assert model[1].training and not model[2][0].training
    assert (model[1].eps, model[1].momentum, model[1].bias) == (0.1, None, None)
    assert model.state_dict().keys() == before.keys()
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert now.keys() == kept.keys() and all(now[name] is kept[name] for name in kept)
    model.load_state_dict(before)


def test_a_batch_norm_alone_gives_a_new_layer_and_stays_what_it_was():
    norm = nn.BatchNorm1d(3)
    new = convert(norm)
    assert type(norm) is nn.BatchNorm1d and type(new) is fp.SyncBatchNorm
    assert new.weight is norm.weight and new.running_var is norm.running_var
    new.running_var = None
    assert norm.running_var is not None
    again = convert(new, "rows")
    assert again.axis_name == "rows" and new.axis_name is None
    assert type(convert(nn.SyncBatchNorm(3))) is fp.SyncBatchNorm
    assert not hasattr(convert(nn.SyncBatchNorm(3)), "process_group")


def test_what_is_no_batch_norm_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, affine=True), nn.LayerNorm(2))
    layers = list(model)
    assert list(convert(model)) == layers


def test_a_layer_under_two_names_stays_one_layer():
    norm = nn.BatchNorm1d(2)
    model = convert(nn.ModuleDict({"a": norm, "b": nn.Sequential(norm, norm)}))
    assert isinstance(model["a"], fp.SyncBatchNorm)
    assert model["b"][0] is model["b"][1] is model["a"]


def test_hooks_go_over_and_their_handles_still_remove_them():
    norm, calls = nn.BatchNorm1d(2), []
    handle = norm.register_forward_hook(lambda *_: calls.append(1))
    model = convert(nn.Sequential(norm))
    model(torch.randn(3, 2))
    handle.remove()
    model(torch.randn(3, 2))
    assert calls == [1]


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def test_layers_that_cannot_be_replaced_are_all_named_and_nothing_is_replaced():
    patched = nn.BatchNorm1d(2)
    patched.forward = lambda x: x
    parts = {
        "plain": nn.BatchNorm1d(2),
        "activated": Activated(2),
        "patched": patched,
        "lazy": nn.LazyBatchNorm1d(),
        "parametrized": parametrizations.weight_norm(nn.BatchNorm1d(2, affine=True), dim=None),
    }
    model = nn.ModuleDict(parts)
    message = (
        r"these layers cannot be replaced:\n"
        r"  activated  a Activated with a forward of its own\n"
        r"  patched  a BatchNorm1d with a forward of its own\n"
        r"  lazy  a LazyBatchNorm1d that has seen no input\n"
        r"  parametrized  a ParametrizedBatchNorm1d with submodules of its own\n"
        r"Call lazy layers once, and replace the others by hand"
    )
    with pytest.raises(TypeError, match=message):
        convert(model)
    assert type(model["plain"]) is nn.BatchNorm1d
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    lazy(torch.randn(4, 5))
    assert convert(lazy)[0].num_features == 5


def test_a_converted_model_trains_as_on_one_device(monkeypatch, capsys):
    file = Path(__file__).parents[1] / "examples" / "sync_batchnorm.py"
    monkeypatch.setattr(sys, "argv", [str(file), "--steps", "3"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(file), run_name="__main__")
    assert left.value.code == 0
    assert "Largest difference" in capsys.readouterr().out


def test_construction_takes_the_arguments_of_batch_norm():
    norm = fp.SyncBatchNorm(3, 0.1, None, True, False, "cpu", D, bias=False, axis_name="batch")
    plain = nn.BatchNorm1d(3, 0.1, None, True, False, "cpu", D, bias=False)
    assert repr(norm) == repr(plain).replace("BatchNorm1d", "SyncBatchNorm")[:-1] + ", axis_name='batch')"
    assert norm.weight.dtype is D and norm.state_dict().keys() == plain.state_dict().keys()
    assert copy.deepcopy(norm).axis_name == "batch"


def test_the_named_axis_is_used_and_an_unknown_one_is_refused():
    sync = fp.SyncBatchNorm(3, dtype=D)
    apply, params, buffers = fp.functionalize_with_buffers(sync)
    x = torch.randn(8, 3, dtype=D)
    sync.axis_name = "batch"
    assert fp.pmap(apply, "batch", in_axes=IN, out_axes=OUT)(params, buffers, x)[0].shape == x.shape
    with pytest.raises(fp.UnboundAxisError, match=r"SyncBatchNorm: axis 'batch' is not bound here"):
        fp.pmap(apply, "rows", in_axes=IN, out_axes=OUT)(params, buffers, x)


def test_a_module_that_shards_would_write_to_is_refused():
    sync = fp.SyncBatchNorm(3, dtype=D)
    before = copy.deepcopy(sync.state_dict())
    with pytest.raises(ValueError, match=r"would write running statistics that shards share"):
        fp.pmap(sync, in_axes=0)(torch.randn(8, 3, dtype=D))
    apply, params = fp.functionalize(sync)
    with pytest.raises(ValueError, match=r"would change the buffers running_mean, running_var"):
        fp.pmap(apply)(params, torch.randn(8, 3, dtype=D))
    assert all(torch.equal(tensor, before[name]) for name, tensor in sync.state_dict().items())


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(8), ValueError, r"the input has 1 dimensions"),
        (torch.zeros(8, 4), ValueError, r"the input has 4 channels, and num_features=3"),
        (torch.zeros(8, 3, dtype=torch.int64), TypeError, r"the input is of dtype torch.int64"),
        (torch.zeros(8, 3, dtype=torch.complex64), TypeError, r"the input is of dtype torch.complex64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, error, message):
    apply, params, buffers = fp.functionalize_with_buffers(fp.SyncBatchNorm(3))
    with pytest.raises(error, match=message):
        fp.pmap(apply, in_axes=IN, out_axes=OUT)(params, buffers, x)


def test_one_value_per_channel_is_refused_as_in_torch():
    apply, params, buffers = fp.functionalize_with_buffers(fp.SyncBatchNorm(3))
    keep = torch.arange(8) == 5
    mapped = fp.pmap(
        lambda p, b, x, keep: apply(p, b, x[keep]), in_axes=(None, None, 0, 0), out_axes=("shards", None)
    )
    with pytest.raises(ValueError, match=r"all 4 shards together have one value per channel"):
        mapped(params, buffers, torch.randn(8, 3), keep)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel"):
        fp.pmap(apply, in_axes=IN, out_axes=OUT)(params, buffers, torch.randn(1, 3))
