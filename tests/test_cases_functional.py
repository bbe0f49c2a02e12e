"""What went wrong with functional_call and torch.func: no such fault when modules meet pmap."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import funcpar as fp

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_a_loss_that_closes_over_its_model_never_sees_other_params(devices):  # FN-01
    model = mlp()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    loss = lambda params, x: torch.func.functional_call(model, params, (x,)).square().mean()
    mapped, x = fp.pmap(fp.value_and_grad(loss)), rand(9, 3)
    for _ in range(50):
        params = {name: torch.randn_like(p) for name, p in before.items()}
        assert_close(mapped(params, x), fp.value_and_grad(loss)(params, x))
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def test_tied_weights_are_one_leaf_with_one_summed_gradient(devices):  # FN-04
    model = Tied().double()
    apply, params = fp.functionalize(model)
    assert list(params) == ["embed.weight"]
    x = torch.arange(9) % 7
    loss = lambda params, x: nn.functional.cross_entropy(apply(params, x), x)
    grads = fp.pmap(fp.grad(loss))(params, x)
    nn.functional.cross_entropy(model(x), x).backward()
    assert_close(grads["embed.weight"], model.embed.weight.grad)


def test_buffers_are_returned_by_a_gradient_and_never_written(devices):  # FN-08, FN-09
    norm = nn.BatchNorm1d(3).double()
    apply, params, buffers = fp.functionalize_with_buffers(norm)

    def loss(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Any]:
        out, new = apply(params, buffers, x)
        return out.square().mean(), new

    before = {name: b.clone() for name, b in buffers.items()}
    in_axes, x = (None, None, 0), rand(4, 3).repeat(len(devices), 1)  # Every shard has the same rows.
    step = fp.pmap(fp.value_and_grad(loss, has_aux=True), in_axes=in_axes, out_axes=("mean", None))
    (value, new), grads = step(params, buffers, x)
    (expected, wanted), expected_grads = fp.value_and_grad(loss, has_aux=True)(params, buffers, x[:4])
    assert_close((value, new, grads), (expected, wanted, expected_grads))
    assert all(torch.equal(b, before[name]) for name, b in buffers.items())
    assert norm.num_batches_tracked == 0


def test_batch_norm_in_train_mode_under_vmap_is_refused_by_torch():  # FN-09
    apply, params, buffers = fp.functionalize_with_buffers(nn.BatchNorm1d(3).double())
    fun = torch.vmap(lambda x, params, buffers: apply(params, buffers, x)[0], (0, None, None))
    mapped = fp.pmap(fun, in_axes=(0, None, None))
    with pytest.raises(RuntimeError, match=r"running_mean|in-place|inplace"):
        mapped(rand(8, 4, 3), params, buffers)


def test_arguments_are_passed_as_to_the_module():  # FN-11
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    model = Scaled(3, 2)
    apply, params = fp.functionalize(model)
    batch = {"x": torch.randn(5, 3), "scale": 2.0}
    assert torch.allclose(apply(params, **batch), model(**batch))
    assert torch.allclose(fp.pmap(apply)(params, **batch), model(**batch))
    assert torch.allclose(apply(dict(model.named_parameters()), **batch), model(**batch))
    with pytest.raises(TypeError, match="params is a generator, not a mapping"):
        apply(model.named_parameters(), **batch)


def test_params_that_are_not_used_get_zeros_also_where_only_one_shard_skips_them(devices):  # FN-14, DD-01
    def loss(params: Any, x: Tensor) -> Tensor:
        out = x * params["used"]
        if x[0, 0] > 0:  # The first shard alone.
            out = out + params["sometimes"]
        return out.square().mean()

    params = {name: rand(2) for name in ("used", "sometimes", "never")}
    x = -rand(8, 2).abs()
    x[0, 0] = 1.0
    grads = fp.pmap(fp.grad(loss))(params, x)
    zeros = torch.zeros(2, dtype=torch.float64)
    parts = x.tensor_split(len(devices))
    each = [fp.grad(loss)(params, part) for part in parts]
    expected = {
        name: sum(g[name] * len(part) for g, part in zip(each, parts, strict=True)) / 8 for name in params
    }
    assert_close(grads, expected)
    assert torch.equal(grads["never"], zeros) and not torch.equal(grads["sometimes"], zeros)
    never = fp.pmap(fp.grad(lambda params, x: params["used"].sum() * x.mean()))(params, x)
    assert torch.equal(never["sometimes"], zeros)


def test_the_same_seed_gives_the_same_masks_to_a_line_search(devices):  # FN-15
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ w, 0.5).square().mean()

    w, x = rand(3, 8), rand(9, 3)

    def at(step: float) -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        value, grad = fp.pmap(fp.value_and_grad(loss))(w * step, x)
        return value, grad

    (value, grad), (again, _), (scaled, _) = at(1.0), at(1.0), at(2.0)
    assert torch.equal(value, again)
    assert_close(scaled, 4 * value)  # Other masks would give another number.
    assert_close((grad * w).sum(), 2 * value)
    noisy = torch.vmap(lambda w, x: nn.functional.dropout(x * w, 0.5), (None, 0), randomness="different")
    out = fp.pmap(noisy)(torch.ones(()), torch.ones(8, 64))
    assert len({tuple(row.tolist()) for row in out}) == 8


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 2 * cotangent * ctx.saved_tensors[0]


def test_custom_functions_work_under_transforms_in_shards(devices):  # FN-17
    one = lambda w, x: Square.apply(x @ w).sum()
    per_sample = torch.vmap(torch.func.grad(one), (None, 0))
    w, x = rand(3), rand(7, 3)
    assert_close(fp.pmap(per_sample)(w, x), 2 * (x @ w)[:, None] * x)
    whole = lambda w, x: Square.apply(x @ w).mean()
    assert_close(torch.func.grad(fp.pmap(whole))(w, x), fp.grad(whole)(w, x))
    assert_close(fp.pmap(fp.grad(whole))(w, x), fp.grad(whole)(w, x))


def test_a_compiled_function_is_compiled_in_the_first_call_alone(devices):  # DP-54, FN-17
    traces: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        traces.append(1)
        return graph.forward

    torch.compiler.reset()
    fun = lambda w, x: torch.tanh(x @ w)
    w, x = rand(3), rand(12, 3)  # Every shard has as many rows, on 1, 2, 3 and 4 devices.
    mapped = fp.pmap(torch.compile(fun, backend=backend))
    assert_close(mapped(w, x), fun(w, x))
    assert len(traces) == 1
    traces.clear()
    for _ in range(3):
        assert_close(mapped(w, x), fun(w, x))
    assert not traces


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_compiled_functions_and_models_have_right_gradients_in_shards(devices):  # DP-54, FN-17
    torch.compiler.reset()
    apply, params = fp.functionalize(mlp())
    x = rand(9, 3)
    loss = lambda params, x: apply(params, x).square().mean()
    compiled = torch.compile(loss, backend="eager")
    assert_close(fp.pmap(fp.value_and_grad(compiled))(params, x), fp.value_and_grad(loss)(params, x))
    one = lambda w, x: torch.tanh(x @ w).sum()
    per_sample = lambda one: torch.vmap(torch.func.grad(one), (None, 0))
    w = rand(3)
    got = fp.pmap(per_sample(torch.compile(one, backend="eager")))(w, x)
    assert_close(got, per_sample(one)(w, x))


class Params(dict):
    """A mapping that no pytree library knows."""


def test_an_opaque_container_is_refused_where_it_would_be_split():  # FN-20
    with pytest.raises(TypeError, match=r"batch\['inner'\]  a .*\.Params\n"):
        fp.pmap(lambda w, batch: w)(rand(3), {"inner": Params(w=rand(3))})


@pytest.mark.parametrize("wrap", [lambda f: f, fp.pmap], ids=["plain", "pmap"])
def test_tensors_in_an_opaque_container_never_lose_their_gradient_in_silence(wrap):  # FN-20
    loss = lambda params, x: (x @ params["w"]).square().mean()
    w, x = rand(3), rand(7, 3)
    try:
        grads = wrap(fp.grad(loss))(Params(w=w), x)
    except TypeError as error:
        assert "Params" in str(error)
    else:
        assert_close(grads["w"], fp.grad(loss)({"w": w}, x)["w"])
