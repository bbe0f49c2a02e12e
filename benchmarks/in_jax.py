"""The same networks in JAX, and a pmapped step of them. Only a contender's own process imports this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.contenders import Place, Step
from benchmarks.models import NUM_HEADS, Model

Params: TypeAlias = Mapping[str, jax.Array]
Network: TypeAlias = Callable[[Params, jax.Array], jax.Array]

AXIS = "shards"


def pmap_step(model: Model, place: Place) -> Step:
    """Return a step of ``jax.pmap(jax.value_and_grad(loss))`` with a mean over shards, compiled as a whole.

    Parameters and batch lie on the devices beforehand, where a training loop in JAX keeps them.
    """
    module, (inputs, labels) = model.module(), model.batch(model.rows)
    own = {name: param.detach().numpy() for name, param in module.named_parameters()}
    stack = functools.partial(np.stack, axis=0)
    put = jax.pmap(lambda tree: tree)
    params = put({name: stack([value] * place.devices) for name, value in own.items()})
    batch = put(tuple(stack(np.split(each.numpy(), place.devices)) for each in (inputs, labels)))
    gradient = jax.pmap(
        functools.partial(_mean_gradient, NETWORKS[model.name]), axis_name=AXIS, out_axes=None
    )

    def step() -> tuple[Any, list[Any]]:
        loss, grads = jax.block_until_ready(gradient(params, *batch))
        return loss, [grads[name] for name in own]

    return step


def _mean_gradient(network: Network, params: Params, inputs: jax.Array, labels: jax.Array) -> Any:
    return lax.pmean(jax.value_and_grad(functools.partial(_loss, network))(params, inputs, labels), AXIS)


def _loss(network: Network, params: Params, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(network(params, inputs))
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _mlp(params: Params, x: jax.Array) -> jax.Array:
    *inner, last = sorted({int(name.partition(".")[0]) for name in params})
    for layer in inner:
        x = jax.nn.relu(_linear(params, str(layer), x))
    return _linear(params, str(last), x)


def _cnn(params: Params, x: jax.Array) -> jax.Array:
    for layer in ("0", "3"):
        x = lax.conv_general_dilated(x, params[f"{layer}.weight"], (1, 1), "SAME")
        x = jax.nn.relu(x + params[f"{layer}.bias"][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return _linear(params, "7", x.reshape(len(x), -1))


def _transformer(params: Params, x: jax.Array) -> jax.Array:
    num_layers = 1 + max(int(name.split(".")[2]) for name in params if name.startswith("encoder"))
    for layer in range(num_layers):
        name = f"encoder.layers.{layer}"
        x = _normalized(params, f"{name}.norm1", x + _attention(params, f"{name}.self_attn", x))
        inner = jax.nn.relu(_linear(params, f"{name}.linear1", x))
        x = _normalized(params, f"{name}.norm2", x + _linear(params, f"{name}.linear2", inner))
    return _linear(params, "head", x.mean(1))


def _attention(params: Params, name: str, x: jax.Array) -> jax.Array:
    rows, length, width = x.shape
    joined = x @ params[f"{name}.in_proj_weight"].T + params[f"{name}.in_proj_bias"]
    query, key, value = joined.reshape(rows, length, 3, NUM_HEADS, -1).transpose(2, 0, 3, 1, 4)
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1], dtype=np.float32)
    mixed = (jax.nn.softmax(scores) @ value).transpose(0, 2, 1, 3).reshape(rows, length, width)
    return _linear(params, f"{name}.out_proj", mixed)


def _normalized(params: Params, name: str, x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return centered * scale * params[f"{name}.weight"] + params[f"{name}.bias"]


NETWORKS: dict[str, Network] = {"mlp": _mlp, "wide_mlp": _mlp, "cnn": _cnn, "transformer": _transformer}
