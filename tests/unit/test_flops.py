"""The FLOP definition of MFU against arithmetic by hand, and which peak it is measured against.

pytest tests/unit/test_flops.py
"""

from __future__ import annotations

from typing import Any

import pytest

from recipes.flops import peak_flops_per_s, step_flops, token_flops
from recipes.load import nest, recipe_from_dict
from recipes.schema import Recipe
from tests.golden.models_doc import shipped_model
from tests.unit.test_plan import LLAMA3_8B

TINY = {
    "model.vocab_size": 100,
    "model.num_layers": 3,
    "model.embed_dim": 8,
    "model.mlp_dim": 20,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 6,
}
EXPERTS = {"model.family": "mixtral", "model.num_experts": 5, "model.num_experts_per_token": 2}
ATTENTION = 8 * 4 * 6 + 2 * (8 * 2 * 6) + 4 * 6 * 8
"""Query, key and value, output of one layer of TINY."""
SWIGLU = 3 * 8 * 20
OUTPUT = 100 * 8


def recipe(**changes: Any) -> Recipe:
    return recipe_from_dict(nest({**LLAMA3_8B, **TINY, **changes}))


@pytest.mark.parametrize(
    ("changes", "matmul_weights"),
    [
        ({}, 3 * (ATTENTION + SWIGLU) + OUTPUT),
        ({"model.tie_embeddings": True}, 3 * (ATTENTION + SWIGLU) + OUTPUT),
        ({"model.mlp_activation": "relu"}, 3 * (ATTENTION + 2 * 8 * 20) + OUTPUT),
        (EXPERTS, 3 * (ATTENTION + 2 * SWIGLU + 8 * 5) + OUTPUT),
        ({**EXPERTS, "model.num_shared_experts": 3}, 3 * (ATTENTION + (2 + 3) * SWIGLU + 8 * 5) + OUTPUT),
        # the bias of a router is added, not multiplied
        ({**EXPERTS, "model.router_bias_rate": 0.001}, 3 * (ATTENTION + 2 * SWIGLU + 8 * 5) + OUTPUT),
        # dropped tokens count like the others
        ({**EXPERTS, "model.expert_capacity": 1.0}, 3 * (ATTENTION + 2 * SWIGLU + 8 * 5) + OUTPUT),
    ],
    ids=["dense", "tied", "relu", "experts", "shared", "bias", "capacity"],
)
def test_six_for_each_matmul_weight_that_a_token_meets(changes: dict[str, Any], matmul_weights: int) -> None:
    assert token_flops(recipe(**changes).model, 0) == 6 * matmul_weights


@pytest.mark.parametrize(
    ("window", "length", "pairs"),
    [
        # half of the 32 x 32 positions
        (None, 32, 32 * 32 / 2),
        (32, 32, 32 * 32 / 2),
        (1000, 32, 32 * 32 / 2),
        # a band of 8 beside the diagonal, less the triangle that is cut off where the sequence begins
        (8, 32, 32 * 8 - 8 * 8 / 2),
        (1, 32, 32 * 1 - 1 / 2),
    ],
)
def test_attention_counts_the_pairs_of_positions_that_it_may_see(
    window: int | None, length: int, pairs: float
) -> None:
    # Scores and mixing: 2 matmuls of 2 FLOPs, forward once and backward twice, on 4 heads of 6.
    each = 3 * 2 * 2 * 4 * 6
    model = recipe(**{"model.attention_window": window}).model
    attention = length * (token_flops(model, length) - token_flops(model, 0))
    assert attention == pytest.approx(3 * each * pairs, rel=1e-12)


def test_a_band_is_the_mask_up_to_half_a_position() -> None:
    length = 64
    for window in range(1, length + 1):
        seen = sum(1 for query in range(length) for key in range(length) if 0 <= query - key < window)
        model = recipe(**{"model.attention_window": window}).model
        pairs = length * (token_flops(model, length) - token_flops(model, 0)) / (3 * 12 * 4 * 6)
        assert seen - length / 2 <= pairs <= seen


def test_a_step_of_llama3_8b() -> None:
    # A token: 7,504,658,432 matmul weights; 32 layers of 32 heads of 128 over half of 8192 positions.
    llama = recipe_from_dict(nest(dict(LLAMA3_8B)))
    assert 6 * 7_504_658_432 + 12 * 32 * (32 * 128) * 8192 // 2 == 51_470_401_536
    assert step_flops(llama) == 128 * 8192 * 51_470_401_536


@pytest.mark.parametrize(
    ("generation", "changes", "peak"),
    [
        ("v5p", {}, 459e12),
        ("v5p", {"model.quantization": "int8"}, 918e12),
        ("v6e", {"model.quantization": "int8"}, 1836e12),
        ("tpu7x", {}, 2307e12),
        ("tpu7x", {"model.quantization": "fp8"}, 4614e12),
        # no units for it: multiplied in bfloat16
        ("v6e", {"model.quantization": "fp8"}, 918e12),
        ("v5p", {"model.compute_dtype": "float32"}, None),
        ("cpu", {}, None),
    ],
)
def test_the_peak_is_that_of_the_dtype_that_matmuls_run_in(
    generation: str, changes: dict[str, Any], peak: float | None
) -> None:
    topology = "1x8" if generation == "cpu" else "4x4" if generation == "v6e" else "4x4x4"
    hardware = {"hardware.generation": generation, "hardware.topology": topology}
    assert peak_flops_per_s(recipe(**hardware, **changes)) == peak


@pytest.mark.parametrize(
    ("name", "length", "tflops_per_s", "tokens_per_s"),
    [
        # AI-Hypercomputer/tpu-recipes@c8cfe2f, training/ironwood: per chip, causal attention
        ("llama3.1-70b", 8192, 1199.67, 2670.55),
        ("llama3.1-70b", 131_072, 897.94, 963.03),
        ("llama3-405b", 8192, 1261.4, 499.77),
    ],
)
def test_published_speeds_use_the_same_definition(
    name: str, length: int, tflops_per_s: float, tokens_per_s: float
) -> None:
    assert token_flops(shipped_model(name), length) == pytest.approx(
        tflops_per_s * 1e12 / tokens_per_s, rel=1e-4
    )


@pytest.mark.parametrize(
    ("name", "length", "tflops_per_s", "tokens_per_s"),
    [
        # AI-Hypercomputer/tpu-recipes@c8cfe2f, training/trillium: per chip, the whole score matrix
        ("llama3.1-8b", 8192, 413.433, 7138.89),
        ("llama3.1-70b", 8192, 443.385, 920.965),
        ("mixtral-8x22b", 4096, 332.463, 1326.307),
    ],
)
def test_older_published_speeds_count_the_masked_half_too(
    name: str, length: int, tflops_per_s: float, tokens_per_s: float
) -> None:
    model = shipped_model(name)
    masked_half = 6 * model.num_layers * model.num_heads * model.head_dim * length
    assert token_flops(model, length) + masked_half == pytest.approx(
        tflops_per_s * 1e12 / tokens_per_s, rel=2e-4
    )
