"""The law on accelerators: one, all, and one named twice. Nothing here runs without one."""

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


def test_collectives_meet_across_devices(accelerators):
    mean = fp.pmap(lambda x: x - fp.pmean(x.mean(0)), in_axes=0, devices=accelerators)
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(mean(x).cpu(), x - x.mean(0))
