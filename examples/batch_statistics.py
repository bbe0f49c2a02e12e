"""Train with BatchNorm: buffers go into ``pmap`` and come out of it, and nothing is changed in place.

``fp.functionalize_with_buffers`` makes running statistics an argument and a result. ``out_axes`` says how
those of the shards become one: ``"mean"`` is the mean weighted by rows for floats, and for the counter of
batches, an integer, it demands that all shards agree.

BatchNorm in training mode mixes the rows of a batch, so it is outside of the law ``pmap(f) == f``: each shard
normalises with the mean and variance of its own rows, as in DataParallel, and not with those of the whole
batch. This script shows what that leaves equal and what differs. To have the statistics of one big batch
under pmap they must be synchronised between the shards, as in sync_batchnorm.py.

    python examples/batch_statistics.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcpar as fp

TOLERANCE = 1e-12
MEAN, VARIANCE, COUNTER = "0.running_mean", "0.running_var", "0.num_batches_tracked"


def relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def by_hand(
    gradient: Callable[..., Any], params: Any, buffers: Any, x: Tensor, y: Tensor, shards: int
) -> Any:
    """Return running variance and gradient as the mapped call promises them: means over shards, by rows."""
    variance, weight = torch.zeros(()), torch.zeros(())
    for rows, target in zip(x.tensor_split(shards), y.tensor_split(shards), strict=True):
        (_, new), grads = gradient(params, buffers, rows, target)
        variance = variance + new[VARIANCE] * len(rows) / len(x)
        weight = weight + grads["1.weight"] * len(rows) / len(x)
    return variance, weight


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices (default 4)")
    parser.add_argument("--rows", type=int, default=103, help="rows of the batch (default 103)")
    args = parser.parse_args()
    fp.set_cpu_devices(args.devices)
    torch.manual_seed(0)

    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    apply, params, buffers = fp.functionalize_with_buffers(model)
    x = torch.randn(args.rows, 6, dtype=torch.float64) * 3 + 1
    y = torch.randn(args.rows, dtype=torch.float64)

    def loss_fn(params: Any, buffers: Any, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, new_buffers = apply(params, buffers, x)
        return (out.squeeze(1) - y).square().mean(), new_buffers

    gradient = fp.value_and_grad(loss_fn, has_aux=True)
    step = fp.pmap(gradient, in_axes=(None, None, 0, 0), out_axes=("mean", "mean"))
    (loss, new), grads = step(params, buffers, x, y)
    (big_loss, big), big_grads = gradient(params, buffers, x, y)
    variance, weight = by_hand(gradient, params, buffers, x, y, args.devices)

    # In evaluation nothing mixes the rows, and the law holds again.
    model.eval()
    evaluate = fp.pmap(lambda params, buffers, x: apply(params, buffers, x)[0], in_axes=(None, None, 0))
    law = relative(evaluate(params, new, x), apply(params, new, x)[0])
    same = relative(new[MEAN], big[MEAN])
    exact = max(relative(new[VARIANCE], variance), relative(grads["1.weight"], weight))
    print(f"""BatchNorm under fp.pmap: buffers in and out; statistics of shards and of one big batch.
Devices: {", ".join(map(str, fp.devices()))}; {args.rows} rows.
What is equal:
  running mean: relative difference {same:.1e}, as a mean by rows of means is the mean.
  batches counted: {new[COUNTER]} and {big[COUNTER]}; what was passed still says {buffers[COUNTER]}.
What differs, since each shard normalises with its own rows:
  running variance: relative difference {relative(new[VARIANCE], big[VARIANCE]):.1e}.
  loss: {loss:.6f} and {big_loss:.6f}.
  gradient: relative difference {relative(grads["1.weight"], big_grads["1.weight"]):.1e}.
Against the mean over shards, weighted by rows, taken by hand: relative difference {exact:.1e}.
In evaluation mode, pmap(f) against f: relative difference {law:.1e} (allowed: {TOLERANCE:.0e}).""")
    counted = int(new[COUNTER]) == int(big[COUNTER]) == 1 and int(buffers[COUNTER]) == 0
    return int(not (counted and max(same, exact, law) <= TOLERANCE))


if __name__ == "__main__":
    sys.exit(main())
