"""How weight matrices are made: float32, named dimensions, variance by fan-in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.sharding import LogicalAxes


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
