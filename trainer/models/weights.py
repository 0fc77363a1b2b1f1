"""How weight matrices are made and multiplied: named dimensions, variance by fan-in, compute dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.quantization import einsum_options
from trainer.sharding import LogicalAxes, einsum, use


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: LogicalAxes, *, fan_in: int, scale: float = 1.0
) -> nnx.Param[jax.Array]:
    """A float32 matrix, truncated normal with standard deviation ``scale / sqrt(fan_in)``.

    ``axes`` names each dimension as in :mod:`trainer.sharding`.
    """
    init = nnx.initializers.truncated_normal(stddev=scale / fan_in**0.5)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), out_sharding=tuple(axes), eager_sharding=False)


def residual_scale(config: ModelConfig) -> float:
    """Keeps the residual stream's variance independent of depth (two additions a layer)."""
    return float((2 * config.num_layers) ** -0.5)


def project(
    config: ModelConfig,
    subscripts: str,
    x: jax.Array,
    matrix: nnx.Param[jax.Array],
    axes: LogicalAxes,
    out_axes: LogicalAxes,
    name: str,
) -> jax.Array:
    """``x`` times a weight with the logical ``axes``, in the recipe's precision; ``name`` is for errors."""
    y = use(matrix[...], axes, x.dtype)
    return einsum(subscripts, x, y, out_axes, name=name, **einsum_options(config.quantization))
