"""Attention in plain XLA on the rows of one device: whole, by chunks of queries, and around a ring.

Softmax is kept as a sum of weighted values with its running maximum and normaliser, so parts over
different keys can be added (arXiv:2112.05682).

Legend: b batch, t query position, s key position, n query head, k key/value head, g query head of
one key/value head, h head width, c chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.attention.masks import AttentionSpec, Places, may_attend
from trainer.sharding import pass_on

_MASKED = -1e30
"""A score of what may not be seen; finite, so that rows without any visible key stay finite."""


class _Part(NamedTuple):
    """Attention over some of the keys, not yet normalised; float32."""

    sum_btnh: jax.Array
    maximum_btn: jax.Array
    normaliser_btn: jax.Array


class _Keys(NamedTuple):
    key_bskh: jax.Array
    value_bskh: jax.Array
    places: Places


def attend_here(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    queries: Places,
    keys: Places,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention of these queries over all keys; output (b, t, n, h) in the queries' dtype."""
    part = _attend(q_btnh, _Keys(k_bskh, v_bskh, keys), queries, spec)
    return _normalised(part, q_btnh.dtype)


def attend_ring(
    q_btnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, places: Places, spec: AttentionSpec, axis: str
) -> jax.Array:
    """The same within shard_map, where each device of ``axis`` holds a part of the keys.

    Keys and values travel once round the ring while the queries stay (arXiv:2310.01889).
    """

    def turn(carry: tuple[_Part, _Keys], _: None) -> tuple[tuple[_Part, _Keys], None]:
        part, keys = carry
        # Asked for before the keys are used, so that the exchange runs beside the arithmetic.
        arriving = pass_on(keys, axis)
        part = _added(part, _attend(q_btnh, keys, places, spec))
        return (part, arriving), None

    keys = _Keys(k_bskh, v_bskh, places)
    # Its own keys come first: every query sees itself there, so its maximum is a real score.
    first = _attend(q_btnh, keys, places, spec)
    num_turns = jax.lax.axis_size(axis) - 1
    (part, _), _ = jax.lax.scan(jax.checkpoint(turn), (first, pass_on(keys, axis)), None, length=num_turns)
    return _normalised(part, q_btnh.dtype)


def _attend(q_btnh: jax.Array, keys: _Keys, queries: Places, spec: AttentionSpec) -> _Part:
    length = q_btnh.shape[1]
    if spec.implementation != "xla_chunked" or spec.chunk >= length:
        return _attend_whole(q_btnh, keys, queries, spec)
    num_chunks = length // spec.chunk

    # The backward pass recomputes each chunk's scores, or it would hold them all.
    @jax.checkpoint
    def one(chunk: tuple[jax.Array, Places]) -> _Part:
        return _attend_whole(chunk[0], keys, chunk[1], spec)

    def split(x: jax.Array, dim: int) -> jax.Array:
        shape = (*x.shape[:dim], num_chunks, spec.chunk, *x.shape[dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    segments_bt = queries.segments_bt
    chunks = Places(split(queries.positions_t, 0), None if segments_bt is None else split(segments_bt, 1))
    parts = jax.lax.map(one, (split(q_btnh, 1), chunks))
    return _Part(*(_joined(leaf, length) for leaf in parts))


def _joined(part_cbt: jax.Array, length: int) -> jax.Array:
    part_bct = jnp.moveaxis(part_cbt, 0, 1)
    return part_bct.reshape(part_bct.shape[0], length, *part_bct.shape[3:])


def _attend_whole(q_btnh: jax.Array, keys: _Keys, queries: Places, spec: AttentionSpec) -> _Part:
    b, t, n, h = q_btnh.shape
    k = keys.key_bskh.shape[2]
    q_btkgh = q_btnh.reshape(b, t, k, n // k, h)
    scores_btkgs = jnp.einsum(
        "btkgh,bskh->btkgs", q_btkgh, keys.key_bskh, preferred_element_type=jnp.float32
    ) * (h**-0.5)
    if spec.soft_cap is not None:
        scores_btkgs = spec.soft_cap * jnp.tanh(scores_btkgs / spec.soft_cap)
    allowed_bts = may_attend(queries, keys.places, spec.window)
    scores_btkgs = jnp.where(allowed_bts[:, :, None, None, :], scores_btkgs, _MASKED)
    # The result does not depend on the maximum, only its range does.
    maximum_btkg = jax.lax.stop_gradient(jnp.max(scores_btkgs, axis=-1))
    weights_btkgs = jnp.exp(scores_btkgs - maximum_btkg[..., None])
    sum_btkgh = jnp.einsum(
        "btkgs,bskh->btkgh",
        weights_btkgs.astype(keys.value_bskh.dtype),
        keys.value_bskh,
        preferred_element_type=jnp.float32,
    )
    normaliser_btkg = jnp.sum(weights_btkgs, axis=-1)
    return _Part(
        sum_btkgh.reshape(b, t, n, h), maximum_btkg.reshape(b, t, n), normaliser_btkg.reshape(b, t, n)
    )


def _added(left: _Part, right: _Part) -> _Part:
    maximum_btn = jnp.maximum(left.maximum_btn, right.maximum_btn)
    scale_left_btn = jnp.exp(left.maximum_btn - maximum_btn)
    scale_right_btn = jnp.exp(right.maximum_btn - maximum_btn)
    return _Part(
        left.sum_btnh * scale_left_btn[..., None] + right.sum_btnh * scale_right_btn[..., None],
        maximum_btn,
        left.normaliser_btn * scale_left_btn + right.normaliser_btn * scale_right_btn,
    )


def _normalised(part: _Part, dtype: jax.typing.DTypeLike) -> jax.Array:
    return (part.sum_btnh / part.normaliser_btn[..., None]).astype(dtype)
