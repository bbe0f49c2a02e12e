"""Train a small CNN on handwritten digits, every mini-batch cut into one shard per device.

The data are scikit-learn's 1,797 images of 8x8 pixels, four fifths for training. What is parallel is one
line, ``step = fp.pmap(fp.value_and_grad(loss_fn))``; the rest is a PyTorch training loop.

    python examples/train_digits.py                      train; exit with 1 below 97 % test accuracy
    python examples/train_digits.py --check              train on one device too; compare the parameters
    python examples/train_digits.py --plot curves.png    the same, and save the loss curves of both
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import fmean

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import funcpar as fp

LARGEST_DIFFERENCE = 1e-8


@dataclass
class Run:
    """What one training left behind."""

    losses: list[float]  # of every step
    change: dict[str, Tensor]  # of every parameter, from first to last
    accuracy: float  # on the test images


def make_model(dropout: float) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(128, 10),
    )


def load_data(dtype: torch.dtype, home: torch.device) -> list[Tensor]:
    """Return training images, test images, training labels and test labels: always the same split."""
    digits = load_digits()
    parts = train_test_split(
        digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    images, labels = [torch.tensor(p, dtype=dtype)[:, None] / 16 for p in parts[:2]], parts[2:]
    return [part.to(home) for part in (*images, *map(torch.tensor, labels))]


def train(devices: tuple[fp.Device, ...], epochs: int, batch: int, dtype: torch.dtype, dropout: float) -> Run:
    images, test_images, labels, test_labels = load_data(dtype, devices[0].torch_device)
    torch.manual_seed(0)  # The first parameters and the masks of dropout.
    model = make_model(dropout).to(images)
    apply, params = fp.functionalize(model)
    first = {name: param.clone() for name, param in params.items()}

    def loss_fn(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, images), labels)

    step = fp.pmap(fp.value_and_grad(loss_fn), devices=devices)
    predict = fp.pmap(lambda params, images: apply(params, images).argmax(1), devices=devices)

    optimizer = torch.optim.AdamW(params.values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    shuffle = torch.Generator().manual_seed(0)
    losses: list[float] = []
    progress = tqdm(range(1, epochs + 1), desc=f"on {' '.join(map(str, devices))}", unit="epoch")
    for _ in progress:
        start = time.perf_counter()
        order = torch.randperm(len(images), generator=shuffle)
        for rows in order.split(batch):  # The last mini-batch is smaller, and need not divide by the devices.
            loss, grads = step(params, images[rows], labels[rows])
            for name, param in params.items():
                param.grad = grads[name]
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
        speed = len(images) / (time.perf_counter() - start)
        progress.set_postfix_str(f"loss {fmean(losses[-20:]):.4f}, {speed:,.0f} rows/s")

    model.eval()  # apply sees the module as it is at the call: no dropout from here on.
    accuracy = (predict(params, test_images) == test_labels).double().mean().item()
    return Run(losses, {name: param - first[name] for name, param in params.items()}, accuracy)


def largest_difference(run: Run, reference: Run) -> float:
    """Return the largest difference of a parameter's change, relative to its largest change."""
    return max(
        ((run.change[name] - change).abs().max() / change.abs().max()).item()
        for name, change in reference.change.items()
    )


def save_plot(file: str, run: Run, reference: Run, devices: int) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    axes.plot(reference.losses, linewidth=3, alpha=0.4, label="one device")
    axes.plot(run.losses, linewidth=1, label=f"devices: {devices}")
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="use N virtual CPU devices (default: all there are)"
    )
    parser.add_argument("--epochs", type=int, help="passes over the training images (default 20)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a mini-batch (default 64)")
    parser.add_argument("--quick", action="store_true", help="5 epochs, and be content with 90 %%")
    parser.add_argument(
        "--check", action="store_true", help="compare with one device, in float64, no dropout"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="save the loss curves of both; implies --check")
    args = parser.parse_args()
    if args.devices or not torch.accelerator.is_available():
        fp.set_cpu_devices(args.devices or max(2, len(fp.devices())))  # With one there is nothing to see.
    devices = fp.devices()
    torch.set_num_threads(1)  # Of the caller, whose threads would only be in the way of the devices.
    epochs, wanted = args.epochs or (5 if args.quick else 20), 0.9 if args.quick else 0.97
    check = args.check or args.plot is not None
    # Two runs can agree to rounding only where rounding is small and no shard draws masks of its own.
    dtype, dropout = (torch.float64, 0.0) if check else (torch.float32, 0.25)

    print("Training a CNN on handwritten digits with fp.pmap(fp.value_and_grad(loss_fn)).")
    print(
        f"Devices: {', '.join(map(str, devices))}; {epochs} epochs, {dtype}, dropout {dropout}.", flush=True
    )
    start = time.perf_counter()
    run = train(devices, epochs, args.batch, dtype, dropout)
    print(
        f"Test accuracy: {run.accuracy:.2%} after {time.perf_counter() - start:.1f} s (wanted: {wanted:.0%})."
    )
    failed = run.accuracy < wanted
    if check:
        reference = train(devices[:1], epochs, args.batch, dtype, dropout)
        difference = largest_difference(run, reference)
        print(f"On one device: {reference.accuracy:.2%}.")
        print(f"Largest relative difference: {difference:.1e} (allowed: {LARGEST_DIFFERENCE:.0e}).")
        failed |= not difference <= LARGEST_DIFFERENCE
    if args.plot:
        save_plot(args.plot, run, reference, len(devices))
        print(f"Loss curves: {args.plot}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
