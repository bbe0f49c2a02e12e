"""The composite programs of the golden data, in torch with funcpar's collectives.

Each takes its inputs as JAX's source does (the mapped axis removed), its parameters by keyword, and
``grad``, which takes gradients inside or outside: ``fp.grad`` or ``torch.func.grad``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import funcpar as fp
from funcpar import tree

Outputs = dict[str, Tensor]
Grad = Callable[..., Any]


def sync_batchnorm(x: Tensor, gamma: Tensor, beta: Tensor, *, eps: float, grad: Grad) -> Outputs:
    mean = fp.pmean(x.mean(0), "i")
    var = fp.pmean(((x - mean) ** 2).mean(0), "i")
    return {"y": (x - mean) / (var + eps).sqrt() * gamma + beta, "mean": mean, "var": var}


def global_softmax(x: Tensor, *, grad: Grad) -> Outputs:
    largest = fp.pmax(x.detach().amax(-1, keepdim=True), "i")
    e = (x - largest).exp()
    return {"y": e / fp.psum(e.sum(-1, keepdim=True), "i")}


def halo_rule30(cells: Tensor, *, steps: int, boundary: str, grad: Grad) -> Outputs:
    n = fp.psum(1, "i")
    to_right, to_left = [(j, j + 1) for j in range(n - 1)], [(j + 1, j) for j in range(n - 1)]
    if boundary == "periodic":
        to_right, to_left = _ring(n), [(j, (j - 1) % n) for j in range(n)]
    history = [cells]
    for _ in range(steps):
        from_left = fp.ppermute(cells[-1:], "i", to_right)
        from_right = fp.ppermute(cells[:1], "i", to_left)
        row = torch.cat([from_left, cells, from_right])
        cells = row[:-2] ^ (row[1:-1] | row[2:])
        history.append(cells)
    return {"history": torch.stack(history)}


def ring_attention_like(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, grad: Grad) -> Outputs:
    n, me = fp.axis_size("i"), fp.axis_index("i")
    t, d = q.shape
    largest, total = torch.full((t,), -torch.inf, dtype=q.dtype), torch.zeros(t, dtype=q.dtype)
    acc = torch.zeros(t, d, dtype=q.dtype)
    for r in range(n):
        owner = (me - r) % n
        scores = q @ k.T / d**0.5
        if causal:
            keep = (owner * t + torch.arange(t))[None] <= (me * t + torch.arange(t))[:, None]
            scores = torch.where(keep, scores, -torch.inf)
        new = torch.maximum(largest, scores.detach().amax(1))
        p, shrink = (scores - new[:, None]).exp(), (largest - new).exp()
        total, acc, largest = total * shrink + p.sum(1), acc * shrink[:, None] + p @ v, new
        k, v = fp.ppermute((k, v), "i", _ring(n))
    return {"out": acc / total[:, None]}


def grad_inside_psum_sq(x: Tensor, *, grad: Grad) -> Outputs:
    return {"g": grad(lambda a: fp.psum((a**2).sum(), "i"))(x)}


def grad_inside_pmean_sq(x: Tensor, *, grad: Grad) -> Outputs:
    return {"g": grad(lambda a: fp.pmean((a**2).sum(), "i"))(x)}


def grad_inside_pmean_replicated_w(w: Tensor, a: Tensor, *, grad: Grad) -> Outputs:
    return {"g": grad(lambda w: fp.pmean(w * a.sum(), "i"))(w)}


def local_loss_then_pmean_grads(w: Tensor, a: Tensor, *, grad: Grad) -> Outputs:
    return {"g": fp.pmean(grad(lambda w: w * a.sum())(w), "i")}


def second_order_inside(x: Tensor, *, grad: Grad) -> Outputs:
    return {"h": grad(grad(lambda a: fp.psum(a**3, "i")))(x)}


def grad_outside_mean_replicated_w(w: Tensor, a: Tensor, *, grad: Grad) -> Outputs:
    products = fp.pmap(lambda w, a: w * a, "i", in_axes=(None, 0), out_axes=0)

    def loss(w: Tensor) -> Tensor:
        return products(w, a).mean()

    return {"loss": loss(w), "g": grad(loss)(w)}


def grad_outside_sum_psum_sq(x: Tensor, *, grad: Grad) -> Outputs:
    summed = fp.pmap(lambda a: fp.psum((a**2).sum(), "i")[None], "i", in_axes=0, out_axes=0)
    return {"g": grad(lambda x: summed(x).sum())(x)}


def grad_outside_noncyclic_ppermute(x: Tensor, y: Tensor, *, grad: Grad) -> Outputs:
    pairs = [(j, j + 1) for j in range(len(x) - 1)]
    shift = fp.pmap(lambda a: fp.ppermute(a, "i", pairs), "i", in_axes=0, out_axes=0)
    return {"g": grad(lambda x: y @ shift(x))(x)}


def grad_inside_all_gather_weighted(x: Tensor, *, grad: Grad) -> Outputs:
    weights = torch.arange(1.0, fp.axis_size("i") + 1)
    return {"g": grad(lambda a: (fp.all_gather(a, "i") * weights).sum())(x)}


def grad_inside_psum_scatter_index(x: Tensor, *, grad: Grad) -> Outputs:
    return {"g": grad(lambda a: fp.psum_scatter(a, "i") * (fp.axis_index("i") + 1.0))(x)}


def jvp_inside_psum_sq(x: Tensor, t: Tensor, *, grad: Grad) -> Outputs:
    y, dy = torch.func.jvp(lambda a: fp.psum((a**2).sum(), "i"), (x,), (t,))
    return {"y": y, "dy": dy}


def ring_allreduce(x: Tensor, *, grad: Grad) -> Outputs:
    n = fp.axis_size("i")
    block = total = x
    for _ in range(n - 1):
        block = fp.ppermute(block, "i", _ring(n))
        total = total + block
    return {"total": total}


def axis_index_scaled_psum(x: Tensor, *, grad: Grad) -> Outputs:
    mine = (fp.axis_index("i") + 1) * x
    total = fp.psum(mine, "i")
    return {"total": total, "share": mine / total}


def mapped_axes_arith(a: Tensor, b: Tensor, c: Tensor, *, grad: Grad) -> Outputs:
    return {"s": (a + b).sin() + c, "d": b - fp.psum(a, "i")}


def mlp_train(
    x: Tensor, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, steps: int, lr: float, grad: Grad
) -> Outputs:
    def local_loss(p: Outputs, x: Tensor, y: Tensor) -> Tensor:
        return (((x[0] @ p["w1"] + p["b1"]).tanh() @ p["w2"] + p["b2"] - y[0]) ** 2).mean()

    def step(p: Outputs, x: Tensor, y: Tensor) -> tuple[Tensor, Outputs]:
        loss, g = fp.pmean((local_loss(p, x, y), grad(local_loss)(p, x, y)), "i")
        return loss, tree.map(lambda leaf, slope: leaf - lr * slope, p, g)

    run = fp.pmap(step, "i", in_axes=(None, 0, 0), out_axes=None)
    p, losses = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}, []
    for _ in range(steps):
        loss, p = run(p, x, y)
        losses.append(loss)
    final = fp.pmap(lambda *args: fp.pmean(local_loss(*args), "i"), "i", out_axes=None)(p, x, y)
    return {"losses": torch.stack(losses), "final_loss": final, **p}


def _ring(n: int) -> list[tuple[int, int]]:
    return [(j, (j + 1) % n) for j in range(n)]
