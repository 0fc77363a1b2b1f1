"""Decoder of the Llama family in Flax NNX; with experts, of the Mixtral family.

The blocks are one stacked module scanned over its layers, so compile time does not grow with depth.
With a stage axis the layers are dealt out to stages (`pipeline.py`).

Legend of dimensions: b batch, t position, d embed, v vocabulary, l layer.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.attention import Places
from trainer.execution import Execution, named, rematerialized
from trainer.models.layers import RESIDUAL_BTD, WHOLE_BTD, Attention, Mlp, RMSNorm
from trainer.models.moe import Experts
from trainer.models.pipeline import run_pipeline
from trainer.models.router import RouterStats, no_stats
from trainer.models.weights import weight
from trainer.sharding import constrain, lookup

_TABLE_VD = ("vocab", "embed")


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs) -> None:
        self.dropout_rate = config.dropout_rate
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_epsilon)
        self.attention = Attention(config, execution, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_epsilon)
        if config.num_experts > 1:
            self.mlp: Experts | Mlp = Experts(config, execution, rngs=rngs)
        else:
            self.mlp = Mlp(config, execution, config.mlp_dim, rngs=rngs)

    def __call__(
        self, x_btd: jax.Array, places: Places, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, RouterStats]:
        x_btd = named(x_btd, "layer_input")
        keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        attended_btd = self.attention(self.attention_norm(x_btd), places)
        x_btd = constrain(x_btd + self._dropout(attended_btd, keys[0]), RESIDUAL_BTD, "residual")
        mixed = self.mlp(self.mlp_norm(x_btd))
        mixed_btd, stats = mixed if isinstance(mixed, tuple) else (mixed, no_stats())
        return constrain(x_btd + self._dropout(mixed_btd, keys[1]), RESIDUAL_BTD, "residual"), stats

    def _dropout(self, x_btd: jax.Array, key: jax.Array | None) -> jax.Array:
        if key is None:
            return x_btd
        keep = jax.random.bernoulli(key, 1 - self.dropout_rate, x_btd.shape)
        return jnp.where(keep, x_btd / (1 - self.dropout_rate), 0).astype(x_btd.dtype)


class Decoder(nnx.Module):
    """Tokens -> the last hidden state, which `trainer/loss.py` turns into logits."""

    def __init__(self, config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs) -> None:
        v, d = config.vocab_size, config.embed_dim
        self.config, self.execution = config, execution
        self.embedding_vd = weight(rngs, (v, d), _TABLE_VD, fan_in=d)
        self.blocks = _stacked_blocks(config, execution, rngs)
        self.final_norm = RMSNorm(d, config.norm_epsilon)
        if not config.tie_embeddings:
            self.output_vd = weight(rngs, (v, d), _TABLE_VD, fan_in=d)

    def __call__(
        self, tokens_bt: jax.Array, places: Places, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStats]:
        """Hidden state (b, t, d) after the last norm, and what the routers saw, by layer.

        ``places`` says where each token stands; see :mod:`trainer.attention.order`.
        """
        dtype = jnp.dtype(self.config.compute_dtype)
        x_btd = lookup(self.embedding_vd[...].astype(dtype), tokens_bt)
        # First the rows to their devices, then the sequence over tensor: each is one exchange.
        x_btd = constrain(constrain(x_btd, WHOLE_BTD, "embeddings"), RESIDUAL_BTD, "embeddings")
        if self.execution.num_stages > 1:
            x_btd, stats_l = self._pipeline(x_btd, places)
        else:
            x_btd, stats_l = self._scan(x_btd, places, dropout_key)
        return constrain(self.final_norm(x_btd), WHOLE_BTD, "hidden state"), stats_l

    @property
    def table_vd(self) -> jax.Array:
        """The matrix that turns hidden states into logits, in the weights' dtype."""
        return self.embedding_vd[...] if self.config.tie_embeddings else self.output_vd[...]

    def _scan(
        self, x_btd: jax.Array, places: Places, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, RouterStats]:
        graphdef, stacked = nnx.split(self.blocks)
        keys_l = None if dropout_key is None else jax.random.split(dropout_key, self.config.num_layers)

        def body(
            x_btd: jax.Array, layer: tuple[nnx.State[Any, Any], jax.Array | None]
        ) -> tuple[jax.Array, RouterStats]:
            weights, key = layer
            block: Block = nnx.merge(graphdef, weights)
            return block(x_btd, places, key)

        x_btd, stats_l = jax.lax.scan(rematerialized(body, self.execution), x_btd, (stacked, keys_l))
        return x_btd, stats_l

    def _pipeline(self, x_btd: jax.Array, places: Places) -> tuple[jax.Array, RouterStats]:
        graphdef, stacked = nnx.split(self.blocks)

        def stage(
            weights: nnx.State[Any, Any], x_btd: jax.Array, segments_bt: jax.Array | None
        ) -> tuple[jax.Array, RouterStats]:
            here = Places(places.positions_t, segments_bt)

            def body(x_btd: jax.Array, layer: nnx.State[Any, Any]) -> tuple[jax.Array, RouterStats]:
                block: Block = nnx.merge(graphdef, layer)
                return block(x_btd, here, None)

            x_btd, stats_k = jax.lax.scan(rematerialized(body, self.execution), x_btd, weights)
            return x_btd, stats_k

        return run_pipeline(stage, stacked, x_btd, places.segments_bt, self.execution)


def _stacked_blocks(config: ModelConfig, execution: Execution, rngs: nnx.Rngs) -> Block:
    """One Block whose weights carry a leading layer dimension."""

    @nnx.split_rngs(splits=config.num_layers)
    @functools.partial(nnx.vmap, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs: nnx.Rngs) -> Block:
        return Block(config, execution, rngs=rngs)

    return cast(Block, create(rngs))
