"""Every way that data takes between a caller and shards on accelerators, on the simulated one."""

from __future__ import annotations

import copy
import threading

import simulated
import torch
from simulated import Stream
from simulated_common import batch, books, close, loss, recorder, registry, weights
from torch import nn

import compat
import funcpar as fp

PROGRAMS, program = registry()


@program
def forward(devices):
    p, (x, y) = weights(), batch()
    with torch.no_grad():
        close(fp.pmap(lambda p, x: x @ p["w"], devices=devices)(p, x), x @ p["w"])
        close(fp.pmap(loss, devices=devices)(p, x, y), loss(p, x, y))


@program
def forward_of_what_is_on_a_device(devices):
    p, (x, y) = weights(), batch()
    there = fp.tree.map(lambda t: t.to("sim:0"), p)
    fun = fp.pmap(loss, devices=devices)
    for _ in range(2):
        close(fun(there, (x.to("sim:0") * 2), y), loss(p, x * 2, y))


@program
def fused_gradient(devices):
    p, (x, y) = weights(), batch()
    value, grads = fp.pmap(fp.value_and_grad(loss), devices=devices)(p, x, y)
    close((value, grads), fp.value_and_grad(loss)(p, x, y))
    assert all(grad.is_cpu for grad in grads.values())


@program
def fused_gradient_of_rows_and_aux(devices):
    p, (x, y) = weights(), batch()
    fun = fp.value_and_grad(lambda p, x, y: (loss(p, x, y), x.sum(1)), argnums=(0, 1), has_aux=True)
    close(fp.pmap(fun, devices=devices)(p, x, y), fun(p, x, y))


@program
def fused_gradient_of_large_and_of_half_leaves(devices):
    p = {"w": torch.randn(3, 1 << 15, dtype=torch.float64), "h": torch.randn(5, dtype=torch.bfloat16)}
    x = torch.randn(6, 3, dtype=torch.float64)
    fun = fp.value_and_grad(lambda p, x: (x @ p["w"]).mean() + p["h"].sum().double() * x.mean())
    close(fp.pmap(fun, devices=devices)(p, x), fun(p, x))


@program
def fused_gradient_by_the_vendors_sum(devices):
    recorder.library = True
    fused_gradient(devices)
    fused_gradient_of_large_and_of_half_leaves(devices)
    recorder.library = False


@program
def wrapped_gradient(devices):
    fun = fp.value_and_grad(loss)

    @torch.no_grad()
    def step(p, x, y):
        value, grads = fun(p, x, y)
        return value, {name: p[name] - 0.1 * grads[name] for name in p}

    step.__wrapped__ = fun
    p, (x, y) = weights(), batch()
    close(fp.pmap(step, devices=devices)(p, x, y), step(p, x, y))


@program
def joint_backward(devices):
    p, (x, y) = weights(True), batch()
    x.requires_grad_()
    fp.pmap(loss, devices=devices)(p, x, y).backward()
    close([p["w"].grad, p["b"].grad, x.grad], list(torch.autograd.grad(loss(p, x, y), [p["w"], p["b"], x])))


@program
def joint_backward_on_a_device(devices):
    p, (x, y) = weights(), batch()
    there = fp.tree.map(lambda t: t.to("sim:0").requires_grad_(), p)
    out = fp.pmap(lambda p, x: x @ p["w"] + p["b"], devices=devices)(there, x)
    (out - y.to(out.device)).tanh().square().mean().backward()
    wanted = fp.grad(lambda p, x, y: (x @ p["w"] + p["b"] - y).tanh().square().mean())(p, x, y)
    close({name: leaf.grad for name, leaf in there.items()}, wanted)
    assert all(leaf.grad.device == leaf.device for leaf in there.values())


@program
def second_derivative(devices):
    p, (x, y) = weights(True), batch()

    def penalty(fun):
        grads = torch.autograd.grad(fun(p, x, y), list(p.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), list(p.values()))

    close(list(penalty(fp.pmap(loss, devices=devices))), list(penalty(loss)))


@program
def collectives(devices):
    x, _ = batch()

    def body(x):
        x = x - fp.pmean(x.mean(0))
        return x / fp.psum((x * x).sum()) + fp.pmax(x.amax()) + fp.all_gather(x.sum())[0] * 0

    found = fp.pmap(body, in_axes=0, devices=devices)(x)
    z = x - x.mean(0)
    close(found, z / (z * z).sum() + z.max())


@program
def collectives_of_large_values(devices):
    x = torch.randn(len(devices), 50_000, dtype=torch.float64)
    found = fp.pmap(lambda x: fp.psum(x.sum(0)), in_axes=0, out_axes=None, devices=devices)(x)
    close(found, x.sum(0))
    own = fp.pmap(lambda x: fp.psum_scatter(x.sum(0), tiled=True), in_axes=0, out_axes=0, devices=devices)
    close(own(x[:, : 16_384 * len(devices)]), x.sum(0)[: 16_384 * len(devices)])
    close(fp.pmap(lambda x: fp.ppermute(x, perm=[(0, 0)]), in_axes=0, devices=devices)(x)[0], x[0])


@program
def collectives_backward(devices):
    x, _ = batch()

    def body(x):
        return (x - fp.pmean(x.mean(0))).square().mean(1)

    def whole(x):
        return (x - x.mean(0)).square().mean(1)

    close(fp.grad(lambda x: fp.pmap(body, in_axes=0, devices=devices)(x).sum().cpu())(x),
          fp.grad(lambda x: whole(x).sum())(x))  # fmt: skip
    close(fp.pmap(fp.grad(lambda x: body(x).mean()), in_axes=0, devices=devices)(x),
          fp.grad(lambda x: whole(x).mean())(x))  # fmt: skip


@program
def every_way_to_merge(devices):
    x, _ = batch()
    there = x.to("sim:0")
    for spec, fun, wanted in [
        (0, lambda x: x, x), ("mean", lambda x: x.mean(0), x.mean(0)), ("sum", lambda x: x.sum(0), x.sum(0)),
        (None, lambda x: fp.psum(x.sum(0)), x.sum(0)),
    ]:  # fmt: skip
        close(fp.pmap(fun, in_axes=0, out_axes=spec, devices=devices)(there), wanted)
    stacked = fp.pmap(lambda x: x.sum(0), in_axes=0, out_axes="stack", devices=devices)(there)
    close(stacked.sum(0), x.sum(0))


@program
def values_kept_in_shards(devices):
    x, _ = batch()
    double = fp.pmap(lambda x: x * 2, in_axes=0, out_axes="shards", devices=devices)
    kept = double(double(x))
    assert [part.device.index for part in kept.parts] == devices
    close(kept.gather(), x * 4)
    close(fp.pmap(lambda x: x.mean(0), in_axes=0, out_axes="mean", devices=devices)(kept), (x * 4).mean(0))


@program
def parallel_call(devices):
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    xs = [torch.randn(4, 3, dtype=torch.float64) for _ in devices]
    outs = fp.parallel_call(lambda w, x: (x * w).sum(), [(w, x) for x in xs], devices)
    sum(out.cpu() for out in outs).backward()
    close(w.grad, sum(xs).sum(0))


@program
def closed_over_parameters(devices):
    model = nn.Linear(3, 2).double().to("sim:0")
    x, _ = batch()
    fun = fp.pmap(model, in_axes=0, devices=[0] * len(devices))
    fun(x).sum().backward()
    close(model.bias.grad, torch.full((2,), 13.0, dtype=torch.float64))


@program
def module_with_buffers(devices):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()
    apply, p = fp.functionalize(model)
    x, _ = batch()
    close(fp.pmap(apply, devices=devices)(p, x), model(x).detach())


@program
def data_parallel_of_compat(devices):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = batch()
    wanted = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
    there = copy.deepcopy(model).to(f"sim:{devices[0]}")
    # With one device compat calls the module as it is, on what is where it is.
    rows = x if len(devices) > 1 else x.to(f"sim:{devices[0]}")
    out = compat.DataParallel(there, device_ids=devices)(rows)
    (out - y.to(out.device)).square().mean().backward()
    close([p.grad for p in there.parameters()], list(wanted))


@program
def nested(devices):
    p, (x, y) = weights(), batch()
    inner = fp.pmap(fp.grad(loss), devices=devices)
    step = fp.pmap(lambda p, x, y: fp.psum(inner(p, x, y)), out_axes=None, devices=devices)
    assert step(p, x, y)["w"].shape == (3, 2)
    both = fp.pmap(fp.grad(fp.pmap(loss, devices=devices)), devices=devices)
    close(both(p, x, y), fp.grad(loss)(p, x, y)) if len(devices) == 1 else None


@program
def torch_func_grad_around(devices):
    p, (x, y) = weights(), batch()
    close(
        torch.func.grad(lambda p: fp.pmap(loss, devices=devices)(p, x, y))(p), torch.func.grad(loss)(p, x, y)
    )
    # Torch runs each node on the stream that its forward ran on; the simulated engine does not.
    books.races = [race for race in books.races if "freed" not in race]
    books.is_closed = True


@program
def torch_func_inside_and_jvp_around(devices):
    p, (x, y) = weights(), batch()
    per_row = fp.pmap(torch.func.vmap(torch.func.grad(loss), (None, 0, 0)), out_axes=0, devices=devices)
    close(per_row(p, x, y), torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(p, x, y))
    fun = fp.pmap(lambda x: x - fp.pmean(x.mean(0)), in_axes=0, devices=devices)
    close(torch.func.jvp(fun, (x,), (x,))[1], x - x.mean(0))


@program
def an_exception_and_the_call_after_it(devices):
    p, (x, y) = weights(), batch()
    there = p["w"].to("sim:0")

    def fails(w, x):
        if fp.axis_index() == fp.axis_size() - 1:
            raise KeyError("the last one")
        return fp.psum((x @ w).sum())

    for _ in range(2):
        try:
            fp.pmap(fails, devices=devices)(there, x)
        except KeyError:
            pass
        else:
            raise AssertionError("no error")
        there += 1
    close(fp.pmap(loss, devices=devices)(p, x, y), loss(p, x, y))


@program
def a_caller_on_streams_of_its_own(devices):
    p, (x, y) = weights(), batch()
    for k in range(simulated.COUNT):
        books.use(Stream(torch.device("sim", k), "side"))
    there = fp.tree.map(lambda t: t.to("sim:0") * 1, p)
    for _ in range(3):
        grads = fp.pmap(fp.grad(loss), devices=devices)(there, x, y)
        there = {name: there[name] - 0.1 * grads[name] for name in there}
        p = {name: p[name] - 0.1 * grad for name, grad in fp.grad(loss)(p, x, y).items()}
    close(there, p)
    books.here.streams = {}


@program
def two_callers_at_the_same_time(devices):
    failed: list[BaseException] = []

    def run():
        try:
            torch._C._set_multithreading_enabled(False)
            for k in range(simulated.COUNT):
                books.use(Stream(torch.device("sim", k), "a caller's"))
            a_training_loop(devices)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed


def a_training_loop(devices):
    p, (x, y) = weights(), batch()
    step = fp.pmap(fp.value_and_grad(loss), devices=devices)
    there = fp.tree.map(lambda t: t.to("sim:0") * 1, p)
    for _ in range(3):
        _, grads = step(there, x, y)
        for name, grad in grads.items():
            there[name] -= 0.1 * grad
    assert there["w"].device.index == 0


@program
def staged_parameters(devices):
    p, (x, y) = weights(), batch()
    p = fp.stage(p, devices)
    step = fp.pmap(fp.value_and_grad(loss), devices=devices)
    optimizer = torch.optim.SGD(p.values(), lr=0.1)
    for _ in range(3):
        close(step(p, x, y), fp.value_and_grad(loss)(p, x, y))
        for name, grad in step(p, x, y)[1].items():
            p[name].grad = grad
        optimizer.step()


@program
def params_updated_in_the_shards(devices):
    def step(p, x, y):
        grads = fp.psum(fp.grad(loss)(p, x, y))
        return {name: p[name] - 0.1 * grads[name] for name in p}

    mapped = fp.pmap(step, out_axes=None, devices=devices)
    p, (x, y) = weights(), batch()
    for _ in range(3):
        p = mapped(p, x, y)
    assert p["w"].device.index == devices[0]


@program
def prefetched_batches(devices):
    p = weights()
    batches = [batch() for _ in range(4)]
    step = fp.pmap(loss, devices=devices)
    for x, y in fp.prefetch(batches, devices=devices):
        close(step(p, x, y), loss(p, x, y))
        x.zero_()  # What was sent is a copy.
    for _ in fp.prefetch(batches, devices=devices):
        break


@program
def donated_parameters(devices):
    def step(p, x, y):
        grads = fp.psum(fp.grad(loss)(p, x, y))
        return {name: p[name] - 0.1 * grads[name] for name in p}

    mapped = fp.pmap(step, out_axes=None, devices=devices, donate_argnums=0)
    p, (x, y) = weights(), batch()
    p = fp.tree.map(lambda t: t.to(f"sim:{devices[0]}") * 1, p)
    for _ in range(3):
        p = mapped(p, x, y)
    state = fp.pmap(lambda s: s * 2, in_axes=0, devices=devices, donate_argnums=0)
    close(state(state(x * 1)), x * 4)
