"""A circular pipeline over the stage axis, in one program: every stage works on another microbatch.

All stages run as one vmapped function over a leading stage dimension that the stage axis divides; what
a stage hands on is a shift along that dimension. Layers are dealt out in rounds: with R rounds, S stages
and K layers a visit, layer (r * S + s) * K + k is the k-th of stage s in round r. More rounds mean a
smaller bubble, (S - 1) / (M * R + S - 1) of the time for M microbatches (arXiv:2104.04473, section 2.2).

Legend: s stage, m microbatch, r round, i iteration; bodies work on (b, t, d).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.execution import Execution
from trainer.models.layers import RESIDUAL_BTD
from trainer.models.router import RouterStats
from trainer.sharding import constrain, constrain_leading

Body = Callable[[Any, jax.Array, Any], tuple[jax.Array, RouterStats]]
"""(weights of K layers, x (b, t, d), extras of the microbatch) -> (x, stats of the K layers)."""

_STAGES_SBTD = ("stages", *RESIDUAL_BTD)
_PARTS_MBTD = (None, *RESIDUAL_BTD)


def run_pipeline(
    body: Body, weights: Any, x_btd: jax.Array, extras: Any, execution: Execution
) -> tuple[jax.Array, RouterStats]:
    """All layers over the whole batch; the stats are means over the microbatches, by layer.

    Args:
      body: a stage's layers.
      weights: stacked over layers.
      x_btd: activations of the batch, a multiple of the microbatches.
      extras: arrays with a leading batch dimension that travel with their rows; None leaves allowed.
      execution: stages, rounds and microbatches.
    """
    stages, rounds = execution.num_stages, execution.stage_rounds
    parts = execution.stage_microbatches
    dealt = jax.tree.map(lambda leaf: _dealt(leaf, rounds, stages), weights)
    x_mbtd = constrain(_split(x_btd, parts), _PARTS_MBTD, "microbatches")
    extras_m = jax.tree.map(lambda leaf: _split(leaf, parts), extras)
    stage_s = jnp.arange(stages)

    def one_stage(dealt: Any, stage: jax.Array, x_btd: jax.Array, iteration: jax.Array) -> Any:
        turn = jnp.clip(iteration - stage, 0, parts * rounds - 1)
        mine = jax.tree.map(lambda leaf: _at(leaf, turn // parts), dealt)
        return body(mine, x_btd, jax.tree.map(lambda leaf: _at(leaf, turn % parts), extras_m))

    every_stage = jax.vmap(one_stage, in_axes=(1, 0, 0, None), spmd_axis_name="stage")

    def iterate(carry: tuple[jax.Array, jax.Array], iteration: jax.Array) -> Any:
        entering_sbtd, done_mbtd = carry
        out_sbtd, stats_s = every_stage(dealt, stage_s, entering_sbtd, iteration)
        out_sbtd = constrain(out_sbtd, _STAGES_SBTD, "stage output")
        # What leaves the last stage waits in its place: for its next round, or as the result.
        leaving = jnp.maximum(iteration - (stages - 1), 0) % parts
        done_mbtd = jax.lax.dynamic_update_index_in_dim(done_mbtd, out_sbtd[-1], leaving, 0)
        done_mbtd = constrain(done_mbtd, _PARTS_MBTD, "pipeline output")
        coming = iteration + 1
        first_btd = jnp.where(coming < parts, _at(x_mbtd, coming % parts), _at(done_mbtd, coming % parts))
        entering_sbtd = jnp.concatenate([first_btd[None], out_sbtd[:-1]])
        return (constrain(entering_sbtd, _STAGES_SBTD, "stage input"), done_mbtd), stats_s

    entering_sbtd = jnp.zeros((stages, *x_mbtd.shape[1:]), x_btd.dtype).at[0].set(x_mbtd[0])
    entering_sbtd = constrain(entering_sbtd, _STAGES_SBTD, "stage input")
    iterations = jnp.arange(parts * rounds + stages - 1)
    # Places are filled with what came in: finite numbers, which nobody reads before they are replaced.
    (_, done_mbtd), stats_is = jax.lax.scan(iterate, (entering_sbtd, x_mbtd), iterations)
    rows_first = jnp.swapaxes(done_mbtd, 0, 1).reshape(x_btd.shape)
    out_btd = constrain(rows_first, RESIDUAL_BTD, "pipeline output")
    return out_btd, jax.tree.map(lambda leaf: _mean_by_layer(leaf, execution), stats_is)


def _dealt(weight: jax.Array, rounds: int, stages: int) -> jax.Array:
    """(layers, ...) -> (rounds, stages, layers of a visit, ...), the other dimensions divided as they were.

    Checkpoints keep layers in their order, so with several rounds this moves weights between stages.
    """
    shape = (rounds, stages, weight.shape[0] // (rounds * stages), *weight.shape[1:])
    return constrain_leading(weight.reshape(shape), (None, "stages", None))


def _split(x: jax.Array, parts: int) -> jax.Array:
    """Rows dealt out to microbatches such that every device keeps its own: row b is in part b % parts."""
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    out: jax.Array = jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return out


def _mean_by_layer(stats_is: jax.Array, execution: Execution) -> jax.Array:
    """(iterations, stages, layers of a visit, ...) -> (layers, ...), without what bubbles computed."""
    stages, rounds = execution.num_stages, execution.stage_rounds
    parts = execution.stage_microbatches
    r, s, m = np.meshgrid(range(rounds), range(stages), range(parts), indexing="ij")
    means_rs = jnp.mean(stats_is[r * parts + m + s, s], axis=2)
    return means_rs.reshape(-1, *means_rs.shape[3:])
