"""The order of a sequence over the context axis, such that causal attention costs every device the same.

Device i of n holds chunks i and 2n-1-i of 2n: one early, with little to look back on, one late.
The order is known to RoPE and to masks by position; the loss is a mean, which does not care.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def balanced_order(length: int, num_shards: int) -> np.ndarray:
    """int32 (length,): the natural position of each place of the divided sequence.

    ``length`` is a multiple of ``2 * num_shards``, unless there is one shard.
    """
    chunks = np.arange(length, dtype=np.int32).reshape(_num_chunks(num_shards), -1)
    order: np.ndarray = chunks[_chunk_order(num_shards)].reshape(-1)
    return order


def to_balanced(x: jax.Array, dim: int, num_shards: int) -> jax.Array:
    """Puts the natural order of dimension ``dim`` into the balanced one."""
    return _reorder(x, dim, _chunk_order(num_shards))


def to_natural(x: jax.Array, dim: int, num_shards: int) -> jax.Array:
    """Undoes :func:`to_balanced`."""
    return _reorder(x, dim, np.argsort(_chunk_order(num_shards)))


def _num_chunks(num_shards: int) -> int:
    return 1 if num_shards == 1 else 2 * num_shards


def _chunk_order(num_shards: int) -> np.ndarray:
    if num_shards == 1:
        return np.zeros(1, np.int32)
    shard = np.arange(num_shards)
    order: np.ndarray = np.stack([shard, 2 * num_shards - 1 - shard], axis=1).reshape(-1)
    return order


def _reorder(x: jax.Array, dim: int, order: np.ndarray) -> jax.Array:
    if len(order) == 1:
        return x
    # Whole chunks are moved: a gather of single rows is slow on a TPU.
    chunks = jnp.split(x, len(order), axis=dim)
    return jnp.concatenate([chunks[place] for place in order], axis=dim)
