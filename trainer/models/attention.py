"""Causal attention by name. Every implementation computes the same function.

Legend: b batch, t query position, s key position, n query head, k key/value head, h head width.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp


def attend(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    *,
    implementation: Literal["xla", "xla_chunked"],
    chunk: int,
) -> jax.Array:
    """Softmax attention of each query over the keys at or before it; output (b, t, n, h).

    ``n`` is a multiple of ``k`` (grouped queries). ``chunk`` bounds the score matrix of
    ``xla_chunked`` to (b, n, chunk, s); it divides ``t`` or is no smaller.
    """
    if implementation == "xla" or chunk >= q_btnh.shape[1]:
        return _attend_from(q_btnh, k_bskh, v_bskh, jnp.int32(0))
    num_chunks = q_btnh.shape[1] // chunk
    b, _, n, h = q_btnh.shape
    chunks_cbtnh = jnp.moveaxis(q_btnh.reshape(b, num_chunks, chunk, n, h), 1, 0)

    # The backward pass recomputes each chunk's scores, or it would hold them all.
    @jax.checkpoint
    def one(chunk_btnh: jax.Array, start: jax.Array) -> jax.Array:
        return _attend_from(chunk_btnh, k_bskh, v_bskh, start)

    starts_c = jnp.arange(num_chunks, dtype=jnp.int32) * chunk
    out_cbtnh = jax.lax.map(lambda pair: one(*pair), (chunks_cbtnh, starts_c))
    return jnp.moveaxis(out_cbtnh, 0, 1).reshape(q_btnh.shape)


def _attend_from(q_btnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, start: jax.Array) -> jax.Array:
    """Attention of queries at positions ``start``, ``start + 1`` ...; scores in float32."""
    t, s = q_btnh.shape[1], k_bskh.shape[1]
    mask_ts = (start + jnp.arange(t))[:, None] >= jnp.arange(s)[None, :]
    return jax.nn.dot_product_attention(
        q_btnh, k_bskh, v_bskh, mask=mask_ts[None, None], implementation="xla"
    )
