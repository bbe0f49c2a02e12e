"""Where tensors are, with several fake CUDA devices: forward only, no values. Mixing two raises."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import funcpar as fp
from funcpar import _streams, _workers
from funcpar._ahead import Ahead
from funcpar._allreduce import sum_over_shards
from funcpar._devices import Device
from funcpar._group import Group, Shard
from funcpar._request import Call


class OneOpAtATime(FakeTensorMode):
    """A mode that several threads may be in: torch's keeps what one kernel needs on the mode itself."""

    lock = threading.RLock()
    here = threading.local()

    @property
    def in_kernel_invocation(self):
        return getattr(self.here, "value", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value):
        self.here.value = value

    def __torch_dispatch__(self, *args, **kwargs):
        with self.lock:
            return super().__torch_dispatch__(*args, **kwargs)


class NoRuntime(_streams.Runtime):
    """Streams and events for devices that are not there: nothing is ever done on them."""

    def new_stream(self, device):
        return device

    def current_stream(self, device):
        return device

    def use(self, stream):
        pass

    def on(self, device):
        return contextlib.nullcontext()

    def record(self, stream):
        return stream

    def wait(self, stream, event):
        pass

    def keep(self, tensor, stream):
        pass

    def pinned(self, tensor):
        return tensor.clone()

    def pinned_room(self, numel, dtype):
        return torch.empty(numel, dtype=dtype)

    def fill(self, room, part):
        assert room.shape == part.shape  # Copying between devices asks the one that is not there.

    def can_sum(self, tensors):
        return False


@pytest.fixture(autouse=True)
def _fake_devices(monkeypatch):
    devices = tuple(Device(k, torch.device("cuda", k)) for k in range(3))
    monkeypatch.setattr("funcpar._devices._devices", devices)
    monkeypatch.setattr("funcpar._streams.runtime", NoRuntime())
    pool = _workers.Pool()
    monkeypatch.setattr("funcpar._workers._pool", pool)
    with OneOpAtATime(allow_non_fake_inputs=True), torch.no_grad():
        yield
    pool.close(timeout=10)


def places(tree) -> list[str]:
    return [str(leaf.device) for leaf in fp.tree.leaves(tree)]


def params(device="cpu"):
    return {"w": torch.randn(3, 2, device=device), "b": torch.randn(2, device=device)}


@pytest.mark.parametrize("home", ["cpu", "cuda:0", "cuda:2"])
@pytest.mark.parametrize("rows_at", ["cpu", "cuda:1"])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_arguments_come_to_each_shard_and_results_to_the_first(home, rows_at, rows):
    seen = []

    def fun(p, x):
        seen.append(places([p, x]))
        return x @ p["w"] + p["b"], x.mean()

    out = fp.pmap(fun)(params(home), torch.randn(rows, 3, device=rows_at))
    assert places(out) == ["cuda:0"] * 2
    assert [leaf.shape for leaf in out] == [(rows, 2), ()]
    assert sorted(seen) == [[f"cuda:{k}"] * 3 for k in range(min(rows, 3))]


@pytest.mark.parametrize("devices", [[2, 1], [1], [0, 0], [1, 0, 1]])
def test_the_devices_that_are_named_are_used_in_their_order(devices):
    kept = fp.pmap(lambda p, x: x @ p["w"], devices=devices, out_axes="shards")(params(), torch.randn(6, 3))
    assert places(list(kept.parts)) == [f"cuda:{k}" for k in devices]
    again = fp.pmap(lambda x: x * 2, in_axes=0, devices=devices, out_axes="shards")(kept)
    assert places(list(again.parts)) == [f"cuda:{k}" for k in devices]
    assert places(kept.gather()) == [f"cuda:{devices[0]}"]


@pytest.mark.parametrize("spec", [0, "sum", "mean", "stack"])
def test_every_way_to_merge_ends_on_the_first_device(spec):
    assert places(fp.pmap(lambda x: x.sum(0, keepdim=True), in_axes=0, out_axes=spec)(torch.randn(7, 3))) == [
        "cuda:0"
    ]


COLLECTIVES = {
    "psum": fp.psum,
    "pmean": fp.pmean,
    "pmax": fp.pmax,
    "pmin": fp.pmin,
    "all_gather": fp.all_gather,
    "psum_scatter": fp.psum_scatter,
    "all_to_all": lambda x: fp.all_to_all(x, None, 0, 0),
    "ppermute": lambda x: fp.ppermute(x, perm=[(0, 1), (1, 2), (2, 0)]),
    "pbroadcast": lambda x: fp.pbroadcast(x, source=1),
}


@pytest.mark.parametrize("size", [4, 40_000])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_shards_exchange_comes_to_their_own_devices(name, size):
    shape = (3, size) if name != "pbroadcast" else (1, size)
    kept = fp.pmap(
        lambda x: COLLECTIVES[name](x + torch.zeros((), device=x.device)), in_axes=0, out_axes="shards"
    )(torch.randn(3 * shape[0], shape[1]))
    assert places(list(kept.parts)) == ["cuda:0", "cuda:1", "cuda:2"]


def test_parallel_call_brings_arguments_and_leaves_results_where_they_are():
    shared = torch.randn(3, 2)
    outs = fp.parallel_call(torch.matmul, [(torch.randn(4, 3, device="cuda:1"), shared) for _ in range(3)])
    assert places(outs) == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_nested_call_stays_on_its_shards_device():
    inner = fp.pmap(lambda p, x: x @ p["w"])
    kept = fp.pmap(inner, in_axes=(None, 0), out_axes="shards")(params(), torch.randn(6, 3))
    assert places(list(kept.parts)) == ["cuda:0", "cuda:1", "cuda:2"]


def test_buffers_of_a_functionalized_module_come_to_each_shard():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
    apply, given, buffers = fp.functionalize_with_buffers(model)
    kept = fp.pmap(lambda p, x: apply(p, buffers, x)[0], out_axes="shards")(given, torch.randn(6, 3))
    assert places(list(kept.parts)) == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("early", ["all", "some", "none"])
@pytest.mark.parametrize("devices", [[0, 1, 2], [2, 1], [1, 0, 1]])
def test_sums_of_gradients_end_on_the_first_device_whenever_they_are_made(devices, early):
    ahead, totals, asked = Ahead([fp.devices()[k] for k in devices]), {}, []

    def body(p, x):
        place = fp.axis_index()
        grads = [leaf * 2 for leaf in p.values()]
        hook = ahead.hook(place, grads, [None] * len(grads))
        asked.append(hook(0) is not None)
        if early == "all" or (early == "some" and place):
            for position, grad in enumerate(reversed(grads)):
                ahead._mine[place]._bring(place, position, grad, True)
        assert sum_over_shards(grads, totals, True, ahead)
        return x.sum()

    p = {"large": torch.randn(1 << 19), "half": torch.ones(3, dtype=torch.bfloat16)} | params()
    fp.pmap(body, devices=devices, out_axes="sum")(p, torch.randn(6, 3))
    assert all(asked) and [totals[k].shape for k in range(4)] == [leaf.shape for leaf in p.values()]
    assert places(totals) == [f"cuda:{devices[0]}"] * 4


def test_staged_trees_and_prefetched_batches_come_to_each_shard():
    staged = fp.stage(params())
    fun = fp.pmap(lambda p, x: x @ p["w"] + p["b"], out_axes="shards")
    for x in fp.prefetch([torch.randn(6, 3) for _ in range(3)]):
        assert places(list(fun(staged, x).parts)) == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_function_that_mixes_devices_fails_so_the_tests_above_can():
    with pytest.raises(RuntimeError, match="same device"):
        fp.pmap(lambda x: x + torch.zeros(3, device="cuda:0"), in_axes=0)(torch.randn(6, 3))


def test_an_exchange_over_processes_with_several_accelerators_each_is_refused():
    # Streams of what one shard brings would not be ordered with those of the shard that talks to the others.
    group = Group("rows", 2, span=object(), ordered=True)
    shard = Shard(group, 0, Device(0, torch.device("cuda", 0)))
    with pytest.raises(
        NotImplementedError, match=r"psum at here: over processes .*\nStart one process per accelerator"
    ):
        group.exchange(shard, Call("psum", None, "here"), torch.ones(()), across=lambda *_: [])
