"""The FLOP definition against XLA's own count of a loss and its gradient, without rematerialisation.

XLA counts what is computed here: the masked part of the score matrix too, every expert for each routed
token (grouped matmuls are whole ones on CPU), and element-wise work. It counts the body of a loop once,
so the models have one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from recipes.flops import token_flops
from recipes.schema import ModelConfig, Recipe
from trainer.attention import Places
from trainer.execution import Execution
from trainer.loss import cross_entropy
from trainer.models.decoder import Decoder

MakeRecipe = Callable[..., Recipe]

MODEL = {
    "model.vocab_size": 1000,
    "model.num_layers": 1,
    "model.embed_dim": 256,
    "model.mlp_dim": 768,
    "model.num_heads": 8,
    "model.num_kv_heads": 2,
    "model.head_dim": 64,
}
SEQUENCES, LENGTH = 2, 512


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.tie_embeddings": True, "model.num_kv_heads": 8},
        {"model.attention_window": 64},
        {"model.mlp_activation": "relu"},
        {"model.family": "mixtral", "model.num_experts": 4, "model.num_experts_per_token": 2},
        {
            "model.family": "mixtral",
            "model.num_experts": 4,
            "model.num_shared_experts": 1,
            "model.router_bias_rate": 0.001,
        },
    ],
    ids=["dense", "tied", "window", "relu", "experts", "shared"],
)
def test_what_xla_counts(small: MakeRecipe, changes: dict[str, Any]) -> None:
    model = small({**MODEL, **changes}).model
    whole_scores = 12 * model.num_heads * model.head_dim * LENGTH
    swiglu = 6 * 3 * model.embed_dim * model.mlp_dim
    idle_experts = model.num_experts_per_token * (model.num_experts - 1) * swiglu
    matmuls = SEQUENCES * LENGTH * (token_flops(model, 0) + whole_scores + idle_experts)
    # 3 % for norms, RoPE, softmax and the like.
    assert matmuls <= _flops_by_xla(model) <= 1.03 * matmuls


def _flops_by_xla(model: ModelConfig) -> float:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(model, Execution(), rngs=nnx.Rngs(0))))
    tokens_bt = jax.ShapeDtypeStruct((SEQUENCES, LENGTH), jnp.int32)

    def loss(state: nnx.State[Any, Any], tokens_bt: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, state)
        hidden_btd, _ = decoder(tokens_bt, Places(jnp.arange(LENGTH), None))
        return cross_entropy(hidden_btd, decoder.table_vd, tokens_bt, 1)

    cost = jax.jit(jax.grad(loss)).lower(state, tokens_bt).cost_analysis()
    assert cost is not None
    return float(cost["flops"])
