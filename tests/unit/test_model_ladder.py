"""The models that are shipped: exact parameter counts, by hand and as published, and docs/models.md.

pytest tests/unit/test_model_ladder.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import recipe_path
from recipes.parameters import count_active_parameters, count_parameters
from tests.golden.models_doc import MODELS_DOC, models_doc, shipped_model

DENSE = {
    # rung: embed, heads (as many for keys), MLP, layers
    "16b": (5120, 32, 32768, 32),
    "22b": (6144, 24, 24576, 48),
    "32b": (10240, 32, 32768, 32),
    "52b": (12288, 32, 49152, 32),
    "64b": (10240, 32, 32768, 64),
    "128b": (10240, 64, 65536, 64),
    "256b": (20480, 64, 65536, 64),
    "512b": (20480, 64, 65536, 128),
    "1024b": (20480, 128, 131072, 128),
}
"""AI-Hypercomputer/maxtext: MaxText/configs/largest_job at 28816574b (v5e), MaxText/configs/v5p at 76bd53b0f,
MaxText/configs/{1xv4-128,1xv4-384}.sh at cc26d401c (v4), with base.yml there: heads of 256, 32768 tokens,
mlp_activations relu, logits_via_embedding true."""

DENSE_COUNTS = {
    "16b": 16_274_232_320,
    "22b": 21_945_194_496,
    "32b": 32_548_464_640,
    "52b": 51_943_059_456,
    "64b": 64_761_374_720,
    "128b": 129_185_884_160,
    "256b": 258_371_768_320,
    "512b": 516_072_427_520,
    "1024b": 1_031_468_503_040,
}

PUBLISHED = {
    # safetensors totals of huggingface.co/meta-llama/{Llama-2-7b-hf,Llama-2-70b-hf,Llama-3.1-8B,-70B,-405B}
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    # of huggingface.co/mistralai/{Mixtral-8x7B-v0.1,Mixtral-8x22B-v0.1}; the latter is bytes of bfloat16
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 281_241_268_224 // 2,
}


def test_every_shipped_model_has_a_count_here() -> None:
    counted = {*PUBLISHED, *(f"dense-{rung}" for rung in DENSE), "byte-llama-tiny"}
    assert set(recipe_path.names([recipe_path.SHIPPED], "model")) == counted


@pytest.mark.parametrize("rung", DENSE)
def test_the_dense_ladder(rung: str) -> None:
    embed, heads, mlp, layers = DENSE[rung]
    attention = 4 * embed * heads * 256
    relu_mlp = 2 * embed * mlp
    by_hand = layers * (attention + relu_mlp + 2 * embed) + embed + 32_768 * embed
    assert count_parameters(shipped_model(f"dense-{rung}")) == by_hand == DENSE_COUNTS[rung]


def test_the_rungs_are_as_large_as_their_names() -> None:
    for rung, count in DENSE_COUNTS.items():
        assert count == pytest.approx(int(rung.removesuffix("b")) * 1e9, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_counts_of_published_checkpoints(name: str) -> None:
    assert count_parameters(shipped_model(name)) == PUBLISHED[name]


def test_active_parameters_of_mixtral() -> None:
    # all but six of the eight experts of every layer
    for name, layers, embed, mlp in (("mixtral-8x7b", 32, 4096, 14336), ("mixtral-8x22b", 56, 6144, 16384)):
        idle = layers * 6 * 3 * embed * mlp
        assert count_active_parameters(shipped_model(name)) == PUBLISHED[name] - idle


def test_the_table_in_the_docs_is_up_to_date() -> None:
    text = Path(MODELS_DOC).read_text(encoding="ascii")
    assert text == models_doc(text), "python -m tests.golden.models_doc"
