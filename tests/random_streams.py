"""Families of random ops, and threads that play shards, for the tests of random streams."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from funcpar import _random
from funcpar._random import Streams, use

LIMIT = 60.0
ROWS = torch.linspace(0.1, 0.9, 24).reshape(4, 6)
COUNTS = torch.full((4, 6), 9.0)


def attend() -> torch.Tensor:
    query = ROWS.reshape(1, 2, 3, 4)
    return functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def attend_many() -> torch.Tensor:
    return nn.MultiheadAttention(6, 2, dropout=0.5)(ROWS, ROWS, ROWS)[0].detach()


def recurrent(kind: type[nn.RNNBase]) -> torch.Tensor:
    return kind(6, 5, num_layers=2, dropout=0.5)(ROWS[None])[0].detach()


FAMILIES: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(8),
    "rand_like": lambda: torch.rand_like(ROWS),
    "randn": lambda: torch.randn(20),
    "randint": lambda: torch.randint(0, 1 << 30, (8,)),
    "randint_like": lambda: torch.randint_like(ROWS, 1 << 20),
    "randperm": lambda: torch.randperm(40),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "normal_": lambda: torch.empty(8).normal_(),
    "normal floats": lambda: torch.normal(0.0, 1.0, (8,)),
    "normal mean": lambda: torch.normal(ROWS, 1.0),
    "normal std": lambda: torch.normal(0.0, ROWS),
    "normal both": lambda: torch.normal(ROWS, ROWS),
    "normal out": lambda: torch.normal(ROWS, ROWS, out=torch.empty(4, 6)),
    "random_": lambda: torch.empty(8, dtype=torch.int64).random_(),
    "random_ to": lambda: torch.empty(8).random_(1 << 20),
    "random_ from": lambda: torch.empty(8).random_(5, 1 << 20),
    "cauchy_": lambda: torch.empty(8).cauchy_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "geometric_": lambda: torch.empty(40).geometric_(0.1),
    "log_normal_": lambda: torch.empty(8).log_normal_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((80,), 0.5)),
    "bernoulli p": lambda: torch.bernoulli(torch.empty(80), 0.5),
    "bernoulli_ tensor": lambda: torch.empty(80).bernoulli_(torch.full((80,), 0.5)),
    "bernoulli out": lambda: torch.bernoulli(torch.full((80,), 0.5), out=torch.empty(80)),
    "multinomial": lambda: torch.multinomial(torch.ones(4, 50), 9),
    "multinomial replacement": lambda: torch.multinomial(torch.ones(4, 50), 9, replacement=True),
    "poisson": lambda: torch.poisson(100 * torch.ones(20)),
    "binomial": lambda: torch.binomial(100 * torch.ones(20), torch.full((20,), 0.5)),
    "gamma": lambda: torch._standard_gamma(COUNTS),
    "dirichlet": lambda: torch._sample_dirichlet(COUNTS),
    "rrelu": lambda: functional.rrelu(-COUNTS, training=True),
    "rrelu_": lambda: functional.rrelu(-COUNTS, training=True, inplace=True),
    "dropout": lambda: functional.dropout(torch.ones(80)),
    "dropout_": lambda: functional.dropout(torch.ones(80), inplace=True),
    "dropout2d": lambda: functional.dropout2d(torch.ones(4, 20, 1, 1)),
    "alpha_dropout": lambda: functional.alpha_dropout(torch.ones(80), training=True),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(torch.ones(4, 20, 2), training=True),
    "native_dropout": lambda: torch.native_dropout(torch.ones(80), 0.5, True)[0],
    "attention": attend,
    "multihead attention": attend_many,
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "gumbel_softmax": lambda: functional.gumbel_softmax(ROWS),
    "fractional_max_pool": lambda: functional.fractional_max_pool2d(
        torch.arange(900.0).reshape(1, 1, 30, 30), 2, output_size=11
    ),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "distribution": lambda: torch.distributions.Beta(ROWS, ROWS).sample(),
    "int seed": lambda: torch.tensor([float(torch.initial_seed() % 9973), float(torch.rand(()))]),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    _random.install()
    torch.manual_seed(20)


def in_threads(funs: list[Callable[[], Any]]) -> list[Any]:
    """Run all at the same time, one thread each, and return the results in order."""
    results: list[Any] = [None] * len(funs)
    start = threading.Barrier(len(funs))

    def work(rank: int) -> None:
        try:
            start.wait(LIMIT)
            results[rank] = funs[rank]()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(funs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def on_shards(fun: Callable[[], Any], size: int = 2) -> list[Any]:
    """Run `fun` on `size` shards, as a call of funcpar does."""
    streams = Streams()

    def shard(rank: int) -> Any:
        with use(streams[rank]):
            return fun()

    return in_threads([lambda rank=rank: shard(rank) for rank in range(size)])


def state() -> torch.Tensor:
    return torch.default_generator.get_state()


def after_one_draw() -> torch.Tensor:
    """The default generator's state, had one int64 been drawn from it."""
    copy = torch.default_generator.clone_state()
    torch.empty((), dtype=torch.int64).random_(generator=copy)
    return copy.get_state()
