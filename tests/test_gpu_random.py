"""What shards draw on accelerators repeats with the seed and differs. None of this has run on one.

``test_streams.py`` runs it on the simulated one, by way of ``simulated_gpu.py``.
"""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import funcpar as fp
from funcpar._generators import new_generator

COUNT = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
KIND = torch.accelerator.current_accelerator().type if COUNT else "none"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COUNT, reason="torch.accelerator reports no device"),
    pytest.mark.skipif(
        bool(COUNT) and not hasattr(torch.get_device_module(KIND), "default_generators"),
        reason="torch does not list the default generators of this kind of device",
    ),
]

ROWS = torch.linspace(0.5, 1.5, 96, dtype=torch.float64).reshape(16, 6)


@pytest.fixture(params=["one twice", "two"])
def places(request, monkeypatch):
    """Take one accelerator twice, and two of them, in the place of virtual CPU devices."""
    if request.param == "two" and COUNT < 2:
        pytest.skip("there is one accelerator only")
    monkeypatch.setattr("funcpar._devices._devices", None)
    return {"one twice": [0, 0], "two": [0, 1]}[request.param]


def attention(dtype):
    def attend(x):
        query = x[:, :1, None, None].to(dtype).repeat(1, 2, 16, 16)
        return functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)

    return attend


# Each takes rows, and gives rows that are the same for equal rows but for what it draws.
FAMILIES = {
    "dropout": functional.dropout,
    "dropout2d": lambda x: functional.dropout2d(x[:, :, None, None]),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, training=True),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(0, 1 << 20, x.shape, device=x.device),
    "randperm": lambda x: x + torch.randperm(600, device=x.device)[:6],
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "multinomial": lambda x: torch.multinomial(torch.ones(x.shape[0], 500, device=x.device), 6),
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "half attention": attention(torch.float16),
    "float attention": attention(torch.float32),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def seeded(call, *args):
    torch.manual_seed(5)
    return fp.tree.map(lambda leaf: leaf.cpu(), call(*args))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def states():
    """Return the states of the accelerators' default generators."""
    module = torch.get_device_module(KIND)
    return [module.get_rng_state(index) for index in range(COUNT)]


def mapped(fun, places):
    return fp.pmap(fun, in_axes=0, out_axes=0, devices=places)


@each_family
def test_a_seed_repeats_what_shards_draw_and_they_draw_differently(places, name):
    fun, rows = mapped(FAMILIES[name], places), torch.ones(16, 6, dtype=torch.float64)
    first = seeded(fun, rows)
    for _ in range(10):
        assert torch.equal(first, seeded(fun, rows))
    assert not torch.equal(first, fun(rows).cpu())  # The next call goes on.
    assert not torch.equal(first[:8], first[8:])


@each_family
def test_the_default_generators_are_left_alone_by_shards_that_draw(places, name):
    fun = mapped(FAMILIES[name], places)
    fun(ROWS)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    wanted = torch.get_rng_state()
    torch.manual_seed(5)
    before = states()
    fun(ROWS)
    assert same(states(), before)
    assert torch.equal(torch.get_rng_state(), wanted)


def test_what_draws_nothing_leaves_all_generators_alone(places):
    def fun(x):
        query = x[:, None, None].float()
        return functional.dropout(x, training=False) + functional.scaled_dot_product_attention(
            query, query, query
        ).flatten(1)

    leaf = ROWS.clone().requires_grad_()
    before = [torch.get_rng_state(), *states()]
    mapped(fun, places)(leaf).sum().backward()
    assert same([torch.get_rng_state(), *states()], before)


# The weights that a functionalized module is given are not one piece of memory.
@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("layer", ["RNN", "GRU", "LSTM"])
def test_a_seed_repeats_the_dropout_of_recurrent_layers(places, layer):
    apply, params = fp.functionalize(getattr(nn, layer)(6, 5, num_layers=2, dropout=0.5, batch_first=True))
    fun = fp.pmap(lambda p, x: apply(p, x)[0], out_axes=0, devices=places)
    rows = torch.ones(16, 4, 6)
    first = seeded(fun, params, rows)
    for _ in range(5):
        torch.testing.assert_close(seeded(fun, params, rows), first, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(fun(params, rows).cpu(), first, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(first[:8], first[8:], rtol=1e-3, atol=1e-3)


def test_the_gradient_is_zero_exactly_where_the_mask_is(places):
    leaf = ROWS.clone().requires_grad_()
    out = mapped(functional.dropout, places)(leaf)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(grad, (out.cpu() != 0) * 2.0)
    assert 0 < int((grad == 0).sum()) < grad.numel()


def test_second_derivative_sees_the_mask_of_the_first(places):
    leaf = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).requires_grad_()
    out = fp.pmap(lambda w, x: functional.dropout(x * w) ** 2, devices=places)(leaf, ROWS)
    mask = (out.cpu() != 0) * 4.0 * ROWS**2
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    torch.testing.assert_close(second, (2 * mask).sum(0))


def test_checkpoint_recomputes_with_the_same_mask(places):
    def block(w, x):
        return functional.dropout((x * w).sin()) * torch.rand(x.shape[1], device=x.device)

    def within(w, x):
        found = checkpoint(block, w, x, use_reentrant=False).mean()
        return found + (torch.rand(x.shape, device=x.device) * x).mean()

    def without(w, x):
        return block(w, x).mean() + (torch.rand(x.shape, device=x.device) * x).mean()

    w = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    steps = [fp.pmap(fp.value_and_grad(fun), devices=places) for fun in (within, without)]
    torch.testing.assert_close(*(seeded(step, w, ROWS) for step in steps))
    grads = []
    for fun in (within, without):
        leaf = w.clone().requires_grad_()
        out = seeded(fp.pmap(fun, devices=places), leaf, ROWS)
        mapped(torch.rand_like, places)(ROWS)
        grads += torch.autograd.grad(out, leaf)
    torch.testing.assert_close(*grads)


def test_functions_of_torch_act_on_the_stream_of_the_shard(places):
    module = torch.get_device_module(KIND)

    def body(x):
        saved = module.get_rng_state(x.device)
        first = torch.rand(6, device=x.device)
        module.set_rng_state(saved, x.device)
        assert torch.equal(torch.rand(6, device=x.device), first)
        with torch.random.fork_rng(devices=range(COUNT), device_type=KIND):
            torch.rand(7, device=x.device)
        following = torch.rand(6, device=x.device)
        module.set_rng_state(saved, x.device)
        torch.rand(6, device=x.device)
        by_name = torch.rand(6, device=x.device, generator=module.default_generators[x.device.index])
        assert torch.equal(by_name, following)
        torch.manual_seed(11)
        return torch.stack([first, torch.rand(6, device=x.device)])[None]

    torch.manual_seed(5)
    before = states()
    found = mapped(body, places)(ROWS[:2]).cpu()
    assert same(states(), before)
    assert not torch.equal(found[0, 0], found[1, 0])
    wanted = torch.rand(
        6, device=f"{KIND}:0", generator=new_generator(torch.device(KIND, 0)).manual_seed(11)
    ).cpu()
    assert torch.equal(found[0, 1], wanted) and torch.equal(found[1, 1], wanted)


def test_outside_of_shards_numbers_are_torchs_own(places):
    mapped(functional.dropout, places)(ROWS)
    device = torch.device(KIND, places[-1])
    torch.manual_seed(3)
    found = [torch.rand(6, device=device), torch.randperm(6, device=device)]
    generator = new_generator(device).manual_seed(3)
    wanted = [torch.rand(6, device=device, generator=generator)]
    wanted.append(torch.randperm(6, device=device, generator=generator))
    assert same(found, wanted)
    ones = torch.ones(64, device=device)
    masks = [seeded(functional.dropout, ones) for _ in range(2)]
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], functional.dropout(ones).cpu())


def test_a_thread_that_is_in_no_shard_draws_its_own_numbers_meanwhile(places):
    device = torch.device(KIND, 0)
    fun = mapped(lambda x: torch.stack([functional.dropout(x) for _ in range(50)], 1), places)
    alone = seeded(fun, ROWS)
    drawn = []

    def draw():
        drawn.extend(torch.rand(6, device=device) for _ in range(500))

    torch.manual_seed(5)
    generator = new_generator(device).manual_seed(5)
    thread = threading.Thread(target=draw)
    thread.start()
    together = fun(ROWS).cpu()
    thread.join(60)
    assert torch.equal(together, alone)
    assert same(drawn, [torch.rand(6, device=device, generator=generator) for _ in range(500)])
