"""Train a critic with a gradient penalty: second derivatives inside ``pmap``, and through it.

The loss of a WGAN-GP critic contains the gradient of the critic with respect to its own input, so training
it differentiates twice. It is written here in two ways that must agree with one device and with each other:

inside    ``fp.pmap(fp.value_and_grad(loss_fn))``: each device takes both derivatives of its own rows.
through   ``loss_fn`` calls a pmapped critic, and both derivatives are taken outside, by autograd: pmap is
          itself differentiable, to any order.

    python examples/gradient_penalty.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import funcpar as fp

TOLERANCE = 1e-12
Params = dict[str, Tensor]


def loss_with(critic: Callable[[Params, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the critic's loss: tell real from fake with a slope of about 1."""

    def loss_fn(params: Params, real: Tensor, fake: Tensor, between: Tensor) -> Tensor:
        slope = fp.grad(lambda rows: critic(params, rows).sum())
        slopes = slope(
            torch.lerp(fake, real, between)
        )  # No row depends on another: row i is the slope at row i.
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        return critic(params, fake).mean() - critic(params, real).mean() + 10 * penalty

    return loss_fn


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices (default 4)")
    parser.add_argument("--rows", type=int, default=101, help="rows of the mini-batch (default 101)")
    args = parser.parse_args()
    fp.set_cpu_devices(args.devices)
    torch.manual_seed(0)

    apply, params = fp.functionalize(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double())
    real = torch.randn(args.rows, 8, dtype=torch.float64) + 1
    fake = torch.randn(args.rows, 8, dtype=torch.float64)
    between = torch.rand(args.rows, 1, dtype=torch.float64)
    batch = (real, fake, between)

    loss, grads = fp.value_and_grad(loss_with(apply))(params, *batch)
    ways = {
        "inside pmap": fp.pmap(fp.value_and_grad(loss_with(apply))),
        "through pmap": fp.value_and_grad(loss_with(fp.pmap(apply))),
    }

    print(
        "The gradient of a loss with a gradient penalty, inside fp.pmap and through it, against one device."
    )
    print(f"Devices: {', '.join(map(str, fp.devices()))}; {args.rows} rows.")
    print(f"One device: loss {loss:.12f}.")
    scale = max(grad.abs().max() for grad in grads.values())
    worst = 0.0
    for name, value_and_grad in ways.items():
        other_loss, other_grads = value_and_grad(params, *batch)
        difference = max(((other_grads[key] - grads[key]).abs().max() / scale).item() for key in grads)
        print(f"{name:>12}: loss {other_loss:.12f}, largest relative difference {difference:.1e}.")
        worst = max(worst, difference, ((other_loss - loss).abs() / loss.abs()).item())
    print(f"Worst: {worst:.1e} (allowed: {TOLERANCE:.0e}).")
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
