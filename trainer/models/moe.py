"""Mixture of experts, dropless: every token reaches all of its top-k experts.

Tokens are sorted by expert on each device and multiplied group by group (``jax.lax.ragged_dot``).
Weights divided over fsdp and expert are gathered first, as in FSDP; the MLP width stays divided over
the tensor axis.

Legend: b batch, t position, m token of this device (b*t), d embed, f MLP width, e expert,
p chosen expert of a token, r routed token (m*p).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from recipes.schema import ModelConfig
from trainer.models.weights import residual_scale, weight
from trainer.sharding import partition_spec


class Experts(nnx.Module):
    """Top-k routed SwiGLU experts with softmax over the chosen (arXiv:2401.04088)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        d, f, e = config.embed_dim, config.mlp_dim, config.num_experts
        self.config = config
        self.router_de = weight(rngs, (d, e), ("embed", None), fan_in=d)
        self.gate_edf = weight(rngs, (e, d, f), ("experts", "embed", "mlp"), fan_in=d)
        self.up_edf = weight(rngs, (e, d, f), ("experts", "embed", "mlp"), fan_in=d)
        self.down_efd = weight(
            rngs, (e, f, d), ("experts", "mlp", "embed"), fan_in=f, scale=residual_scale(config)
        )

    def __call__(self, x_btd: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the mixed output and the load-balancing loss (1 when balanced)."""
        config, dtype = self.config, x_btd.dtype
        logits_bte = jnp.einsum(
            "btd,de->bte", x_btd, self.router_de[...].astype(dtype), preferred_element_type=jnp.float32
        )
        chosen_logits_btp, chosen_btp = jax.lax.top_k(logits_bte, config.num_experts_per_token)
        gate_btp = jax.nn.softmax(chosen_logits_btp, axis=-1).astype(dtype)
        weights = [w[...].astype(dtype) for w in (self.gate_edf, self.up_edf, self.down_efd)]
        out_btd = _on_each_device(x_btd, chosen_btp, gate_btp, *weights)
        return out_btd, _balance_loss(logits_bte, chosen_btp, config.num_experts)


def _on_each_device(
    x_btd: jax.Array,
    chosen_btp: jax.Array,
    gate_btp: jax.Array,
    gate_edf: jax.Array,
    up_edf: jax.Array,
    down_efd: jax.Array,
) -> jax.Array:
    """Runs :func:`_mix` on every device's own tokens, with the MLP width divided over tensor."""
    if jax.sharding.get_abstract_mesh().empty:
        return _mix(x_btd, chosen_btp, gate_btp, gate_edf, up_edf, down_efd)

    def local(*args: jax.Array) -> jax.Array:
        total: jax.Array = jax.lax.psum(_mix(*args), "tensor")
        return total

    tokens = partition_spec(("batch", "sequence", None))
    columns, rows = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor", None)
    in_specs = (tokens, tokens, tokens, columns, columns, rows)
    sharded = jax.shard_map(local, in_specs=in_specs, out_specs=tokens)
    out_btd: jax.Array = sharded(x_btd, chosen_btp, gate_btp, gate_edf, up_edf, down_efd)
    return out_btd


def _mix(
    x_btd: jax.Array,
    chosen_btp: jax.Array,
    gate_btp: jax.Array,
    gate_edf: jax.Array,
    up_edf: jax.Array,
    down_efd: jax.Array,
) -> jax.Array:
    num_chosen, num_experts = chosen_btp.shape[-1], gate_edf.shape[0]
    x_md = x_btd.reshape(-1, x_btd.shape[-1])
    expert_r = chosen_btp.reshape(-1)
    order_r = jnp.argsort(expert_r, stable=True)
    group_sizes_e = jnp.bincount(expert_r, length=num_experts).astype(jnp.int32)
    x_rd = x_md[order_r // num_chosen]
    hidden_rf = nnx.silu(jax.lax.ragged_dot(x_rd, gate_edf, group_sizes_e))
    hidden_rf = hidden_rf * jax.lax.ragged_dot(x_rd, up_edf, group_sizes_e)
    out_rd = jax.lax.ragged_dot(hidden_rf, down_efd, group_sizes_e)
    unsorted_mpd = out_rd[jnp.argsort(order_r)].reshape(-1, num_chosen, x_btd.shape[-1])
    gate_mp = gate_btp.reshape(-1, num_chosen)
    return jnp.einsum("mpd,mp->md", unsorted_mpd, gate_mp).reshape(x_btd.shape)


def _balance_loss(logits_bte: jax.Array, chosen_btp: jax.Array, num_experts: int) -> jax.Array:
    """Experts times the sum over them of (share of tokens x mean probability), arXiv:2101.03961 eq. 4."""
    probability_e = jnp.mean(jax.nn.softmax(logits_bte, axis=-1), axis=(0, 1))
    share_e = jnp.mean(jax.nn.one_hot(chosen_btp, num_experts), axis=(0, 1, 2))
    return num_experts * jnp.sum(probability_e * share_e)
