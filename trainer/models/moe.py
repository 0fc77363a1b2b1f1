"""Mixture of experts, one layer for every family: dropless or with a capacity, and shared experts.

Dropless: tokens are sorted by expert on each device and multiplied group by group
(`trainer/grouped_matmul.py`). With an expert axis each device keeps its experts, sees the
tokens of the whole axis and gives back sums: exact whatever the load.

With a capacity every expert has so many places in each sequence; what is beyond them is dropped, the
best choices and the earliest tokens first served. Shapes are static and only chosen tokens cross the
expert axis.

Legend: b batch, t position, m token of this device (b*t), d embed, f MLP width, e expert,
p chosen expert of a token, r routed token (m*p), c place of an expert in a sequence.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.schema import ModelConfig
from trainer.attention.order import to_balanced, to_natural
from trainer.execution import Execution, named
from trainer.grouped_matmul import GroupedMatmul, grouped_matmul_of
from trainer.models.layers import RESIDUAL_BTD, WHOLE_BTD, Mlp
from trainer.models.router import Router, RouterStats, Routing
from trainer.models.weights import residual_scale, weight
from trainer.quantization import Quantization, einsum_options
from trainer.sharding import axis_size, constrain, einsum, partition_spec, use

_UP_EDF = ("experts", "embed", "mlp")
_DOWN_EFD = ("experts", "mlp", "embed")
_DOWN_BY_ROWS_EFD = ("experts", "expert_rows", "expert_width")
_PLACES_BECD = ("batch", None, "places", None)
_EXPERTS_BECD = ("expert_batch", "experts", "places", None)
_HIDDEN_BECF = ("expert_batch", "experts", "places", "mlp")


class Experts(nnx.Module):
    """Routed SwiGLU experts and, beside them, shared ones that every token goes through."""

    def __init__(self, config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs) -> None:
        d, f, e = config.embed_dim, config.mlp_dim, config.num_experts
        self.config, self.execution = config, execution
        self.router = Router(config, rngs=rngs)
        self.gate_edf = weight(rngs, (e, d, f), _UP_EDF, fan_in=d)
        self.up_edf = weight(rngs, (e, d, f), _UP_EDF, fan_in=d)
        self.down_axes = _DOWN_BY_ROWS_EFD if execution.divide_expert_rows else _DOWN_EFD
        self.down_efd = weight(rngs, (e, f, d), self.down_axes, fan_in=f, scale=residual_scale(config))
        if config.num_shared_experts:
            self.shared = Mlp(config, execution, config.num_shared_experts * f, rngs=rngs)

    def __call__(self, x_btd: jax.Array) -> tuple[jax.Array, RouterStats]:
        """The mixed output, divided like the residual stream, and what the router saw."""
        config = self.config
        whole_btd = constrain(x_btd, WHOLE_BTD, "experts input")
        routing, stats = self.router(whole_btd)
        matrices = (
            use(self.gate_edf[...], _UP_EDF, x_btd.dtype),
            use(self.up_edf[...], _UP_EDF, x_btd.dtype),
            use(self.down_efd[...], self.down_axes, x_btd.dtype),
        )
        if config.expert_capacity is None:
            out_btd = _dropless(whole_btd, routing, matrices, grouped_matmul_of(config, self.execution))
        else:
            num_places = expert_places(config, x_btd.shape[1])
            out_btd = _with_capacity(whole_btd, routing, matrices, num_places, config.quantization)
        out_btd = named(out_btd, "mlp_out")
        if config.num_shared_experts:
            out_btd = out_btd + self.shared(x_btd)
        return out_btd, stats


def expert_places(config: ModelConfig, sequence_length: int) -> int:
    """Tokens of one sequence that one expert takes."""
    assert config.expert_capacity is not None
    fair = sequence_length * config.num_experts_per_token / config.num_experts
    return min(sequence_length, math.ceil(fair * config.expert_capacity))


Matrices = tuple[jax.Array, jax.Array, jax.Array]
"""Gate and up (e, d, f) and down (e, f, d), in the compute dtype, whole but for expert and tensor."""


def _dropless(
    x_btd: jax.Array, routing: Routing, matrices: Matrices, grouped_matmul: GroupedMatmul
) -> jax.Array:
    if jax.sharding.get_abstract_mesh().empty:
        return _mix(x_btd, routing, matrices, None, grouped_matmul)
    tokens = partition_spec(WHOLE_BTD)
    columns, rows = partition_spec(("experts", None, "mlp")), partition_spec(("experts", "mlp", None))

    def local(x_btd: jax.Array, routing: Routing, matrices: Matrices) -> jax.Array:
        first = None
        if jax.lax.axis_size("expert") > 1:
            x_btd, routing = jax.tree.map(
                lambda leaf: jax.lax.all_gather(leaf, "expert", axis=0, tiled=True), (x_btd, routing)
            )
            first = jax.lax.axis_index("expert") * matrices[0].shape[0]
        out_btd = _mix(x_btd, routing, matrices, first, grouped_matmul)
        if first is not None:
            out_btd = jax.lax.psum_scatter(out_btd, "expert", scatter_dimension=0, tiled=True)
        if jax.lax.axis_size("tensor") > 1:
            out_btd = jax.lax.psum_scatter(out_btd, "tensor", scatter_dimension=1, tiled=True)
        return out_btd

    sharded = jax.shard_map(
        local,
        in_specs=(tokens, tokens, (columns, columns, rows)),
        out_specs=partition_spec(RESIDUAL_BTD),
        check_vma=False,
    )
    out_btd: jax.Array = sharded(x_btd, routing, matrices)
    return out_btd


def _mix(
    x_btd: jax.Array,
    routing: Routing,
    matrices: Matrices,
    first_expert: jax.Array | None,
    grouped_matmul: GroupedMatmul,
) -> jax.Array:
    """What the experts from ``first_expert`` on add for these tokens; None: all experts are here."""
    gate_edf, up_edf, down_efd = matrices
    num_chosen, num_experts = routing.chosen_btp.shape[-1], gate_edf.shape[0]
    x_md = x_btd.reshape(-1, x_btd.shape[-1])
    expert_r = routing.chosen_btp.reshape(-1)
    if first_expert is not None:
        # Tokens of experts elsewhere come last, behind all groups, where nothing is computed for them.
        expert_r = expert_r - first_expert
        expert_r = jnp.where((expert_r >= 0) & (expert_r < num_experts), expert_r, num_experts)
    order_r = jnp.argsort(expert_r, stable=True)
    group_sizes_e = jnp.bincount(expert_r, length=num_experts + 1)[:num_experts].astype(jnp.int32)

    def in_groups(x_rd: jax.Array) -> jax.Array:
        """A kernel may leave rows behind the groups as they were, and so may its gradient."""
        if first_expert is None:
            return x_rd
        return jnp.where((jnp.arange(len(x_rd)) < jnp.sum(group_sizes_e))[:, None], x_rd, 0)

    x_rd = in_groups(x_md[order_r // num_chosen])
    gate_rf = named(grouped_matmul(x_rd, gate_edf, group_sizes_e), "mlp_gate")
    up_rf = named(grouped_matmul(x_rd, up_edf, group_sizes_e), "mlp_up")
    out_rd = in_groups(grouped_matmul(nnx.silu(gate_rf) * up_rf, down_efd, group_sizes_e))
    unsorted_mpd = out_rd[jnp.argsort(order_r)].reshape(-1, num_chosen, x_btd.shape[-1])
    gate_mp = routing.gate_btp.reshape(-1, num_chosen)
    return jnp.einsum("mpd,mp->md", unsorted_mpd, gate_mp).reshape(x_btd.shape)


def _with_capacity(
    x_btd: jax.Array, routing: Routing, matrices: Matrices, num_places: int, quantization: Quantization
) -> jax.Array:
    gate_edf, up_edf, down_efd = matrices
    dispatch_btec, combine_btec = _places(routing, gate_edf.shape[0], num_places, x_btd.dtype)
    x_becd = einsum("btd,btec->becd", x_btd, dispatch_btec, _PLACES_BECD, name="expert places")
    # From rows of the batch to experts: the all-to-all over the expert axis.
    x_becd = constrain(x_becd, _EXPERTS_BECD, "expert places")
    options = einsum_options(quantization)
    gate_becf = einsum("becd,edf->becf", x_becd, gate_edf, _HIDDEN_BECF, name="expert gate", **options)
    up_becf = einsum("becd,edf->becf", x_becd, up_edf, _HIDDEN_BECF, name="expert up", **options)
    hidden_becf = nnx.silu(named(gate_becf, "mlp_gate")) * named(up_becf, "mlp_up")
    out_becd = einsum("becf,efd->becd", hidden_becf, down_efd, _EXPERTS_BECD, name="expert output", **options)
    out_becd = constrain(out_becd, _PLACES_BECD, "expert output")
    return einsum("becd,btec->btd", out_becd, combine_btec, RESIDUAL_BTD, name="experts output")


def _places(
    routing: Routing, num_experts: int, num_places: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """(b, t, e, c): 1 where a token has a place, and how much its output counts there."""
    one_hot_btpe = jax.nn.one_hot(routing.chosen_btp, num_experts, dtype=jnp.int32)
    place_btp = _places_in_turn(one_hot_btpe)
    # A place beyond the last one is no place: one_hot gives zeros.
    at_btpc = jax.nn.one_hot(place_btp, num_places, dtype=dtype)
    dispatch_btec = jnp.einsum("btpe,btpc->btec", one_hot_btpe.astype(dtype), at_btpc)
    combine_btec = jnp.einsum("btpe,btpc,btp->btec", one_hot_btpe.astype(dtype), at_btpc, routing.gate_btp)
    return dispatch_btec, combine_btec


def _places_in_turn(one_hot_btpe: jax.Array) -> jax.Array:
    """int32 (b, t, p): how many were served by the expert before, in the sequence's natural order."""
    b, t, p, e = one_hot_btpe.shape
    num_shards = axis_size("context")
    natural_btpe = to_natural(one_hot_btpe, 1, num_shards)
    # First choices are served before second ones, and among equals the earlier token.
    queue_bre = jnp.swapaxes(natural_btpe, 1, 2).reshape(b, p * t, e)
    place_bre = jnp.cumsum(queue_bre, axis=1) - 1
    place_btpe = jnp.swapaxes(place_bre.reshape(b, p, t, e), 1, 2)
    return to_balanced(jnp.sum(place_btpe * natural_btpe, axis=-1), 1, num_shards)
