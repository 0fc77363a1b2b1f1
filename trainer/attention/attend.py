"""Attention over the mesh: each device attends for its own rows, queries and heads.

With a context axis the queries stay divided. Keys and values are gathered (``all_gather``), or travel
round the ring (``ring``).

Legend: b batch, t query position, s key position, n query head, k key/value head, h head width.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from trainer.attention.masks import AttentionSpec, Places
from trainer.attention.order import balanced_order, to_natural
from trainer.attention.splash import attend_splash, make_kernel
from trainer.attention.xla import attend_here, attend_ring
from trainer.sharding import axis_size, constrain, partition_spec

_QUERIES = ("batch", "sequence", "heads", None)
_KEYS = ("batch", "sequence", "kv_heads", None)


def attend(
    q_btnh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, places: Places, spec: AttentionSpec
) -> jax.Array:
    """Softmax attention of each query over what it may see; output (b, t, n, h).

    ``n`` is a multiple of ``k`` (grouped queries). Tokens stand in balanced order over the context axis
    (:func:`trainer.attention.balanced_order`), and ``places`` says where each is.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return _attend_all(q_btnh, k_btkh, v_btkh, places, spec)
    sequence, tokens = partition_spec(("sequence",)), partition_spec(("batch", "sequence"))
    queries, keys = partition_spec(_QUERIES), partition_spec(_KEYS)
    arrays = (
        constrain(q_btnh, _QUERIES, "query"),
        constrain(k_btkh, _KEYS, "key"),
        constrain(v_btkh, _KEYS, "value"),
    )
    kernel, kernel_specs = None, None
    if spec.implementation == "splash":
        kernel, kernel_specs = _divided_kernel(q_btnh, spec)

    def local(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, *places: Any) -> jax.Array:
        return _attend_local(kernel, q, k, v, Places(*places), spec)

    sharded = jax.shard_map(
        local,
        in_specs=(
            kernel_specs,
            queries,
            keys,
            keys,
            sequence,
            None if places.segments_bt is None else tokens,
        ),
        out_specs=queries,
        check_vma=False,
    )
    out_btnh: jax.Array = sharded(kernel, *arrays, *places)
    return out_btnh


def _attend_all(
    q_btnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, places: Places, spec: AttentionSpec
) -> jax.Array:
    """On one device, all tokens in their natural order."""
    if spec.implementation != "splash":
        return attend_here(q_btnh, k_bskh, v_bskh, places, places, spec)
    order = balanced_order(q_btnh.shape[1], 1)
    kernel = make_kernel(q_btnh.shape[2], order, 1, spec)
    return attend_splash(kernel, q_btnh, k_bskh, v_bskh, places.segments_bt, places.segments_bt)


def _divided_kernel(q_btnh: jax.Array, spec: AttentionSpec) -> tuple[Any, Any]:
    num_shards = axis_size("context")
    order = balanced_order(q_btnh.shape[1], num_shards)
    kernel = make_kernel(q_btnh.shape[2] // axis_size("tensor"), order, num_shards, spec)
    divided = PartitionSpec(None, "context" if num_shards > 1 else None)
    return kernel, kernel.manual_sharding_spec(NamedSharding(jax.sharding.get_abstract_mesh(), divided))


def _attend_local(
    kernel: Any, q_btnh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, places: Places, spec: AttentionSpec
) -> jax.Array:
    """Within shard_map: the queries of this device over all keys."""
    num_shards = jax.lax.axis_size("context")
    if spec.exchange == "ring" and num_shards > 1:
        return attend_ring(q_btnh, k_btkh, v_btkh, places, spec, "context")
    k_bskh, v_bskh = _gathered(k_btkh, 1), _gathered(v_btkh, 1)
    segments_bs = None if places.segments_bt is None else _gathered(places.segments_bt, 1)
    if kernel is None:
        keys = Places(_gathered(places.positions_t, 0), segments_bs)
        return attend_here(q_btnh, k_bskh, v_bskh, places, keys, spec)
    k_bskh, v_bskh = to_natural(k_bskh, 1, num_shards), to_natural(v_bskh, 1, num_shards)
    segments_bs = None if segments_bs is None else to_natural(segments_bs, 1, num_shards)
    return attend_splash(kernel, q_btnh, k_bskh, v_bskh, places.segments_bt, segments_bs)


def _gathered(x: jax.Array, dim: int) -> jax.Array:
    if jax.lax.axis_size("context") == 1:
        return x
    gathered: jax.Array = jax.lax.all_gather(x, "context", axis=dim, tiled=True)
    return gathered
