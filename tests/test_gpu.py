"""The law on accelerators: one, all, and one named twice. Nothing here runs without one, and none of it has.

The same ways are run on a simulated accelerator in ``test_streams.py``.
"""

import pytest
import torch

import funcpar as fp

COUNT = torch.accelerator.device_count() if torch.accelerator.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COUNT, reason="torch.accelerator reports no device"),
]


@pytest.fixture(params=["one", "all", "one twice"])
def accelerators(request, monkeypatch):
    """Take the accelerators in the place of virtual CPU devices."""
    monkeypatch.setattr("funcpar._devices._devices", None)
    return {"one": [0], "all": list(range(COUNT)), "one twice": [0, 0]}[request.param]


def loss(params, x, y):
    return ((x @ params["w"]).tanh() - y).square().mean()


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_value_and_gradients_are_those_of_the_cpu(accelerators, rows):
    params = {"w": torch.randn(3, 2, dtype=torch.float64)}
    x, y = torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)
    value, grads = fp.value_and_grad(loss)(params, x, y)
    found, found_grads = fp.pmap(fp.value_and_grad(loss), devices=accelerators)(params, x, y)
    torch.testing.assert_close(found.cpu(), value)
    torch.testing.assert_close(found_grads["w"].cpu(), grads["w"])
    leaf = {"w": params["w"].clone().requires_grad_()}
    fp.pmap(loss, devices=accelerators)(leaf, x, y).backward()
    torch.testing.assert_close(leaf["w"].grad, grads["w"])


def test_sums_beside_backward_repeat_bit_for_bit_and_are_those_of_the_cpu(accelerators):
    shapes = {"first": (64, 1 << 13), "scale": (1 << 13,), "last": (1 << 13, 64), "unused": (3,)}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        params = {name: 0.01 * torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
        x = torch.randn(37, 64, dtype=dtype)
        fun = fp.value_and_grad(
            lambda p, x: ((x @ p["first"]).tanh() * p["scale"] @ p["last"]).square().mean()
        )
        step = fp.pmap(fun, devices=accelerators)
        first = fp.tree.map(torch.Tensor.cpu, step(params, x))
        if dtype is torch.float64:
            torch.testing.assert_close(first, fun(params, x))
        for _ in range(20):
            again = fp.tree.leaves(fp.tree.map(torch.Tensor.cpu, step(params, x)))
            assert all(map(torch.equal, again, fp.tree.leaves(first)))


def test_collectives_meet_across_devices(accelerators):
    mean = fp.pmap(lambda x: x - fp.pmean(x.mean(0)), in_axes=0, devices=accelerators)
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(mean(x).cpu(), x - x.mean(0))


def params_on(device):
    made = {"w": torch.randn(3, 2, dtype=torch.float64)}
    return fp.tree.map(lambda t: t.to(device), made)


def batch(rows=13):
    return torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)


def kind():
    return torch.accelerator.current_accelerator().type


def test_training_on_a_side_stream_is_training_on_the_cpu(accelerators):
    params, (x, y) = params_on("cpu"), batch()
    there = fp.tree.map(lambda t: t.to(f"{kind()}:0"), params)
    step = fp.pmap(fp.value_and_grad(loss), devices=accelerators)
    side = torch.Stream(f"{kind()}:0")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(50):
            _, grads = step(there, x, y)
            there = {"w": there["w"] - 0.1 * grads["w"]}
    torch.accelerator.current_stream().wait_stream(side)
    for _ in range(50):
        params = {"w": params["w"] - 0.1 * fp.grad(loss)(params, x, y)["w"]}
    torch.testing.assert_close(there["w"].cpu(), params["w"])


def test_staged_and_updated_parameters_are_the_new_ones(accelerators):
    params, (x, y) = fp.stage(params_on("cpu"), accelerators), batch()
    step = fp.pmap(fp.value_and_grad(loss), devices=accelerators)
    optimizer = torch.optim.AdamW(params.values(), lr=0.1, fused=True)
    for _ in range(5):
        value, grads = step(params, x, y)
        torch.testing.assert_close(value.cpu(), loss(params, x, y))
        params["w"].grad = grads["w"]
        optimizer.step()


def test_prefetched_batches_are_their_own(accelerators):
    params = params_on("cpu")
    step = fp.pmap(loss, devices=accelerators)
    for x, y in fp.prefetch([batch() for _ in range(6)], devices=accelerators):
        wanted = loss(params, x, y)
        found = step(params, x, y)
        x.zero_()
        torch.testing.assert_close(found.cpu(), wanted)


def test_replicated_results_and_donated_parameters(accelerators):
    def step(p, x, y):
        grads = fp.psum(fp.grad(loss)(p, x, y))
        return {"w": p["w"] - 0.1 * grads["w"]}

    mapped = fp.pmap(step, out_axes=None, devices=accelerators, donate_argnums=0)
    params, (x, y) = params_on(f"{kind()}:0"), batch()
    where = params["w"].data_ptr()
    for _ in range(5):
        params = mapped(params, x, y)
    assert params["w"].data_ptr() == where


def test_an_exception_leaves_streams_in_order(accelerators):
    def fails(w, x):
        if fp.axis_index() == fp.axis_size() - 1:
            raise KeyError("the last one")
        return (x @ w).sum()

    w, (x, y) = params_on(f"{kind()}:0")["w"], batch()
    for _ in range(10):
        with pytest.raises(KeyError):
            fp.pmap(fails, devices=accelerators)(w, x)
        w += 1
    torch.testing.assert_close(
        fp.pmap(loss, devices=accelerators)({"w": w}, x, y).cpu(), loss({"w": w.cpu()}, x, y)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can count host waits on CUDA alone")
def test_a_steady_step_never_makes_the_host_wait(accelerators):
    params, (x, y) = params_on("cuda:0"), batch()
    step = fp.pmap(fp.value_and_grad(loss), devices=accelerators)
    for _ in range(3):
        step(params, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(params, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
