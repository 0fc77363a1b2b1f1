"""Decoder of the Llama family in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Weights are float32 and cast to ``compute_dtype`` where they are used. The blocks are one stacked
module scanned over its layers, so compile time does not grow with depth.

Legend of dimensions: b batch, t query position, s key position, d embed, n query head, k key/value
head, h head width, f MLP width, v vocabulary, e expert, l layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.models.attention import attend
from trainer.models.moe import Experts
from trainer.models.weights import residual_scale, weight
from trainer.sharding import constrain

RematPolicy = Literal["none", "minimal", "full"]

_ACTIVATION_BTD = ("batch", "sequence", None)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 with a learned scale."""

    def __init__(self, dim: int, epsilon: float) -> None:
        self.scale_d = nnx.Param(jnp.ones((dim,), jnp.float32), out_sharding=("norm",), eager_sharding=False)
        self.epsilon = epsilon

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        x32_btd = x_btd.astype(jnp.float32)
        mean_square_bt1 = jnp.mean(jnp.square(x32_btd), axis=-1, keepdims=True)
        normal_btd = x32_btd * jax.lax.rsqrt(mean_square_bt1 + self.epsilon)
        return (normal_btd * self.scale_d[...]).astype(x_btd.dtype)


def rope(x_btnh: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding by halves (arXiv:2104.09864, in the layout of Llama)."""
    half = x_btnh.shape[-1] // 2
    frequency_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_th = jnp.arange(x_btnh.shape[1], dtype=jnp.float32)[:, None] * frequency_h
    cos, sin = jnp.cos(angle_th)[None, :, None, :], jnp.sin(angle_th)[None, :, None, :]
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        d, n, k, h = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.q_dnh = weight(rngs, (d, n, h), ("embed", "heads", "head_dim"), fan_in=d)
        self.k_dkh = weight(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), fan_in=d)
        self.v_dkh = weight(rngs, (d, k, h), ("embed", "kv_heads", "head_dim"), fan_in=d)
        self.o_nhd = weight(
            rngs, (n, h, d), ("heads", "head_dim", "embed"), fan_in=n * h, scale=residual_scale(config)
        )

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        config, dtype = self.config, x_btd.dtype
        q_btnh = jnp.einsum("btd,dnh->btnh", x_btd, self.q_dnh[...].astype(dtype))
        k_bskh = jnp.einsum("bsd,dkh->bskh", x_btd, self.k_dkh[...].astype(dtype))
        v_bskh = jnp.einsum("bsd,dkh->bskh", x_btd, self.v_dkh[...].astype(dtype))
        q_btnh = constrain(rope(q_btnh, config.rope_theta), ("batch", "sequence", "heads", None))
        # Keys and values whole in the sequence: with a context axis this is the all-gather form.
        k_bskh = constrain(rope(k_bskh, config.rope_theta), ("batch", None, "kv_heads", None))
        v_bskh = constrain(v_bskh, ("batch", None, "kv_heads", None))
        out_btnh = attend(
            q_btnh, k_bskh, v_bskh, implementation=config.attention, chunk=config.attention_chunk
        )
        return jnp.einsum("btnh,nhd->btd", out_btnh, self.o_nhd[...].astype(dtype))


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        d, f = config.embed_dim, config.mlp_dim
        self.gate_df = weight(rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.up_df = weight(rngs, (d, f), ("embed", "mlp"), fan_in=d)
        self.down_fd = weight(rngs, (f, d), ("mlp", "embed"), fan_in=f, scale=residual_scale(config))

    def __call__(self, x_btd: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output and the router loss, which a dense MLP does not have (0)."""
        dtype = x_btd.dtype
        gate_btf = jnp.einsum("btd,df->btf", x_btd, self.gate_df[...].astype(dtype))
        up_btf = jnp.einsum("btd,df->btf", x_btd, self.up_df[...].astype(dtype))
        hidden_btf = constrain(nnx.silu(gate_btf) * up_btf, ("batch", "sequence", "mlp"))
        return jnp.einsum("btf,fd->btd", hidden_btf, self.down_fd[...].astype(dtype)), jnp.float32(0)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.dropout_rate = config.dropout_rate
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_epsilon)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_epsilon)
        mlp = Experts if config.num_experts > 1 else Mlp
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_btd: jax.Array, dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        attended_btd = self.attention(self.attention_norm(x_btd))
        x_btd = constrain(x_btd + self._dropout(attended_btd, keys[0]), _ACTIVATION_BTD)
        mixed_btd, router_loss = self.mlp(self.mlp_norm(x_btd))
        x_btd = constrain(x_btd + self._dropout(mixed_btd, keys[1]), _ACTIVATION_BTD)
        return x_btd, router_loss

    def _dropout(self, x_btd: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None:
            return x_btd
        keep = jax.random.bernoulli(key, 1 - self.dropout_rate, x_btd.shape)
        return jnp.where(keep, x_btd / (1 - self.dropout_rate), 0).astype(x_btd.dtype)


class Decoder(nnx.Module):
    """Tokens -> logits."""

    def __init__(self, config: ModelConfig, remat_policy: RematPolicy, *, rngs: nnx.Rngs) -> None:
        v, d = config.vocab_size, config.embed_dim
        self.config, self.remat_policy = config, remat_policy
        self.embedding_vd = weight(rngs, (v, d), ("vocab", "embed"), fan_in=d)
        self.blocks = _stacked_blocks(config, rngs)
        self.final_norm = RMSNorm(d, config.norm_epsilon)
        if not config.tie_embeddings:
            self.output_dv = weight(rngs, (d, v), ("embed", "vocab"), fan_in=d)

    def __call__(
        self, tokens_bt: jax.Array, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Logits (b, t, v) in float32 and the mean router loss over the layers (scalar)."""
        dtype = jnp.dtype(self.config.compute_dtype)
        x_btd = jnp.take(self.embedding_vd[...].astype(dtype), tokens_bt, axis=0)
        x_btd, router_loss = self._scan_blocks(constrain(x_btd, _ACTIVATION_BTD), dropout_key)
        x_btd = self.final_norm(x_btd)
        table_dv = self.embedding_vd[...].T if self.config.tie_embeddings else self.output_dv[...]
        logits_btv = jnp.einsum(
            "btd,dv->btv", x_btd, table_dv.astype(dtype), preferred_element_type=jnp.float32
        )
        return constrain(logits_btv, ("batch", "sequence", "vocab")), router_loss

    def _scan_blocks(self, x_btd: jax.Array, dropout_key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        graphdef, stacked = nnx.split(self.blocks)
        num_layers = self.config.num_layers
        keys_l = None if dropout_key is None else jax.random.split(dropout_key, num_layers)

        def body(
            x_btd: jax.Array, layer: tuple[nnx.State[Any, Any], jax.Array | None]
        ) -> tuple[jax.Array, jax.Array]:
            weights, key = layer
            block: Block = nnx.merge(graphdef, weights)
            return block(x_btd, key)

        x_btd, router_loss_l = jax.lax.scan(
            _rematerialized(body, self.remat_policy), x_btd, (stacked, keys_l)
        )
        return x_btd, jnp.mean(router_loss_l)


def _stacked_blocks(config: ModelConfig, rngs: nnx.Rngs) -> Block:
    """One Block whose weights carry a leading layer dimension."""

    @nnx.split_rngs(splits=config.num_layers)
    @functools.partial(nnx.vmap, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return cast(Block, create(rngs))


def _rematerialized[**P, R](body: Callable[P, R], policy: RematPolicy) -> Callable[P, R]:
    if policy == "none":
        return body
    saveable = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[policy]
    # prevent_cse is only needed outside of scan (jax.checkpoint's documentation).
    wrapped: Callable[P, R] = jax.checkpoint(body, policy=saveable, prevent_cse=False)
    return wrapped
