"""Train a small CNN with BatchNorm on four devices, and get what one device gets.

Batch normalisation is the one common layer that looks across rows, so that shards of a batch must meet in it.
An existing model is converted, and its buffers go in and out of the step like its parameters. The rows do not
divide by the devices. Parameters and running statistics are compared with plain PyTorch on one device.

    python examples/sync_batchnorm.py          exit with 1 if anything differs by more than 1e-9
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import funcpar as fp

LARGEST_DIFFERENCE = 1e-9
ROWS, CLASSES = 30, 5


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 16, 32, bias=False), nn.BatchNorm1d(32, momentum=None), nn.ReLU()),
        nn.Linear(32, CLASSES),
    )


def make_batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return noisy images, brighter for higher labels."""
    batches = []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (ROWS,))
        images = torch.randn(ROWS, 3, 8, 8, dtype=torch.float64) + labels[:, None, None, None]
        batches.append((images, labels))
    return batches


def train_on_one(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Train as without funcpar; return parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


def train_on_many(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model = fp.SyncBatchNorm.convert_sync_batchnorm(model)
    apply, params, buffers = fp.functionalize_with_buffers(model)

    def loss_fn(
        params: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        scores, buffers = apply(params, buffers, images)
        return F.cross_entropy(scores, labels), buffers

    # The loss is a mean over rows; the new buffers are the same on all devices.
    step = fp.pmap(
        fp.value_and_grad(loss_fn, has_aux=True), in_axes=(None, None, 0, 0), out_axes=("mean", None)
    )
    optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
    for number, (images, labels) in enumerate(batches):
        (loss, buffers), grads = step(params, buffers, images, labels)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        print(f"step {number}: loss {loss.item():.6f}")
    return params | buffers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="virtual CPU devices (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="steps of training (default 10)")
    args = parser.parse_args()
    fp.set_cpu_devices(args.devices)
    torch.manual_seed(0)
    print("Training a CNN with fp.SyncBatchNorm on shards, against BatchNorm on one device.")
    print(f"Devices: {', '.join(map(str, fp.devices()))}; {ROWS} rows a step.")
    model, batches = make_model().double(), make_batches(args.steps)
    many = train_on_many(copy.deepcopy(model), batches)
    one = train_on_one(model, batches)
    difference = max((many[name] - one[name]).abs().max().item() for name in one)
    print(f"Compared: {len(one)} parameters and running statistics, after {args.steps} steps.")
    print(f"Largest difference: {difference:.1e} (allowed: {LARGEST_DIFFERENCE:.0e}).")
    return int(not difference <= LARGEST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
