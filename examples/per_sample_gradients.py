"""Take the gradient of every single sample, on all devices: ``pmap`` of ``vmap`` of ``grad``.

``fp.grad(loss_fn)`` is the gradient of one sample, ``torch.func.vmap`` makes it that of many at once, and
``fp.pmap`` gives each device its share of the samples. The per-sample gradients never leave the device that
made them: what comes back is one norm a sample, the quantity that differentially private training clips and
that importance sampling draws by.

    python examples/per_sample_gradients.py
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import funcpar as fp

TOLERANCE = 1e-12


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices (default 4)")
    parser.add_argument("--samples", type=int, default=1_001, help="number of samples (default 1001)")
    args = parser.parse_args()
    fp.set_cpu_devices(args.devices)
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).double()
    images = torch.randn(args.samples, 20, dtype=torch.float64)
    labels = torch.randint(5, (args.samples,))
    apply, params = fp.functionalize(model)

    def loss_fn(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, image), label)  # One sample: no batch dimension here.

    def gradient_norm(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        grads = fp.grad(loss_fn)(params, image, label)
        return torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()

    per_sample = torch.func.vmap(gradient_norm, in_dims=(None, 0, 0))
    mapped = fp.pmap(per_sample, in_axes=(None, 0, 0))

    print("Norms of per-sample gradients with fp.pmap(torch.func.vmap(fp.grad(loss_fn))), against a loop.")
    print(f"Devices: {', '.join(map(str, fp.devices()))}; {args.samples} samples.")
    mapped(params, images, labels)  # The first call starts threads, and loads parts of torch.
    start = time.perf_counter()
    norms = mapped(params, images, labels)
    seconds = time.perf_counter() - start

    gradient_norm(params, images[0], labels[0])
    start = time.perf_counter()
    looped = torch.stack([gradient_norm(params, *sample) for sample in zip(images, labels, strict=True)])
    slow = time.perf_counter() - start

    difference = ((norms - looped).abs().max() / looped.max()).item()
    print(f"Norms: mean {norms.mean():.4f}, largest {norms.max():.4f} (sample {norms.argmax()}).")
    print(f"Mapped: {seconds:.3f} s. Loop: {slow:.3f} s.")
    print(f"Largest relative difference: {difference:.1e} (allowed: {TOLERANCE:.0e}).")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
