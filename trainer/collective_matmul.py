"""Matmuls over the tensor axis that exchange shards while they multiply, by shard_map.

XLA decomposes such pairs itself where it expects a gain; where it does not, this does it by hand: each
device multiplies the shard that it holds while the next one arrives (arXiv:2105.04663, section 3.4;
Wang et al., ASPLOS 2023).

Legend: b batch, t position, d embed, f width that is divided over tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from trainer.sharding import constrain, partition_spec, pass_on

_AXIS = "tensor"
_SPLIT = ("batch", "split_sequence", None)
_HIDDEN = ("batch", "sequence", "mlp")
_COLUMNS = (None, "mlp")
_ROWS = ("mlp", None)


def gather_matmul(x_btd: jax.Array, matrices_df: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """All of the sequence times each matrix, (b, t, f) divided over f; ``x_btd`` is divided over t."""
    columns, hidden = partition_spec(_COLUMNS), partition_spec(_HIDDEN)
    sharded = jax.shard_map(
        _gather_local,
        in_specs=(partition_spec(_SPLIT), tuple(columns for _ in matrices_df)),
        out_specs=tuple(hidden for _ in matrices_df),
        check_vma=False,
    )
    x_btd = constrain(x_btd, _SPLIT, "collective matmul input")
    outputs: Sequence[jax.Array] = sharded(x_btd, tuple(matrices_df))
    return outputs


def matmul_scatter(hidden_btf: jax.Array, matrix_fd: jax.Array) -> jax.Array:
    """``hidden_btf``, divided over f, times the matrix; (b, t, d) divided over t."""
    sharded = jax.shard_map(
        _scatter_local,
        in_specs=(partition_spec(_HIDDEN), partition_spec(_ROWS)),
        out_specs=partition_spec(_SPLIT),
        check_vma=False,
    )
    out_btd: jax.Array = sharded(hidden_btf, matrix_fd)
    return out_btd


def _gather_local(x_btd: jax.Array, matrices_df: Sequence[jax.Array]) -> Sequence[jax.Array]:
    num_shards, rank = jax.lax.axis_size(_AXIS), jax.lax.axis_index(_AXIS)
    length = x_btd.shape[1]
    outputs = [jnp.zeros((x_btd.shape[0], length * num_shards, m.shape[1]), x_btd.dtype) for m in matrices_df]
    for turn in range(num_shards):
        arriving = pass_on(x_btd, _AXIS)
        start = (rank - turn) % num_shards * length
        outputs = [
            jax.lax.dynamic_update_slice_in_dim(out, x_btd @ matrix_df, start, axis=1)
            for out, matrix_df in zip(outputs, matrices_df, strict=True)
        ]
        x_btd = arriving
    return tuple(outputs)


def _scatter_local(hidden_btf: jax.Array, matrix_fd: jax.Array) -> jax.Array:
    num_shards, rank = jax.lax.axis_size(_AXIS), jax.lax.axis_index(_AXIS)
    length = hidden_btf.shape[1] // num_shards

    def product(turn: int) -> jax.Array:
        """Of the part of the sequence whose sum leaves here ``turn`` hops before it is complete."""
        start = (rank + num_shards - 1 - turn) % num_shards * length
        return jax.lax.dynamic_slice_in_dim(hidden_btf, start, length, axis=1) @ matrix_fd

    total_btd = product(0)
    for turn in range(1, num_shards):
        total_btd = pass_on(total_btd, _AXIS) + product(turn)
    return total_btd
