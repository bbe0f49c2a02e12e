"""Functions of modules under transforms, modes and the compiler."""

import pytest
import torch
from module_zoo import cnn, mlp, snapshot
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from funcpar._functional import functionalize, functionalize_with_buffers


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_apply_works_under_grad_hessian_and_jvp() -> None:
    module = mlp().double()
    apply, params = functionalize(module)
    x = torch.randn(4, 3, dtype=torch.float64)
    loss = lambda p: (apply(p, x) ** 2).sum()
    grads = torch.func.grad(loss)(params)
    loss(dict(module.named_parameters())).backward()
    assert all(torch.allclose(grads[name], p.grad) for name, p in module.named_parameters())
    _, slope = torch.func.jvp(loss, (params,), (grads,))
    assert torch.allclose(slope, sum((g * g).sum() for g in grads.values()))
    hessian = torch.func.hessian(loss)(params)["0.bias"]["0.bias"]
    assert torch.allclose(hessian, hessian.T) and hessian.abs().sum() > 0
    given = tuple(p.clone().requires_grad_() for p in params.values())
    names = list(params)
    assert torch.autograd.gradgradcheck(lambda *ps: apply(dict(zip(names, ps, strict=True)), x), given)


def test_apply_works_under_vmap_over_stacked_models() -> None:
    models = [cnn().eval() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    apply, _, _ = functionalize_with_buffers(models[0])
    x = torch.randn(6, 2, 4, 4)
    out, _ = torch.func.vmap(apply, in_dims=(0, 0, None))(params, buffers, x)
    assert torch.allclose(out, torch.stack([m(x) for m in models]), atol=1e-5)


def test_new_buffers_come_plain_out_of_grad() -> None:
    apply, params, buffers = functionalize_with_buffers(cnn())
    x = torch.randn(6, 2, 4, 4)

    def loss(p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out, new = apply(p, buffers, x)
        return (out**2).sum(), new

    _, new = torch.func.grad(loss, has_aux=True)(params)
    expected = apply(params, buffers, x)[1]
    assert all(type(b) is Tensor and torch.equal(b, expected[name]) for name, b in new.items())
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(b) for b in new.values())


def test_apply_sees_autocast_and_inference_mode() -> None:
    apply, params = functionalize(nn.Linear(3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert apply(params, torch.ones(1, 3)).dtype == torch.bfloat16
    with torch.inference_mode():
        assert apply(params, torch.ones(1, 3)).is_inference()


def test_apply_compiles_without_a_break() -> None:
    module = cnn()
    apply, params, buffers = functionalize_with_buffers(module)
    x = torch.randn(6, 2, 4, 4)
    before = snapshot(module)
    out, new = torch.compile(apply, backend="eager", fullgraph=True)(params, buffers, x)
    expected, wanted = apply(params, buffers, x)
    assert torch.allclose(out, expected)
    assert all(torch.equal(new[name], wanted[name]) for name in wanted)
    assert snapshot(module) == before
    constant, _ = functionalize(module)
    compiled = torch.compile(constant, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"forward changed the buffer 1\.running_mean"):
        compiled(params, x)
    module.eval()
    assert torch.allclose(compiled(params, x), module(x))
    with pytest.raises(Exception, match="Observed exception"):
        compiled({**params, "0.wieght": x}, x)


def test_a_parametrized_module_inside_cached_is_refused() -> None:
    apply, params = functionalize(parametrizations.weight_norm(nn.Linear(3, 2)))
    with parametrize.cached(), pytest.raises(ValueError, match=r"would give every call.*\nCall it outside"):
        apply(params, torch.ones(3))
