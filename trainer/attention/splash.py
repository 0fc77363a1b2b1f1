"""Splash attention, the TPU kernel that skips what the mask hides (jax.experimental.pallas.ops.tpu).

A kernel knows its mask ahead of time. With a context axis each device holds other queries, so the
kernel object travels into shard_map as data, divided like the queries.

Legend: b batch, n query head, k key/value head, t query position, s key position, h head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from trainer.attention.masks import AttentionSpec
from trainer.execution import largest_block

RESIDUAL_NAME = "attention_out"
"""Name of output and normaliser for remat policies."""


def make_kernel(num_heads: int, order_t: np.ndarray, num_shards: int, spec: AttentionSpec) -> Any:
    """The kernel of one sequence whose queries stand in ``order_t``, divided into ``num_shards``; keys in
    their natural order."""
    length = len(order_t)
    mask = _mask(length, spec.window)
    mask.q_sequence = order_t
    block = largest_block(length // num_shards, spec.chunk)
    key_block = largest_block(length, spec.chunk)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=key_block,
        block_kv_compute=key_block,
        block_q_dkv=block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=key_block,
        block_q_dq=block,
        block_kv_dq=key_block,
    )
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=num_shards,
        attn_logits_soft_cap=spec.soft_cap,
        residual_checkpoint_name=RESIDUAL_NAME,
        interpret=spec.interpret,
    )


def attend_splash(
    kernel: Any,
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    query_segments_bt: jax.Array | None,
    key_segments_bs: jax.Array | None,
) -> jax.Array:
    """Output (b, t, n, h); the kernel itself scales nothing."""
    scale = q_btnh.shape[-1] ** -0.5
    q_bnth, k_bksh, v_bksh = (
        jnp.swapaxes(x, 1, 2) for x in ((q_btnh * scale).astype(q_btnh.dtype), k_bskh, v_bskh)
    )
    if query_segments_bt is None or key_segments_bs is None:
        out_bnth = jax.vmap(kernel)(q_bnth, k_bksh, v_bksh)
    else:
        segments = kernels.SegmentIds(query_segments_bt, key_segments_bs)
        out_bnth = jax.vmap(kernel)(q_bnth, k_bksh, v_bksh, segments)
    return jnp.swapaxes(out_bnth, 1, 2)


def _mask(length: int, window: int | None) -> Any:
    if window is None:
        return masks.CausalMask((length, length))
    return masks.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
