"""Every parallelism and every pair of two gives the loss and the gradients of one device.

Tolerances: float32, loss 1e-5 and gradients 1e-5 of the largest of each tensor. Narrower types are
rounded after sums in another order: bfloat16 1e-2 and 5e-2, int8 1e-2 and 1e-1, fp8 (whose gradients
have two digits of mantissa) 1e-2 and 4e-1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from recipes.load import keys
from recipes.schema import Recipe
from recipes.schema_key import Effect
from tests.unit.trainer.gradients import assert_equal_gradients, reference

MakeRecipe = Callable[..., Recipe]

FLOAT32 = {"loss": 1e-5, "gradients": 1e-5}
NARROW = {
    "none": {"loss": 1e-2, "gradients": 5e-2},
    "int8": {"loss": 1e-2, "gradients": 1e-1},
    "fp8": {"loss": 1e-2, "gradients": 4e-1},
}
"""By ``model.quantization``, computing in bfloat16."""
ONE = {"hardware.topology": "1x1"}
EXPERTS = {
    "model.family": "mixtral",
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.router_loss_weight": 0.0,
}
"""Without the router's loss, a mean over the batch that accumulation and pipelines take by parts."""

SINGLE: Mapping[str, Mapping[str, Any]] = {
    "data": {"mesh.data": 2},
    "stage": {"mesh.stage": 2},
    "fsdp": {"mesh.fsdp": 2},
    "context": {"mesh.context": 2},
    "ring": {"mesh.context": 2, "mesh.context_exchange": "ring"},
    "expert": {"mesh.expert": 2},
    "tensor": {"mesh.tensor": 2},
}
PAIRS = [pair for pair in itertools.combinations(SINGLE, 2) if pair != ("context", "ring")]
SLICES = {"hardware.topology": "1x4", "multislice.num_slices": 2, "multislice.data": 1}
MULTISLICE: Mapping[str, Mapping[str, Any]] = {
    "data over DCN": {**SLICES, "multislice.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "fsdp over DCN": {**SLICES, "multislice.fsdp": 2, "mesh.fsdp": 2, "mesh.context": 2},
    "stage over DCN": {**SLICES, "multislice.stage": 2, "mesh.fsdp": 2, "mesh.data": 2},
}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "8 of fsdp": {"mesh.fsdp": 8},
    "3 axes": {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2},
    "zero1": {"mesh.data": 4, "mesh.zero1": True, "mesh.tensor": 2},
    "accumulation": {"train.grad_accum_steps": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "ring of 4 in chunks": {
        "mesh.context": 4,
        "mesh.context_exchange": "ring",
        "model.attention": "xla_chunked",
        "model.attention_chunk": 2,
    },
    "chunks over context": {
        "mesh.context": 2,
        "model.attention": "xla_chunked",
        "model.attention_chunk": 4,
    },
    "collective matmul": {"mesh.tensor": 2, "mesh.collective_matmul": True, "mesh.fsdp": 2},
    "vocabulary chunks": {"train.vocab_chunks": 4, "mesh.tensor": 2, "mesh.fsdp": 2},
    "circular pipeline": {
        "model.num_layers": 4,
        "mesh.stage": 2,
        "mesh.stage_rounds": 2,
        "mesh.stage_microbatches": 4,
        "mesh.fsdp": 2,
    },
    "documents": {"data.document_separator": 3, "mesh.context": 2},
    "documents in a pipeline": {"data.document_separator": 3, "mesh.stage": 2},
    "window and cap": {"model.attention_window": 5, "model.attention_soft_cap": 3.0, "mesh.context": 2},
    "tied": {"model.tie_embeddings": True, "mesh.tensor": 2, "mesh.fsdp": 2, "train.vocab_chunks": 2},
    "relu": {"model.mlp_activation": "relu", "mesh.tensor": 2, "mesh.collective_matmul": True},
    "minimal": {"train.remat_policy": "minimal", "mesh.fsdp": 2},
    "named": {
        "train.remat_policy": "named",
        "train.remat_save": ["query", "mlp_up"],
        "train.remat_offload": ["layer_input", "attention_out"],
        "mesh.tensor": 2,
    },
}
EXPERT_FORMS: Mapping[str, Mapping[str, Any]] = {
    "4 of expert": {"mesh.expert": 4},
    "pipeline": {"mesh.expert": 2, "mesh.stage": 2},
    "capacity": {"model.expert_capacity": 0.75, "mesh.expert": 2, "mesh.context": 2},
    "shared": {"model.num_shared_experts": 2, "mesh.expert": 2, "mesh.tensor": 2},
    "megablox": {"model.grouped_matmul": "megablox", "mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "named": {
        "train.remat_policy": "named",
        "train.remat_save": ["mlp_gate"],
        "train.remat_offload": ["mlp_out"],
        "mesh.expert": 2,
    },
}
EXPLICIT: Mapping[str, Mapping[str, Any]] = {
    "fsdp and data": {"mesh.fsdp": 2, "mesh.data": 2, "mesh.zero1": True},
    "tensor and fsdp": {"mesh.tensor": 2, "mesh.fsdp": 2, "train.vocab_chunks": 2},
    "context and tensor": {"mesh.context": 2, "mesh.tensor": 2, "train.grad_accum_steps": 2},
    "collective matmul": {"mesh.tensor": 2, "mesh.collective_matmul": True},
}
EXPLICIT_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "dropless": {"mesh.expert": 2, "mesh.tensor": 2, "model.num_shared_experts": 1},
    "capacity": {"mesh.expert": 2, "mesh.fsdp": 2, "model.expert_capacity": 1.0},
    "megablox": {"mesh.expert": 2, "mesh.fsdp": 2, "model.grouped_matmul": "megablox"},
}


def on(changes: Mapping[str, Any]) -> dict[str, Any]:
    """With fsdp 1 unless said otherwise, on as many devices as the degrees make."""
    count = 1
    for key, value in changes.items():
        if key.startswith("mesh.") and isinstance(value, int) and key.split(".")[1] in SINGLE:
            count *= value
    topology = {} if "hardware.topology" in changes else {"hardware.topology": f"1x{count}"}
    return {"mesh.fsdp": 1, **topology, **changes}


def experiment(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Of the changes those that are not about how it is computed."""
    return {key: value for key, value in changes.items() if keys()[key].effect is Effect.EXPERIMENT}


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs(small: MakeRecipe, pair: tuple[str, str]) -> None:
    base = EXPERTS if "expert" in pair else {}
    changes = {**SINGLE[pair[0]], **SINGLE[pair[1]]}
    assert_equal_gradients(small(on({**base, **changes})), reference(small({**base, **ONE})), **FLOAT32)


@pytest.mark.parametrize("name", MULTISLICE)
def test_several_slices(small: MakeRecipe, name: str) -> None:
    assert_equal_gradients(small(MULTISLICE[name]), reference(small(ONE)), **FLOAT32)


@pytest.mark.parametrize("name", FORMS)
def test_forms(small: MakeRecipe, name: str) -> None:
    changes = FORMS[name]
    expected = reference(small({**experiment(changes), **ONE}))
    assert_equal_gradients(small(on(changes)), expected, **FLOAT32)


@pytest.mark.parametrize("name", EXPERT_FORMS)
def test_forms_of_experts(small: MakeRecipe, name: str) -> None:
    changes = {**EXPERTS, **EXPERT_FORMS[name]}
    expected = reference(small({**EXPERTS, **experiment(changes), **ONE}))
    assert_equal_gradients(small(on(changes)), expected, **FLOAT32)


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_axes(small: MakeRecipe, name: str) -> None:
    changes = {"mesh.sharding_mode": "explicit", **EXPLICIT[name]}
    assert_equal_gradients(small(on(changes)), reference(small(ONE)), **FLOAT32)


@pytest.mark.parametrize("name", EXPLICIT_EXPERTS)
def test_explicit_axes_with_experts(small: MakeRecipe, name: str) -> None:
    changes = {"mesh.sharding_mode": "explicit", **EXPERTS, **EXPLICIT_EXPERTS[name]}
    expected = reference(small({**EXPERTS, **experiment(changes), **ONE}))
    assert_equal_gradients(small(on(changes)), expected, **FLOAT32)


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_types(small: MakeRecipe, kind: str) -> None:
    changes = {"model.compute_dtype": "bfloat16", "model.quantization": kind}
    expected = reference(small({**changes, **ONE}))
    recipe = small(on({**changes, "mesh.fsdp": 2, "mesh.tensor": 2}))
    assert_equal_gradients(recipe, expected, **NARROW[kind])
