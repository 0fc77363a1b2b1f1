"""Rules on how a model is computed: one row for each, and the recipes that they must let through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from recipes.check import check
from recipes.load import flatten, nest, recipe_from_dict
from recipes.schema import Recipe

BASE: Mapping[str, Any] = {
    "name": "small",
    "hardware": {"generation": "cpu", "topology": "1x8"},
    "model": {
        "vocab_size": 512,
        "num_layers": 8,
        "embed_dim": 64,
        "mlp_dim": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    },
    "data": {"source": "synthetic"},
    "optimizer": {"learning_rate": 1e-3},
    "target": {"kind": "local"},
    "train": {"num_steps": 10, "global_batch_size": 64, "sequence_length": 1024},
}
EXPERTS = {"model.family": "mixtral", "model.num_experts": 4, "model.num_experts_per_token": 2}
MEGABLOX = {**EXPERTS, "model.grouped_matmul": "megablox"}
V5E = {"hardware.generation": "v5e", "hardware.topology": "4x4", "target.kind": "tpu"}
STAGES = {"mesh.stage": 4}
SPLASH = {"model.attention": "splash"}

BAD = [
    ({"model.num_shared_experts": 1}, "model.num_shared_experts", "use model.num_shared_experts=0"),
    ({"model.expert_capacity": 1.5}, "model.expert_capacity", "use model.expert_capacity=null"),
    ({"model.router_bias_rate": 0.1}, "model.router_bias_rate", "model.router_bias_rate=0.0"),
    ({"model.grouped_matmul": "megablox"}, "model.grouped_matmul", "model.grouped_matmul=xla"),
    (
        {**MEGABLOX, **V5E, "train.sequence_length": 1001},
        "model.grouped_matmul",
        "that 128 divides",
    ),
    ({**MEGABLOX, "model.expert_capacity": 1.0}, "model.grouped_matmul", "model.expert_capacity=null"),
    ({**MEGABLOX, "model.quantization": "int8"}, "model.grouped_matmul", "model.quantization=none"),
    ({**EXPERTS, "model.mlp_activation": "relu"}, "model.mlp_activation", "use swiglu"),
    ({"train.remat_save": ["query"]}, "train.remat_save", "train.remat_policy=named"),
    (
        {"train.remat_policy": "named", "train.remat_offload": ["layer_inptu"]},
        "train.remat_offload",
        "did you mean layer_input?",
    ),
    (
        {"train.remat_policy": "named", "train.remat_save": ["key"], "train.remat_offload": ["key"]},
        "train.remat_offload",
        "name it in one of them",
    ),
    ({"model.quantization": "int8", "mesh.sharding_mode": "explicit"}, "model.quantization", "mode=auto"),
    (
        {"model.quantization": "fp8", "mesh.collective_matmul": True, "mesh.tensor": 2},
        "model.quantization",
        "mesh.collective_matmul=false",
    ),
    ({"mesh.stage_rounds": 2}, "mesh.stage_rounds", "mesh.stage=2"),
    ({**STAGES, "mesh.sharding_mode": "explicit"}, "mesh.sharding_mode", "use auto"),
    ({**STAGES, "model.dropout_rate": 0.1}, "model.dropout_rate", "use 0.0"),
    ({**STAGES, "model.num_layers": 6}, "model.num_layers", "or 4 layers"),
    (
        {**STAGES, "mesh.stage_rounds": 2, "mesh.stage_microbatches": 2},
        "mesh.stage_microbatches",
        "use at least 4",
    ),
    ({**STAGES, "mesh.stage_microbatches": 5}, "train.global_batch_size", "use a multiple of 10"),
    (
        {**SPLASH, "mesh.context": 2, "mesh.context_exchange": "ring"},
        "mesh.context_exchange",
        "model.attention=xla_chunked",
    ),
    ({**SPLASH, "train.sequence_length": 192}, "train.sequence_length", "use a multiple of 128"),
    ({**SPLASH, "model.attention_chunk": 100}, "model.attention_chunk", "use 512"),
    ({"train.vocab_chunks": 3}, "train.vocab_chunks", "use 2"),
    ({"data.document_separator": 512}, "data.document_separator", "below 512"),
    ({"mesh.context": 8, "train.sequence_length": 1032}, "train.sequence_length", "1024 or 1040"),
    ({"mesh.tensor": 2, "train.sequence_length": 1023}, "train.sequence_length", "1022 or 1024"),
]
GOOD = [
    {**MEGABLOX, "mesh.expert": 4, "train.sequence_length": 1001},
    {**MEGABLOX, **V5E},
    {**EXPERTS, "model.num_shared_experts": 1, "model.expert_capacity": 1.25, "mesh.expert": 4},
    {"train.remat_policy": "named", "train.remat_save": ["query"], "train.remat_offload": ["layer_input"]},
    {**STAGES, "mesh.stage_rounds": 2, "mesh.stage_microbatches": 8},
    {**SPLASH, "mesh.context": 2, "mesh.tensor": 2},
    {"mesh.context": 4, "mesh.context_exchange": "ring", "train.vocab_chunks": 8},
    {"model.quantization": "int8", "mesh.tensor": 2},
]


def _recipe(changes: Mapping[str, Any]) -> Recipe:
    return recipe_from_dict(nest({**flatten(BASE), **changes}))


@pytest.mark.parametrize(("changes", "key", "fix"), BAD, ids=lambda value: str(value)[:40])
def test_refused_with_key_and_fix(changes: Mapping[str, Any], key: str, fix: str) -> None:
    (problem,) = check(_recipe(changes))
    assert problem.key == key
    assert fix in problem.fix
    assert problem.reason


@pytest.mark.parametrize("changes", GOOD, ids=lambda value: str(value)[:40])
def test_let_through(changes: Mapping[str, Any]) -> None:
    assert check(_recipe(changes)) == []
