"""Model FLOPs of a training step, and the hardware's peak, for MFU.

Counted as in the scaling-book (jax-ml/scaling-book, "transformers"): 6 per matmul weight and token
(2 forward, 4 backward) plus causal attention; recomputation does not count.
"""

from __future__ import annotations

from recipes.hardware import generation
from recipes.parameters import count_active_parameters
from recipes.schema import ModelConfig, Recipe


def step_flops(recipe: Recipe) -> float:
    """Model FLOPs of one optimizer step over the global batch."""
    tokens = recipe.train.global_batch_size * recipe.train.sequence_length
    return tokens * token_flops(recipe.model, recipe.train.sequence_length)


def token_flops(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs per token; scores and mixing of causal attention count half."""
    norms = (2 * model.num_layers + 1) * model.embed_dim
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.embed_dim
    matmul = 6 * (count_active_parameters(model) - norms - looked_up)
    heads_width = model.num_heads * model.head_dim
    causal_attention = 6 * model.num_layers * heads_width * sequence_length
    return float(matmul + causal_attention)


def peak_flops_per_s(recipe: Recipe) -> float | None:
    """bf16 peak of one chip; None where it is unknown (CPU) or the compute dtype is another."""
    if recipe.model.compute_dtype != "bfloat16":
        return None
    return generation(recipe.hardware.generation).peak_flops_per_s.get("bf16")
