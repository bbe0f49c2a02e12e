"""What shards draw on accelerators, and who else sees it, on the simulated one."""

from __future__ import annotations

import threading
import time

import simulated
import simulated_random
import torch
from simulated_common import close, registry
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import funcpar as fp

PROGRAMS, program = registry()
ROWS = torch.linspace(0.5, 1.5, 72, dtype=torch.float64).reshape(12, 6)


def recurrent(x):
    """Call cuDNN's recurrent layers with the state of dropout that all share."""
    state = torch.zeros(8, dtype=torch.uint8, device=x.device)
    x = x.float()
    return torch._cudnn_rnn(x, [x], 4, None, x, None, 3, 6, 0, 2, False, 0.5, True, False, [], state)[0]


FAMILIES = {
    "dropout": functional.dropout,
    "dropout2d": lambda x: functional.dropout2d(x[:, :, None, None])[:, :, 0, 0],
    "alpha_dropout": lambda x: functional.alpha_dropout(x, training=True),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, device=x.device),
    "randint": lambda x: torch.randint(0, 1 << 20, x.shape, device=x.device),
    "randperm": lambda x: x + torch.randperm(60, device=x.device)[:6],
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "normal": lambda x: torch.normal(x, x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x / 2) + torch.bernoulli(x / 2),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "multinomial": lambda x: torch.multinomial(torch.ones(x.shape[0], 50, device=x.device), 6),
    "poisson": lambda x: torch.poisson(100 * x),
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "gamma": lambda x: torch._standard_gamma(9 * x),
    "recurrent": recurrent,
}


def mapped(fun, devices):
    return fp.pmap(fun, in_axes=0, out_axes=0, devices=devices)


def seeded(fun, *args):
    torch.manual_seed(5)
    return fp.tree.map(lambda t: t.cpu(), fun(*args))


def states():
    """Return the states of all default generators of the process, as the kernels see them."""
    return [torch.default_generator.get_state(), *simulated_random.own.states()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def after_one_draw():
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    return torch.get_rng_state()


@program
def a_seed_repeats_and_shards_differ(devices):
    rows = torch.ones(12, 6, dtype=torch.float64)
    for name, family in FAMILIES.items():
        fun = mapped(family, devices)
        first = seeded(fun, rows)
        assert all(torch.equal(first, seeded(fun, rows)) for _ in range(3)), name
        if len(devices) > 1 or name != "recurrent":  # Outside of shards it has the state of all.
            assert not torch.equal(first, fun(rows).cpu()), f"{name}: the next call goes on"
        parts = first.split(12 // len(devices))
        for k in range(len(parts)):
            assert not any(torch.equal(parts[k], other) for other in parts[k + 1 :]), name


@program
def a_shard_draws_from_its_stream_alone(devices):
    if len(devices) == 1:
        return
    wanted = after_one_draw()
    for name, family in FAMILIES.items():

        def fun(x, name=name, family=family):
            before = torch.get_rng_state()
            drawn = family(x)
            # The seed of cuDNN's state is a number of the host.
            assert name == "recurrent" or same([torch.get_rng_state()], [before])
            return drawn

        torch.manual_seed(5)
        before = simulated_random.own.states()
        mapped(fun, devices)(ROWS)
        assert same(simulated_random.own.states(), before), name
        assert torch.equal(torch.get_rng_state(), wanted), name


@program
def one_shard_draws_the_numbers_of_the_plain_function(devices):
    for name, family in FAMILIES.items():
        wanted = seeded(family, ROWS.to(f"sim:{devices[0]}"))
        assert torch.equal(seeded(mapped(family, devices[:1]), ROWS), wanted), name


@program
def what_draws_nothing_leaves_all_generators_alone(devices):
    def fun(x):
        x = functional.dropout(x, training=False) + torch.native_dropout(x, 0.5, False)[0]
        return functional.dropout(x, 0.0) + x.sum()

    before = states()
    leaf = ROWS.clone().requires_grad_()
    mapped(fun, devices)(leaf).sum().backward()
    fp.pmap(fp.grad(lambda w, x: fun(x * w).mean()), devices=devices)(ROWS[0], ROWS)
    assert same(states(), before)


@program
def numbers_of_devices_and_of_the_cpu_differ(devices):
    def draws(x):
        here = [torch.rand(8, device=f"sim:{k}").cpu() for k in range(simulated.COUNT)]
        return torch.stack([torch.rand(8), *here])[None]

    drawn = mapped(draws, devices)(torch.ones(len(devices), 1)).flatten(0, -2)
    if len(devices) > 1:
        assert len({tuple(numbers.tolist()) for numbers in drawn}) == 4 * len(devices)


@program
def gradients_use_the_mask_of_the_value(devices):
    def loss(w, x):
        return functional.dropout(x * w).square().mean()

    w = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    value = seeded(fp.pmap(loss, devices=devices), leaf, ROWS)
    (grad,) = torch.autograd.grad(value, leaf)
    close(seeded(fp.pmap(fp.value_and_grad(loss), devices=devices), w, ROWS), (value.detach(), grad))
    out = fp.pmap(lambda w, x: functional.dropout(x * w) ** 2, devices=devices)(leaf, ROWS)
    mask = (out.cpu() != 0) * 4.0 * ROWS**2
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    close(torch.autograd.grad(grad.sum(), leaf)[0], (2 * mask).sum(0))


@program
def checkpoint_recomputes_with_the_same_mask(devices):
    def block(w, x):
        return functional.dropout((x * w).sin()) * torch.rand(x.shape[1], device=x.device)

    def within(w, x):
        with_it = checkpoint(block, w, x, use_reentrant=False).mean()
        return with_it + (torch.rand(x.shape, device=x.device) * x).mean()

    def without(w, x):
        return block(w, x).mean() + (torch.rand(x.shape, device=x.device) * x).mean()

    w = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    found, wanted = (
        seeded(fp.pmap(fp.value_and_grad(f), devices=devices), w, ROWS) for f in (within, without)
    )
    close(found, wanted)
    leaves = [w.clone().requires_grad_() for _ in range(2)]
    for fun, leaf in zip((within, without), leaves, strict=True):
        out = seeded(fp.pmap(fun, devices=devices), leaf, ROWS)
        mapped(torch.rand_like, devices)(ROWS)
        out.backward()
    close(leaves[0].grad, leaves[1].grad)


@program
def functions_of_torch_act_on_the_stream(devices):
    def body(x):
        draw = lambda: torch.rand(6, device=x.device)
        saved = torch.sim.get_rng_state(x.device)
        first = draw()
        torch.sim.set_rng_state(saved, x.device)
        assert same([draw()], [first])
        with torch.random.fork_rng(device_type="sim", devices=range(simulated.COUNT)):
            draw(), draw()
        following = draw()
        torch.sim.set_rng_state(saved, x.device)
        draw()
        assert same([draw()], [following])
        by_name = torch.rand(6, device=x.device, generator=torch.sim.default_generators[x.device.index])
        torch.manual_seed(11)
        return torch.stack([following, by_name, draw()])[None]

    fun, rows = mapped(body, devices), ROWS[: len(devices)]
    first = seeded(fun, rows)
    close(first[:, 2], torch.rand(6, generator=torch.Generator().manual_seed(11)).expand(len(devices), 6))
    if len(devices) > 1:
        torch.manual_seed(5)
        before = states()[1:]
        close(fun(rows), first)
        assert same(states()[1:], before)
        assert len({tuple(numbers.tolist()) for numbers in first[:, :2].flatten(0, 1)}) == 2 * len(devices)


@program
def a_generator_of_the_users_own_is_used_as_it_is(devices):
    def draws(x):
        return torch.rand(6, device=x.device, generator=simulated_random.Generator().manual_seed(7))[None]

    before = states()
    wanted = torch.rand(6, generator=torch.Generator().manual_seed(7)).expand(len(devices), 6)
    close(mapped(draws, devices)(ROWS[: len(devices)]), wanted)
    assert same(states(), before)


@program
def torch_seeding_cudnn_leaves_the_streams_alone(devices):
    def draws(x):
        if fp.axis_index() == 0:
            default = simulated_random.own.generators[x.device.index]
            torch.empty((), device=x.device).uniform_(generator=default)
        return torch.rand_like(x)

    if len(devices) > 1:
        close(seeded(mapped(draws, devices), ROWS), seeded(mapped(torch.rand_like, devices), ROWS))


@program
def nested_calls_draw_repeatably_and_differently(devices):
    def outer(x):
        inner = fp.parallel_call(lambda: torch.rand(6, device=x.device), [(), ()])
        return torch.stack([*inner, torch.rand(6, device=x.device)])[None]

    fun = mapped(outer, devices)
    first = seeded(fun, ROWS[: len(devices)])
    close(seeded(fun, ROWS[: len(devices)]), first)
    assert first.unique().numel() == first.numel()


@program
def others_draw_their_own_numbers_meanwhile(devices):
    """Dropout lends the default generator a state for a while; nobody else may draw from that."""
    x = torch.ones(6, device="sim:0")
    fun = mapped(lambda x: torch.cat([functional.dropout(x) for _ in range(5)], 1), devices)
    drawn = []
    alone = seeded(fun, ROWS)

    def draw():
        for _ in range(40):
            drawn.append((torch.empty_like(x).uniform_().cpu(), torch.sim.get_rng_state(0)))
            time.sleep(1e-4)

    if len(devices) == 1:
        return
    for generator in simulated_random.own.generators:
        generator.manual_seed(1)
    plain = torch.Generator().manual_seed(1)
    wanted = [(torch.empty(6).uniform_(generator=plain), plain.get_state()) for _ in range(40)]
    thread = threading.Thread(target=draw)
    torch.random.default_generator.manual_seed(5)
    thread.start()
    together = [fun(ROWS).cpu() for _ in range(4)]
    thread.join(60)
    close(together[0], alone)
    assert len(drawn) == 40 and all(same(*pair) for pair in zip(drawn, wanted, strict=True))


@program
def cpu_shards_that_use_an_accelerator(devices):
    def draws(x):
        there = x.to(f"sim:{devices[0]}")
        return (functional.dropout(there) + torch.rand(x.shape, device=there.device)).cpu()

    fp.set_cpu_devices(2)
    try:
        fun = mapped(draws, ["cpu:0", "cpu:1"])
        first = seeded(fun, torch.ones(4, 6))
        torch.manual_seed(5)
        before = states()[1:]
        close(fun(torch.ones(4, 6)), first)
        assert same(states()[1:], before)
        assert not torch.equal(first[:2], first[2:])
    finally:
        fp._devices._devices = None
