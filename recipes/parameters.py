"""Exact parameter counts of the decoder families, and how many of them one device holds. Pure.

The same matrices as in `trainer/models`; a test there compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipes.parallelism import MeshShape
from recipes.schema import ModelConfig

WEIGHT_BYTES = 4
"""float32."""

STATE_BYTES = 3 * WEIGHT_BYTES
"""Weight and the two moments of AdamW, of one parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Matrices of one kind, over all layers."""

    name: str
    count: int
    axes: tuple[str, ...]
    """Mesh axes that each matrix is divided over."""


def parameter_groups(model: ModelConfig) -> Sequence[ParameterGroup]:
    """All parameters of the model by kind."""
    return tuple(_groups(model))


def count_parameters(model: ModelConfig) -> int:
    """All parameters of the model."""
    return sum(group.count for group in parameter_groups(model))


def count_active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets: of the experts only those it is sent to."""
    idle = model.num_experts - model.num_experts_per_token
    return count_parameters(model) - model.num_layers * idle * _mlp_count(model)


def parameters_per_device(model: ModelConfig, mesh: MeshShape) -> int:
    """Parameters that one device holds between steps."""
    return sum(
        group.count // math.prod(mesh.total[axis] for axis in group.axes) for group in parameter_groups(model)
    )


def _groups(model: ModelConfig) -> Iterator[ParameterGroup]:
    layers, width = model.num_layers, model.embed_dim
    heads_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    table = model.vocab_size * width
    yield ParameterGroup(name="embedding", count=table, axes=("fsdp", "tensor"))
    attention = 2 * width * (heads_width + kv_width)
    yield ParameterGroup(name="attention", count=layers * attention, axes=("fsdp", "tensor"))
    if model.num_experts > 1:
        mlp = model.num_experts * _mlp_count(model)
        yield ParameterGroup(name="experts", count=layers * mlp, axes=("expert", "fsdp", "tensor"))
        yield ParameterGroup(name="router", count=layers * width * model.num_experts, axes=("fsdp",))
    else:
        yield ParameterGroup(name="mlp", count=layers * _mlp_count(model), axes=("fsdp", "tensor"))
    yield ParameterGroup(name="norms", count=(2 * layers + 1) * width, axes=())
    if not model.tie_embeddings:
        yield ParameterGroup(name="output", count=table, axes=("fsdp", "tensor"))


def _mlp_count(model: ModelConfig) -> int:
    """Gate, up and down of one MLP or expert."""
    return 3 * model.embed_dim * model.mlp_dim
