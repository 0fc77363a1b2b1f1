"""Model FLOPs of a training step, and the hardware's peak, for MFU.

Counted as in the scaling-book (jax-ml/scaling-book, "transformers"): 6 per matmul weight and token
(2 forward, 4 backward) plus causal attention; recomputation does not count.
"""

from __future__ import annotations

from recipes.hardware import generation
from recipes.schema import ModelConfig, Recipe


def step_flops(recipe: Recipe) -> float:
    """Model FLOPs of one optimizer step over the global batch."""
    tokens = recipe.train.global_batch_size * recipe.train.sequence_length
    return tokens * token_flops(recipe.model, recipe.train.sequence_length)


def token_flops(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs per token; scores and mixing of causal attention count half."""
    heads_width = model.num_heads * model.head_dim
    attention_weights = model.embed_dim * (2 * heads_width + 2 * model.num_kv_heads * model.head_dim)
    mlp_weights = 3 * model.embed_dim * model.mlp_dim * model.num_experts_per_token
    router_weights = model.embed_dim * model.num_experts if model.num_experts > 1 else 0
    layer_weights = attention_weights + mlp_weights + router_weights
    matmul = 6 * (model.num_layers * layer_weights + model.embed_dim * model.vocab_size)
    causal_attention = 6 * model.num_layers * heads_width * sequence_length
    return float(matmul + causal_attention)


def peak_flops_per_s(recipe: Recipe) -> float | None:
    """bf16 peak of one chip; None where it is unknown (CPU) or the compute dtype is another."""
    if recipe.model.compute_dtype != "bfloat16":
        return None
    return generation(recipe.hardware.generation).peak_flops_per_s.get("bf16")
