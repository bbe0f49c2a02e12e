"""What DistributedDataParallel takes, refuses by name and says; install; one process is enough for that."""

from __future__ import annotations

import copy
import inspect
import re
import threading
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
from compat_models import assert_same_gradients, mlp, rand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import compat
import funcpar as fp

DDP = compat.DistributedDataParallel


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_signature_is_torchs():
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    mine = inspect.signature(DDP.__init__).parameters
    assert [(p.name, p.default, p.kind) for p in mine.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]
    assert issubclass(DDP, nn.parallel.DistributedDataParallel)


def test_one_process_has_the_plain_gradients():
    module = mlp()
    plain, wrapper = copy.deepcopy(module), DDP(module, find_unused_parameters=True, static_graph=True)
    x = rand(5, 3)
    for m in (wrapper, plain):
        m(x).square().mean().backward()
    assert_same_gradients(module, plain)


def test_flags_that_change_nothing_are_accepted():
    module = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper = DDP(
            module, broadcast_buffers=False, gradient_as_bucket_view=True, check_reduction=True,
            skip_all_reduce_unused_params=True, batched_grad_copy=True, bucket_cap_mb=1, device_ids=[],
            delay_all_reduce_named_params=[("0.weight", module[0].weight)],
            param_to_hook_all_reduce=module[2].weight, device_mesh=init_device_mesh("cpu", (1,)),
        )  # fmt: skip
    assert not wrapper.broadcast_buffers and not wrapper.forward_sync_buffers
    wrapper(rand(2, 3)).sum().backward()
    assert module[0].weight.grad is not None


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def torn() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))


REFUSED = [
    (lambda: abs, {}, TypeError, r"builtin_function_or_method is not an nn.Module.\nGive a module."),
    (mlp, {"mixed_precision": 1}, NotImplementedError, r"mixed_precision is not supported.*torch.autocast"),
    (mlp, {"bucket_cap_mb_list": [1]}, NotImplementedError, r"bucket_cap_mb_list is not supported"),
    (mlp, {"param_to_hook_all_reduce": 1}, ValueError, r"go together.\nGive both or neither"),
    (mlp, {"process_group": 1, "device_mesh": 1}, ValueError, r"both name the ranks.\nGive one of them"),
    (mlp, {"bucket_cap_mb": 0}, ValueError, r"bucket_cap_mb=0 holds nothing.\nGive a size in MiB"),
    (mlp, {"device_ids": [0]}, ValueError, r"device_ids=\[0\], output_device=None, and parameters on cpu"),
    (lazy, {}, RuntimeError, r"1.weight, 1.bias have no shape yet.\nCall the module once"),
    (frozen, {}, RuntimeError, r"no parameter of Sequential needs a gradient.\nCall the module without it"),
    (torn, {}, ValueError, r"parameters are on cpu, meta.\nMove the module to one device type"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "options", "kind", "message"), REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_wrapped_is_refused_by_name(build, options, kind, message):
    with pytest.raises(kind, match=f"(?s)^DistributedDataParallel: .*{message}"):
        DDP(build(), **options)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_module_is_refused():
    with pytest.raises(TypeError, match=r"a ScriptModule keeps its parameters.*\nWrap the module that was"):
        DDP(torch.jit.script(nn.Linear(3, 2)))


def test_a_mesh_of_several_dimensions_is_refused():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    for given in (mesh, mesh["data"]):
        with pytest.raises(
            NotImplementedError, match=r"is not one dimension of its own.\nGive process_group="
        ):
            DDP(mlp(), device_mesh=given)


@pytest.mark.parametrize("name", [
    "join_hook", "_register_builtin_comm_hook", "_register_fused_optim", "_register_buffer_comm_hook",
    "_update_process_group", "_set_sparse_metadata",
])  # fmt: skip
def test_what_reaches_into_torchs_reducer_is_refused(name):
    with pytest.raises(NotImplementedError, match=rf"^DistributedDataParallel.{name} is not supported.\n\w"):
        getattr(DDP(mlp()), name)()


def test_calls_from_a_shard_or_from_two_threads_are_refused():
    wrapper = DDP(mlp())
    with pytest.raises(RuntimeError, match=r"called in a shard.*\nWrap one pmap per process"):
        fp.pmap(wrapper, in_axes=0, devices=2)(rand(4, 3))
    errors = []

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=self.run, args=(x,))
            thread.start()
            thread.join(10)
            return self.layer(x)

        def run(self, x: torch.Tensor) -> None:
            try:
                calling(x)
            except RuntimeError as error:
                errors.append(str(error))

    calling = DDP(Calling())
    calling(torch.ones(1, 3))
    assert re.search(r"two threads call it at the same time.\nCall it from one thread.", errors[0])


def done(value: object) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(("hook", "message"), [
    (3, r"int is not callable.\nGive hook\(state, bucket\)"),
    (lambda bucket: None, r"the hook's signature is \(bucket\).\nGive hook"),
    (lambda state, bucket: 3, r"the communication hook returned a int.\nGive hook"),
    (lambda state, bucket: done(torch.ones(3)), r"future holds \(3,\), not a tensor of 32 numbers"),
])  # fmt: skip
def test_a_wrong_hook_is_told(hook, message):
    wrapper = DDP(mlp())
    with pytest.raises((TypeError, ValueError), match=rf"^DistributedDataParallel\(Sequential\).*{message}"):
        wrapper.register_comm_hook(None, hook)
        wrapper(rand(2, 3)).sum().backward()


def test_a_hook_is_alone_and_has_no_derivative():
    wrapper = DDP(mlp())
    wrapper.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))
    with pytest.raises(
        RuntimeError, match=r"register_comm_hook: there is a hook already.\nRegister one hook."
    ):
        wrapper.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))
    with pytest.raises(
        NotImplementedError, match=r"a communication hook has no derivative.*\nUse loss.backward"
    ):
        torch.autograd.grad(wrapper(rand(2, 3)).sum(), list(wrapper.parameters()))


def test_a_wrapper_on_another_group_does_not_pickle():
    wrapper = DDP(mlp(), process_group=dist.new_group([0]))
    with pytest.raises(RuntimeError, match=r"Pickling/Unpickling are only supported"):
        copy.deepcopy(wrapper)


def test_parameters_are_back_after_forward_and_after_an_error():
    module = mlp()
    before = {name: id(p) for name, p in module.named_parameters()}
    wrapper = DDP(module)
    seen = []
    module[0].register_forward_hook(
        lambda m, *_: seen.append((m.weight.is_leaf, isinstance(m.weight, nn.Parameter)))
    )
    wrapper(rand(2, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        wrapper(rand(2, 4))
    assert seen == [(False, True)]
    assert {name: id(p) for name, p in module.named_parameters()} == before


def test_a_weight_that_forward_ties_is_refused_by_torch_with_the_fix():
    class Tying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.weight = self.a.weight
            return self.b(self.a(x))

    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor") as caught:
        DDP(Tying())(torch.ones(1, 3))
    assert caught.value.__notes__ == [
        "In the forward of DistributedDataParallel(Tying) parameters have a graph: tie them in __init__."
    ]


def test_ignored_parameters_are_left_alone():
    module = mlp()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    wrapper = DDP(module)
    seen = []
    module[0].register_forward_hook(lambda m, *_: seen.append((m.weight.is_leaf, m.bias.is_leaf)))
    wrapper(rand(2, 3)).sum().backward()
    assert seen == [(True, False)] and module[0].weight.grad is not None


def test_install_puts_the_name_in_the_place_of_torchs():
    theirs = nn.parallel.DistributedDataParallel
    compat.install()
    try:
        assert nn.parallel.DistributedDataParallel is DDP
        assert torch.nn.parallel.distributed.DistributedDataParallel is DDP
        assert isinstance(DDP(mlp()), nn.parallel.DistributedDataParallel)
    finally:
        compat.uninstall()
    assert nn.parallel.DistributedDataParallel is theirs is not DDP


def test_classes_derived_from_torchs_derive_from_compats_while_installed():
    class Derived(nn.parallel.DistributedDataParallel):
        pass

    compat.install()
    try:
        assert issubclass(Derived, DDP)
        Derived(mlp())(rand(2, 3)).sum().backward()
    finally:
        compat.uninstall()
    assert Derived.__bases__[0] is nn.parallel.DistributedDataParallel is not DDP


def alone() -> None:
    DDP(mlp())


def test_without_a_process_group_the_error_says_how_to_make_one():
    (outcome,) = processes.run(alone, 1)
    assert outcome.error == (
        "RuntimeError: DistributedDataParallel: there is no process group.\n"
        "Call torch.distributed.init_process_group() first, under torchrun say."
    )
