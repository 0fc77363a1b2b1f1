"""Model FLOPs of a training step, and the hardware's peak, for MFU (docs/models.md).

6 per matmul weight that a token meets (2 forward, 4 backward) and 12 per query position, key
position, query head and unit of its width; causal attention counts once. Recomputation, embedding
lookup, norms, softmax and element-wise work do not count.
"""

from __future__ import annotations

from recipes.hardware import generation
from recipes.parameters import count_matmul_parameters
from recipes.schema import ModelConfig, Recipe


def step_flops(recipe: Recipe) -> float:
    """Model FLOPs of one optimizer step over the global batch."""
    tokens = recipe.train.global_batch_size * recipe.train.sequence_length
    return tokens * token_flops(recipe.model, recipe.train.sequence_length)


def token_flops(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs per token, averaged over a sequence."""
    heads_width = model.num_heads * model.head_dim
    attention = 12 * model.num_layers * heads_width * mean_keys(model.attention_window, sequence_length)
    return 6.0 * count_matmul_parameters(model) + attention


def peak_flops_per_s(recipe: Recipe) -> float | None:
    """Peak of one chip in the dtype that its matmuls run in; None where it is unknown (CPU, float32).

    A chip without units for the dtype of ``model.quantization`` multiplies in bfloat16.
    """
    if recipe.model.compute_dtype != "bfloat16":
        return None
    peak = generation(recipe.hardware.generation).peak_flops_per_s
    return peak.get(recipe.model.quantization, peak.get("bf16"))


def mean_keys(attention_window: int | None, sequence_length: int) -> float:
    """Keys that a query sees on average: the area under the diagonal, no wider than the window.

    Half of the sequence without a window; the diagonal itself counts half.
    """
    width = min(attention_window or sequence_length, sequence_length)
    return width - width**2 / (2 * sequence_length) if width else 0.0
