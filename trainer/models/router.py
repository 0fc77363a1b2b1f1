"""Which experts a token goes to, how much each counts, and what keeps them evenly loaded.

Legend: b batch, t position, d embed, e expert, p chosen expert of a token, l layer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.models.weights import weight
from trainer.sharding import einsum, use

BALANCE_NAME = "balance_e"
"""Name of the weight that no gradient moves: see :func:`balanced`."""

_ROUTER_DE = ("embed", None)
_TOKENS_BTE = ("batch", "sequence", None)


class RouterStats(NamedTuple):
    """Means over tokens, so parts of a batch may be averaged; with a leading layer dimension outside."""

    load_e: jax.Array
    """Share of all (token, choice) pairs that went to each expert."""
    probability_e: jax.Array
    """Mean probability of each expert."""
    z: jax.Array
    """Mean square of the log-sum-exp of the logits."""


def no_stats() -> RouterStats:
    """Of a layer without a router."""
    return RouterStats(jnp.zeros((1,), jnp.float32), jnp.zeros((1,), jnp.float32), jnp.float32(0))


class Routing(NamedTuple):
    """Where each token goes."""

    chosen_btp: jax.Array
    """int32 experts, the best first."""
    gate_btp: jax.Array
    """How much each counts; sums to 1."""


class Router(nnx.Module):
    """Top-k by logits, softmax over the chosen (arXiv:2401.04088)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        d, e = config.embed_dim, config.num_experts
        self.config = config
        self.router_de = weight(rngs, (d, e), _ROUTER_DE, fan_in=d)
        if config.router_bias_rate > 0:
            zeros = jnp.zeros((e,), jnp.float32)
            self.balance_e = nnx.Param(zeros, out_sharding=(None,), eager_sharding=False)

    def __call__(self, x_btd: jax.Array) -> tuple[Routing, RouterStats]:
        config, dtype = self.config, x_btd.dtype
        router_de = use(self.router_de[...], _ROUTER_DE, dtype)
        logits_bte = einsum(
            "btd,de->bte",
            x_btd,
            router_de,
            _TOKENS_BTE,
            name="router logits",
            preferred_element_type=jnp.float32,
        )
        biased_bte = logits_bte
        if config.router_bias_rate > 0:
            biased_bte = logits_bte + jax.lax.stop_gradient(self.balance_e[...].astype(jnp.float32))
        _, chosen_btp = jax.lax.top_k(biased_bte, config.num_experts_per_token)
        # A sum over one-hot rows instead of a gather: it divides over any mesh.
        one_hot_btpe = jax.nn.one_hot(chosen_btp, config.num_experts, dtype=jnp.float32)
        chosen_logits_btp = jnp.sum(one_hot_btpe * logits_bte[:, :, None, :], axis=-1)
        gate_btp = jax.nn.softmax(chosen_logits_btp, axis=-1).astype(dtype)
        stats = RouterStats(
            jnp.mean(one_hot_btpe, axis=(0, 1, 2)),
            jnp.mean(jax.nn.softmax(logits_bte, axis=-1), axis=(0, 1)),
            jnp.mean(jnp.square(jax.nn.logsumexp(logits_bte, axis=-1))),
        )
        return Routing(chosen_btp, gate_btp), stats


def router_loss(config: ModelConfig, stats_l: RouterStats) -> jax.Array:
    """What the router adds to the loss: balance (arXiv:2101.03961 eq. 4), z-loss (arXiv:2202.08906 eq. 5).

    ``stats_l`` has a leading layer dimension; the mean over layers. Balance is 1 when loads are even.
    """
    products_le = jax.lax.stop_gradient(stats_l.load_e) * stats_l.probability_e
    balance = config.num_experts * jnp.mean(jnp.sum(products_le, axis=-1))
    return config.router_loss_weight * balance + config.router_z_loss_weight * jnp.mean(stats_l.z)


def balanced(balance_le: jax.Array, load_le: jax.Array, rate: float) -> jax.Array:
    """The next bias: up for experts with less than the mean load, down for the others (arXiv:2408.15664)."""
    mean_l1 = jnp.mean(load_le, axis=-1, keepdims=True)
    return balance_le + (rate * jnp.sign(mean_l1 - load_le)).astype(balance_le.dtype)
