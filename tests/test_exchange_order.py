"""A backward that only some shards need is run by all, to the last exchange."""

import pytest
import torch

import funcpar as fp

D = torch.float64
W = torch.tensor([0.3, 0.7], dtype=D)
X = torch.arange(8.0, dtype=D).reshape(4, 2) / 8


def crossed(w, x):
    rank, h = fp.axis_index(), (x @ w).sum()
    a, b = fp.psum(h * h), fp.psum(h.sin())
    c1 = fp.psum(h * b if rank == 1 else h)
    c2 = fp.psum(h * a if rank == 0 else h)
    return c1 if rank == 0 else c2


def detached_elsewhere(w, x):
    h = (x @ w).sum()
    t = fp.psum(h)
    h = h + t if fp.axis_index() == 0 else h
    h = h * fp.psum(h)
    return h if fp.axis_index() == 1 else h.detach()


@pytest.mark.parametrize("fun", [crossed, detached_elsewhere])
def test_gradients_of_rank_dependent_programs_are_those_of_one_graph(fun):
    # Under torch.func all shards share one graph, whose backward needs no meeting.
    expected = torch.func.grad(fp.pmap(fun, devices=2))(W, X)
    torch.testing.assert_close(fp.pmap(fp.grad(fun), devices=2)(W, X), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fp.grad(fp.pmap(fun, devices=2))(W, X), expected, rtol=1e-12, atol=1e-12)
