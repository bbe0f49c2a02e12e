"""Train with BatchNorm: buffers go into ``pmap`` and come out of it, and nothing is changed in place.

``fp.functionalize_with_buffers`` makes running statistics an argument and a result. ``out_axes`` says how
those of the shards become one: ``"mean"`` is the mean weighted by rows for floats, and for the counter of
batches, an integer, it demands that all shards agree.

BatchNorm in training mode mixes the rows of a batch, so it is outside of the law ``pmap(f) == f``: each shard
normalises with the mean and variance of its own rows, as in DataParallel, and not with those of the whole
batch. This script shows what that leaves equal and what differs. To have the statistics of one big batch
under pmap they would have to be synchronised between the shards.

    python examples/batch_statistics.py
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn

import funcpar as fp


def relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


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

    print("BatchNorm under fp.pmap: buffers in and out, statistics of shards against those of one big batch.")
    print(f"Devices: {', '.join(map(str, fp.devices()))}; {args.rows} rows.")
    mean, var, count = (f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))
    same = relative(new[mean], big[mean])
    print("What is equal:")
    print(f"  running mean: relative difference {same:.1e}; a mean by rows of means is the mean.")
    print(f"  batches counted: {new[count]} and {big[count]}; before the call, and still: {buffers[count]}.")
    print("What differs, since each shard normalises with its own rows:")
    print(f"  running variance: relative difference {relative(new[var], big[var]):.1e}.")
    print(f"  loss: {loss:.6f} and {big_loss:.6f}.")
    print(f"  gradient: relative difference {relative(grads['1.weight'], big_grads['1.weight']):.1e}.")

    # The same by hand, one shard after another: this is what the mapped call promises.
    parts = list(zip(x.tensor_split(args.devices), y.tensor_split(args.devices), strict=True))
    shards = [(len(xs) / len(x), gradient(params, buffers, xs, ys)) for xs, ys in parts]
    expected = sum(share * aux[var] for share, ((_, aux), _) in shards)
    expected_grad = sum(share * shard_grads["1.weight"] for share, (_, shard_grads) in shards)
    exact = max(relative(new[var], expected), relative(grads["1.weight"], expected_grad))
    print(f"Against the weighted mean over shards, by hand: relative difference {exact:.1e}.")

    # In evaluation nothing mixes the rows, and the law holds again.
    model.eval()
    evaluate = fp.pmap(lambda params, buffers, x: apply(params, buffers, x)[0], in_axes=(None, None, 0))
    law = relative(evaluate(params, new, x), apply(params, new, x)[0])
    print(f"In evaluation mode, pmap(f) against f: relative difference {law:.1e}.")

    counted = int(new[count]) == int(big[count]) == 1 and int(buffers[count]) == 0
    return int(not (counted and max(same, exact, law) <= 1e-12))


if __name__ == "__main__":
    sys.exit(main())
