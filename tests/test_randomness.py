"""What a mapped function draws repeats with the seed, differs by shard, and is seen by every derivative."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import funcpar as fp

ROWS = torch.linspace(0.5, 1.5, 8 * 6, dtype=torch.float64).reshape(8, 6)
WEIGHT = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
SEVERAL = [2, 3, 4]


def seeded(call: Callable[[], Any], seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return call()


def flat(tree: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in fp.tree.leaves(tree)]


def same_bits(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


LSTM, LSTM_PARAMS = fp.functionalize(nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True).double())


def attention(x: torch.Tensor) -> torch.Tensor:
    query = x.reshape(-1, 1, 3, 2)
    return functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


# Each takes rows and gives rows, the same for equal rows but for what it draws.
BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout1d": lambda x: functional.dropout1d(x[:, :, None], 0.5),
    "lstm dropout": lambda x: LSTM(LSTM_PARAMS, x[:, None].expand(-1, 4, -1))[0],
    "attention dropout": attention,
    "rand": lambda x: x + torch.rand(x.shape),
    "randn": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x + torch.randint(0, 1000, x.shape),
    "randperm": lambda x: x + torch.randperm(60)[: x.shape[1]],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: x + torch.multinomial(torch.ones(50), x.shape[1]),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "Generator-free distribution": lambda x: x + torch.distributions.Gamma(2.0, 1.0).sample(x.shape),
}
body = pytest.mark.parametrize("name", BODIES)


@body
def test_seed_repeats_a_call_bit_for_bit_and_shards_draw_differently(name: str, devices) -> None:
    mapped = fp.pmap(BODIES[name], in_axes=0)
    rows = torch.ones(24, 6, dtype=torch.float64)
    first, again = seeded(lambda: mapped(rows)), seeded(lambda: mapped(rows))
    assert torch.equal(first, again)
    assert not torch.equal(first, seeded(lambda: mapped(rows), 6))
    assert not torch.equal(first, mapped(rows))  # The next call goes on.
    parts = first.split(24 // len(devices))
    for k in range(len(parts)):
        assert not any(torch.equal(parts[k], other) for other in parts[k + 1 :])


@body
def test_fused_gradients_repeat_and_use_the_mask_of_the_value(name: str, devices) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return BODIES[name](x * w).square().mean()

    step, plain = fp.pmap(fp.value_and_grad(loss)), fp.pmap(loss)
    first = seeded(lambda: step(WEIGHT, ROWS))
    assert same_bits(first, seeded(lambda: step(WEIGHT, ROWS)))
    leaf = WEIGHT.clone().requires_grad_()
    value = seeded(lambda: plain(leaf, ROWS))
    (grad,) = torch.autograd.grad(value, leaf)
    torch.testing.assert_close(first, (value.detach(), grad), rtol=1e-12, atol=1e-12)
    by_func = seeded(lambda: torch.func.grad_and_value(plain)(WEIGHT, ROWS))
    torch.testing.assert_close(first, by_func[::-1], rtol=1e-12, atol=1e-12)


@body
def test_one_device_draws_the_numbers_of_the_plain_function(name: str) -> None:
    mapped = fp.pmap(BODIES[name], in_axes=0, devices=1)
    assert torch.equal(seeded(lambda: mapped(ROWS)), seeded(lambda: BODIES[name](ROWS)))
    after = [seeded(lambda: (call(ROWS), torch.get_rng_state()))[1] for call in (mapped, BODIES[name])]
    assert torch.equal(*after)


def test_generator_of_the_caller_is_left_alone_by_what_draws_nothing(devices) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    leaf = WEIGHT.clone().requires_grad_()
    fp.pmap(lambda w, x: (x @ w).sin())(leaf, ROWS).sum().backward()
    fp.pmap(fp.grad(lambda w, x: functional.dropout(x @ w, 0.5, training=False).mean()))(WEIGHT, ROWS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", SEVERAL)
@body
def test_generator_of_the_caller_gives_one_draw_to_a_call_that_draws(name: str, size: int) -> None:
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    want = torch.get_rng_state()
    torch.manual_seed(3)
    fp.pmap(BODIES[name], in_axes=0, devices=size)(ROWS)
    assert torch.equal(torch.get_rng_state(), want)


def test_draw_in_one_shard_only_is_repeatable() -> None:
    mapped = fp.pmap(lambda x: functional.dropout(x, 0.5) if float(x[0, 0]) > 1 else x, in_axes=0)
    first = seeded(lambda: mapped(ROWS))
    assert all(torch.equal(first, seeded(lambda: mapped(ROWS))) for _ in range(5))
    assert torch.equal(first[:4], ROWS[:4])


def test_gradient_is_zero_exactly_where_the_mask_is(devices) -> None:
    leaf = ROWS.clone().requires_grad_()
    out = fp.pmap(lambda x: functional.dropout(x, 0.5), in_axes=0)(leaf)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(grad, (out != 0) * 2.0)
    assert 0 < int((grad == 0).sum()) < grad.numel()


def test_second_derivative_sees_the_mask_of_the_first(devices) -> None:
    leaf = WEIGHT.clone().requires_grad_()
    out = fp.pmap(lambda w, x: functional.dropout(x * w, 0.5) ** 2)(leaf, ROWS)
    state = torch.get_rng_state()
    mask = (out != 0) * 4.0 * ROWS**2
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    torch.testing.assert_close(grad, (2 * mask * WEIGHT).sum(0))
    torch.testing.assert_close(second, (2 * mask).sum(0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # Torch's own, in forward mode.
def test_hessian_by_torch_func_sees_one_mask(devices) -> None:
    mapped = fp.pmap(lambda w, x: functional.dropout(x * w, 0.5) ** 2)
    out = seeded(lambda: mapped(WEIGHT, ROWS))
    want = torch.diag(((out != 0) * 8.0 * ROWS**2).sum(0))
    inner = torch.func.grad(lambda w: mapped(w, ROWS).sum())
    torch.testing.assert_close(seeded(lambda: torch.func.jacrev(inner)(WEIGHT)), want)


def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout((x * w).exp(), 0.5).tanh()


def test_checkpoint_in_the_body_gives_the_gradients_without_it(devices) -> None:
    def with_checkpoint(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, w, x, use_reentrant=False).mean()

    leaves = [WEIGHT.clone().requires_grad_() for _ in range(2)]
    values = []
    for fun, leaf in zip((lambda w, x: block(w, x).mean(), with_checkpoint), leaves, strict=True):
        values.append(seeded(lambda: fp.pmap(fun)(leaf, ROWS)))
        values[-1].backward()
    assert torch.equal(values[0], values[1])
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_reentrant_checkpoint_in_the_body_is_refused_as_torch_refuses_it_under_autograd_grad() -> None:
    fun = lambda w, x: checkpoint(block, w, x, use_reentrant=True).mean()
    loss = fp.pmap(fun)(WEIGHT.clone().requires_grad_(), ROWS)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()


def test_checkpoint_under_a_mapped_gradient_gives_the_gradients_without_it(devices) -> None:
    def with_checkpoint(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, w, x, use_reentrant=False).mean()

    want = seeded(lambda: fp.pmap(fp.value_and_grad(lambda w, x: block(w, x).mean()))(WEIGHT, ROWS))
    assert same_bits(want, seeded(lambda: fp.pmap(fp.value_and_grad(with_checkpoint))(WEIGHT, ROWS)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_a_mapped_function_gives_the_gradients_without_it(
    use_reentrant: bool, devices
) -> None:
    mapped = fp.pmap(block)
    around = lambda w, x: checkpoint(mapped, w, x, use_reentrant=use_reentrant)
    leaves = [WEIGHT.clone().requires_grad_() for _ in range(2)]
    for fun, leaf in zip((mapped, around), leaves, strict=True):
        seeded(lambda: fun(leaf, ROWS).mean()).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SEVERAL)
def test_manual_seed_in_the_body_seeds_the_shard_alone(size: int) -> None:
    def seeds(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return torch.rand(x.shape)

    rows = torch.ones(2 * size, 3)
    torch.manual_seed(11)
    want = torch.rand(2, 3).repeat(size, 1)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(fp.pmap(seeds, in_axes=0, devices=size)(rows), want)
    assert torch.equal(torch.get_rng_state(), state)


def test_generator_of_the_users_own_is_used_as_it_is() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(7))

    state = torch.get_rng_state()
    want = torch.rand(2, 3, generator=torch.Generator().manual_seed(7)).repeat(4, 1)
    assert torch.equal(fp.pmap(draws, in_axes=0)(torch.ones(8, 3)), want)
    assert torch.equal(torch.get_rng_state(), state)


def test_nested_pmap_draws_from_its_shards_stream() -> None:
    draw = lambda x: torch.rand(x.shape)
    nested = fp.pmap(lambda x: (fp.pmap(draw, in_axes=0)(x), draw(x)), in_axes=0)
    plain = fp.pmap(lambda x: (draw(x), draw(x)), in_axes=0)
    assert same_bits(seeded(lambda: nested(ROWS)), seeded(lambda: plain(ROWS)))


def test_nested_parallel_call_draws_repeatably_and_differently() -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(fp.parallel_call(lambda: torch.rand(3), [(), ()]))[None]

    mapped = fp.pmap(outer, in_axes=0, out_axes=0)
    first = seeded(lambda: mapped(ROWS))
    assert torch.equal(first, seeded(lambda: mapped(ROWS)))
    assert first.unique().numel() == first.numel() == 24


def test_draws_in_backward_repeat_too() -> None:
    class NoisyBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.rand(grad.shape)

    def grads() -> Any:
        leaf = WEIGHT.clone().requires_grad_()
        fp.pmap(lambda w, x: NoisyBackward.apply(x * w))(leaf, ROWS).sum().backward()
        return leaf.grad

    first = seeded(grads)
    assert all(torch.equal(first, seeded(grads)) for _ in range(5))


def test_dropout_under_a_default_device_of_another_kind_is_the_same() -> None:
    mapped = fp.pmap(lambda x: functional.dropout(x, 0.5), in_axes=0)
    want = seeded(lambda: mapped(ROWS))
    with torch.device("meta"):
        assert torch.equal(seeded(lambda: mapped(ROWS)), want)
