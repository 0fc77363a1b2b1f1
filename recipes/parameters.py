"""Exact parameter counts of the decoder families, and the bytes of state that they make. Pure.

The same matrices as in `trainer/models`; `tests/unit/test_plan_parameters.py` compares the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipes.parallelism import MeshShape
from recipes.schema import ModelConfig, Recipe

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_EXPERT_OUTPUTS = "expert outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters of one kind, over all layers."""

    name: str
    count: int
    active: int
    """Those that one token meets: of the experts only the ones it is sent to."""
    axes: tuple[str, ...]
    """Mesh axes that each is divided over."""
    is_matrix: bool = True
    """Tokens are multiplied with it; not looked up, scaled or shifted."""


def parameter_groups(model: ModelConfig) -> Sequence[ParameterGroup]:
    """All parameters of the model by kind."""
    return tuple(_groups(model))


def count_parameters(model: ModelConfig) -> int:
    """All parameters of the model."""
    return sum(group.count for group in parameter_groups(model))


def count_active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets."""
    return sum(group.active for group in parameter_groups(model))


def count_matmul_parameters(model: ModelConfig) -> int:
    """Parameters of the matrices that one token is multiplied with."""
    return sum(group.active for group in parameter_groups(model) if group.is_matrix)


def state_bytes(recipe: Recipe) -> int:
    """Weights and the optimizer's moments: what a checkpoint holds."""
    return count_parameters(recipe.model) * sum(_bytes(recipe))


def state_bytes_per_device(recipe: Recipe, mesh: MeshShape) -> int:
    """What one device holds of them between steps."""
    weight_bytes, moment_bytes = _bytes(recipe)
    total = 0
    for group in parameter_groups(recipe.model):
        count = sharded_count(group, mesh)
        total += count * weight_bytes + count // _zero1_degree(recipe, mesh, group) * moment_bytes
    return total


def sharded_count(group: ParameterGroup, mesh: MeshShape) -> int:
    """Parameters of the group that one device holds."""
    return group.count // math.prod(mesh.total[axis] for axis in group.axes)


def divides_expert_rows(model: ModelConfig, mesh: MeshShape) -> bool:
    """Whether fsdp divides the rows (f) of an expert's output matrix instead of its width (d).

    Gathered along rows it is in the layout that a matmul takes; along the width, its last dimension, it has
    to be copied into it (for 8 x 14336 x 4096 on v5p 5.5 M cycles, forward and once more backward).
    """
    return model.mlp_dim % (mesh.total["tensor"] * mesh.total["fsdp"]) == 0


def _zero1_degree(recipe: Recipe, mesh: MeshShape, group: ParameterGroup) -> int:
    """Parts over data that moments are in: along the width, which fsdp usually divides too, where it fits."""
    replicas, parts = mesh.total["data"], mesh.total["fsdp"]
    if group.name == _EXPERT_OUTPUTS and divides_expert_rows(recipe.model, mesh):
        parts = 1
    fits = recipe.model.embed_dim % (parts * replicas) == 0
    return replicas if recipe.mesh.zero1 and "fsdp" in group.axes and fits else 1


def _bytes(recipe: Recipe) -> tuple[int, int]:
    """Of one parameter: its weight, and its moments."""
    first, second = recipe.optimizer.first_moment_dtype, recipe.optimizer.second_moment_dtype
    return DTYPE_BYTES[recipe.model.weight_dtype], DTYPE_BYTES[first] + DTYPE_BYTES[second]


def _groups(model: ModelConfig) -> Iterator[ParameterGroup]:
    width, table = model.embed_dim, model.vocab_size * model.embed_dim
    yield _group("embedding", table, ("fsdp", "tensor"), is_matrix=model.tie_embeddings)
    for group in (*_attention_groups(model), *_mlp_groups(model)):
        yield dataclasses.replace(
            group,
            count=model.num_layers * group.count,
            active=model.num_layers * group.active,
            axes=("stage", *group.axes),
        )
    yield _group("final norm", width, (), is_matrix=False)
    if not model.tie_embeddings:
        yield _group("output", table, ("fsdp", "tensor"))


def _attention_groups(model: ModelConfig) -> Iterator[ParameterGroup]:
    """Of one layer; both its norms are among them."""
    heads = 2 * (model.num_heads + model.num_kv_heads)
    yield _group("attention", model.embed_dim * heads * model.head_dim, ("fsdp", "tensor"))
    yield _group("norms", 2 * model.embed_dim, (), is_matrix=False)


def _mlp_groups(model: ModelConfig) -> Iterator[ParameterGroup]:
    """Of one layer."""
    num_matrices = {"swiglu": 3, "relu": 2}[model.mlp_activation]
    matrix = model.embed_dim * model.mlp_dim
    mlp = num_matrices * matrix
    if model.num_experts == 1:
        yield _group("mlp", mlp, ("fsdp", "tensor"))
        return
    for name, size in (("experts", mlp - matrix), (_EXPERT_OUTPUTS, matrix)):
        yield ParameterGroup(
            name=name,
            count=model.num_experts * size,
            active=model.num_experts_per_token * size,
            axes=("expert", "fsdp", "tensor"),
        )
    if model.num_shared_experts:
        yield _group("shared experts", model.num_shared_experts * mlp, ("fsdp", "tensor"))
    yield _group("router", model.embed_dim * model.num_experts, ("fsdp",))
    if model.router_bias_rate > 0:
        yield _group("router bias", model.num_experts, (), is_matrix=False)


def _group(name: str, count: int, axes: tuple[str, ...], *, is_matrix: bool = True) -> ParameterGroup:
    """Parameters that every token meets."""
    return ParameterGroup(name=name, count=count, active=count, axes=axes, is_matrix=is_matrix)
