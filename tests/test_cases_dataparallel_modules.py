"""What went wrong with DataParallel inside the model: parameters, buffers, state, hooks and gradients."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def assert_same_value_and_grad(loss: Any, params: Any, *batch: Any, **options: Any) -> None:
    assert_close(
        fp.pmap(fp.value_and_grad(loss), **options)(params, *batch), fp.value_and_grad(loss)(params, *batch)
    )


# Means and sums.


@pytest.mark.parametrize("rows", range(1, 15))
def test_loss_and_gradients_of_a_mean_equal_the_whole_batch_for_any_rows(
    devices, rows
):  # DP-26, DP-27, JX-04
    apply, params = fp.functionalize(mlp())
    loss = lambda params, x, y: (apply(params, x) - y).square().mean()
    assert_same_value_and_grad(loss, params, rand(rows, 3), rand(rows, 2))


def test_loss_and_gradients_of_a_sum_do_not_depend_on_the_devices(devices):  # DP-27
    apply, params = fp.functionalize(mlp())
    loss = lambda params, x: apply(params, x).square().sum()
    assert_same_value_and_grad(loss, params, rand(13, 3), out_axes="sum")


@pytest.mark.parametrize("ignored", [range(0), range(5), range(2, 13), range(13)])
def test_a_mean_over_valid_tokens_is_weighted_by_them(devices, ignored):  # DP-26
    apply, params = fp.functionalize(mlp())
    x, y = rand(13, 3), torch.arange(13) % 2
    y[list(ignored)] = -100
    loss = lambda params, x, y: nn.functional.cross_entropy(apply(params, x), y)
    mapped = fp.pmap(fp.value_and_grad(loss), weight=lambda params, x, y: (y >= 0).sum())
    expected = fp.value_and_grad(loss)(params, x, y)
    torch.testing.assert_close(mapped(params, x, y), expected, rtol=1e-12, atol=1e-13, equal_nan=True)


# What a forward sees of its module.


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        assert next(name for name, _ in self.named_parameters()) == "inner.0.weight"
        dtype = next(self.parameters()).dtype
        return self.inner(x.to(dtype)).square().mean() + sum(p.square().sum() for p in self.parameters())


def test_parameters_are_complete_inside_forward_and_carry_gradients(devices):  # DP-28
    apply, params = fp.functionalize(Penalised())
    assert_same_value_and_grad(apply, params, rand(7, 3))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls, self.seen = 0, []
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.steps += 1
        assert self.calls == len(self.seen) == 1
        return self.layer(x)


def test_state_goes_in_and_out_by_buffers_and_never_between_shards(devices):  # DP-30
    model = Counting()
    apply, params, buffers = fp.functionalize_with_buffers(model)
    mapped = fp.pmap(apply, in_axes=(None, None, 0), out_axes=(0, None))
    for step in range(1, 4):
        _, buffers = mapped(params, buffers, torch.randn(7, 3))
        assert buffers["steps"] == step
    assert model.calls == 0 and model.seen == [] and model.steps == 0


@pytest.mark.parametrize("rows", [4, 7, 13])
def test_running_means_of_all_shards_are_merged_by_their_rows(devices, rows):  # DP-31, FN-09
    norm = nn.BatchNorm1d(3).double()
    apply, params, buffers = fp.functionalize_with_buffers(norm)
    x = rand(rows, 3)
    # A batch norm needs two rows or more.
    mapped = fp.pmap(apply, in_axes=(None, None, 0), out_axes=(0, "mean"), min_rows=2)
    _, new = mapped(params, buffers, x)
    norm(x)
    assert_close(new["running_mean"], norm.running_mean)
    assert new["num_batches_tracked"] == 1
    # Of the variance, the mean of what the shards saw: the spread between shards is not in it.
    parts = x.tensor_split(min(len(devices), rows // 2))
    variance = sum(len(part) * part.var(0) for part in parts) / rows
    assert_close(new["running_var"], 0.9 + 0.1 * variance)


def test_a_batch_norm_shared_by_shards_is_refused_and_untouched():  # DP-31, DP-38
    norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="running statistics that shards share"):
        fp.pmap(norm, in_axes=0)(torch.randn(8, 3))
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(3))


class PlainAttribute(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.scale = rand(3, 3).to_sparse() if sparse else rand(3, 3)
        self.bias = rand(3).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.scale, self.layer(x).T).T + self.bias


@pytest.mark.parametrize("sparse", [False, True])
def test_tensors_in_plain_attributes_are_seen_and_keep_their_gradients(devices, sparse):  # DP-32
    model = PlainAttribute(sparse)
    apply, params = fp.functionalize(model)
    x = rand(7, 3)
    out, expected = fp.pmap(apply)(params, x), model(x)
    assert_close(out.detach(), expected.detach())
    grads = [torch.autograd.grad(each.square().sum(), model.bias) for each in (out, expected)]
    assert_close(*grads)


@pytest.mark.parametrize("make", [spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_is_updated_once_and_is_the_same_in_train_and_eval(devices, make):  # DP-33
    torch.manual_seed(1)
    mine = make(nn.Linear(3, 2)).double()
    apply, params, buffers = fp.functionalize_with_buffers(mine)

    def loss(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Any]:
        out, new = apply(params, buffers, x)
        return out.square().mean(), new

    step = fp.pmap(fp.value_and_grad(loss, has_aux=True), in_axes=(None, None, 0), out_axes=("mean", None))
    expected_buffers = buffers
    for _ in range(3):
        x = rand(7, 3)
        (value, buffers), grads = step(params, buffers, x)
        (wanted, expected_buffers), expected = fp.value_and_grad(loss, has_aux=True)(
            params, expected_buffers, x
        )
        assert_close((value, grads, buffers), (wanted, expected, expected_buffers))
    mine.eval()
    assert_close(
        fp.pmap(apply, in_axes=(None, None, 0), out_axes=(0, None))(params, buffers, x)[0],
        apply(params, buffers, x)[0],
    )


class Scratch:
    kept: Any = None


class WithScratch(nn.Module):
    """Writes to an object that it holds, and reads it when every shard has written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.scratch = Scratch()
        self.notes: dict[str, Any] = {}

    def forward(self, x: Tensor, kind: str, barrier: list[threading.Barrier]) -> Tensor:
        out = self.layer(x)
        self.scratch.kept = out if kind == "object" else None
        self.notes["kept"] = out
        barrier[0].wait(20)
        return self.notes["kept"] if kind == "dict" else self.scratch.kept


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_what_a_module_holds_and_writes_to_is_not_shared_by_shards(kind):  # DP-38
    model = WithScratch()
    apply, params = fp.functionalize(model)
    x, barrier = rand(8, 3), [threading.Barrier(4)]
    try:
        out = fp.pmap(lambda params, x: apply(params, x, kind, barrier))(params, x)
    except (TypeError, ValueError) as error:
        assert "scratch" in str(error)  # Refused by name.
    else:
        assert_close(out, model.layer(x).detach())
        assert model.notes == {} and model.scratch.kept is None


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.net[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.feature = (out.mean(0) - 1).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean() + self.feature


def test_a_feature_that_a_hook_keeps_is_of_its_own_shard():  # DP-42
    model = Hooked()
    apply, params = fp.functionalize(model)
    x = rand(3, 3)
    for _ in range(20):
        value, grads = fp.pmap(fp.value_and_grad(apply))(
            params, x.repeat(4, 1)
        )  # Every shard has the rows x.
        assert_close((value, grads), fp.value_and_grad(apply)(params, x))
    assert not hasattr(model, "feature")


def test_sparse_tensors_are_replicated_and_sparse_gradients_stay_sparse(devices):  # DP-44
    adjacency = (rand(4, 4) * (rand(4, 4) > 0)).to_sparse()
    fun = lambda graph, x: torch.mm(graph, x.T).T
    x, w, ids = rand(7, 4), rand(5, 2), torch.arange(7) % 3
    assert_close(fp.pmap(fun)(adjacency, x), fun(adjacency, x))
    loss = lambda w, ids: nn.functional.embedding(ids, w, sparse=True).square().mean()
    got, expected = fp.pmap(fp.grad(loss))(w, ids), fp.grad(loss)(w, ids)
    assert got.is_sparse and expected.is_sparse
    assert_close(got.to_dense(), expected.to_dense())


def test_sparse_rows_are_split(devices):  # DP-44
    x, w = rand(7, 4), rand(4, 1)
    out = fp.pmap(lambda w, x: torch.mm(x, w))(w, x.to_sparse())
    assert_close(out, x @ w)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_compressed_rows_are_refused():  # DP-44
    with pytest.raises(TypeError, match=r"x  a tensor of layout torch\.sparse_csr"):
        fp.pmap(lambda x: x, in_axes=0)(torch.eye(3).to_sparse_csr())


def test_other_params_in_every_call_are_the_normal_case(devices):  # DP-47, FN-01
    model = mlp()
    apply, params = fp.functionalize(model)
    by_hand = lambda params, x: torch.func.functional_call(model, params, (x,))
    mapped = [fp.pmap(apply), fp.pmap(by_hand)]
    for _ in range(5):
        new, x = {name: p + 0.1 * torch.randn_like(p) for name, p in params.items()}, rand(7, 3)
        expected = torch.func.functional_call(model, new, (x,))
        for each in mapped:
            assert_close(each(new, x), expected)
    assert all(p.data_ptr() == params[name].data_ptr() for name, p in model.named_parameters())


def test_shards_see_the_memory_of_the_callers_params():  # DP-50
    seen = []
    w, x = rand(3), rand(8, 3)
    fp.pmap(lambda w, x: (seen.append((w.data_ptr(), x.untyped_storage().data_ptr())), x @ w)[1])(w, x)
    assert set(seen) == {(w.data_ptr(), x.untyped_storage().data_ptr())} and len(seen) == 4


def test_names_are_the_modules_own_and_its_methods_can_be_mapped(devices):  # DP-65, DP-66
    model = mlp()
    _, params = fp.functionalize(model)
    assert params.keys() == model.state_dict().keys()
    other = mlp()
    other.load_state_dict(params)
    x = rand(7, 3)
    assert_close(fp.pmap(other.forward, in_axes=0)(x), model(x))
    out = fp.pmap(model.forward, in_axes=0)(x)
    for got, expected in zip(
        torch.autograd.grad(out.sum(), list(model.parameters())),
        torch.autograd.grad(model(x).sum(), list(model.parameters())),
        strict=True,
    ):
        assert_close(got, expected)
