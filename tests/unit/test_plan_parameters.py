"""Counts and bytes of the plan against those of the model and the state that the trainer builds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from recipes.load import nest, recipe_from_dict
from recipes.parallelism import mesh_shape
from recipes.parameters import (
    count_active_parameters,
    count_parameters,
    parameter_groups,
    state_bytes,
    state_bytes_per_device,
)
from recipes.schema import Recipe
from tests.unit.test_plan import LLAMA3_8B

MIXTRAL_8X7B = {
    "model.family": "mixtral",
    "model.vocab_size": 32000,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
}
BALANCED = {**MIXTRAL_8X7B, "model.num_shared_experts": 2, "model.router_bias_rate": 0.001}
HALF = {"model.weight_dtype": "bfloat16", "optimizer.first_moment_dtype": "bfloat16"}
TWO_SLICES = {"multislice.data": 1, "multislice.fsdp": 2}


def _recipe(**changes: Any) -> Recipe:
    return recipe_from_dict(nest({**LLAMA3_8B, **changes}))


def test_a_token_meets_two_of_eight_experts() -> None:
    assert count_active_parameters(_recipe(**MIXTRAL_8X7B).model) == 12_879_925_248
    model = _recipe().model
    assert count_active_parameters(model) == count_parameters(model)


def test_a_token_meets_all_shared_experts_and_the_whole_bias() -> None:
    more = 32 * (2 * 3 * 4096 * 14336 + 8)
    assert count_parameters(_recipe(**BALANCED).model) == 46_702_792_704 + more
    assert count_active_parameters(_recipe(**BALANCED).model) == 12_879_925_248 + more


def test_groups_are_named() -> None:
    groups = {group.name: group.count for group in parameter_groups(_recipe(**BALANCED).model)}
    assert groups == {
        "embedding": 32_000 * 4096,
        "attention": 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024),
        "norms": 32 * 2 * 4096,
        "experts": 32 * 8 * 2 * 4096 * 14336,
        "expert outputs": 32 * 8 * 4096 * 14336,
        "shared experts": 32 * 2 * 3 * 4096 * 14336,
        "router": 32 * 4096 * 8,
        "router bias": 32 * 8,
        "final norm": 4096,
        "output": 32_000 * 4096,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.tensor": 4},
        {"model.tie_embeddings": True, "mesh.tensor": 2, **TWO_SLICES},
        {**MIXTRAL_8X7B, "mesh.expert": 4, "mesh.tensor": 2},
        {**BALANCED, **HALF, "mesh.expert": 2},
        {**HALF, "mesh.data": 4, "mesh.zero1": True},
        {**MIXTRAL_8X7B, "mesh.data": 2, "mesh.expert": 4, "mesh.zero1": True},
        {**MIXTRAL_8X7B, "model.mlp_dim": 14340, "mesh.data": 2, "mesh.expert": 4, "mesh.zero1": True},
        # 4096 cannot be divided over 3 replicas besides, so moments stay as their weights
        {"hardware.topology": "4x4x12", "mesh.data": 3, "mesh.zero1": True, "mesh.tensor": 1},
        {"mesh.stage": 4, "mesh.tensor": 2},
        {"model.mlp_activation": "relu", "mesh.tensor": 2},
        {**BALANCED, "mesh.stage": 2, "multislice.data": 1, "multislice.stage": 2},
    ],
    ids=[
        *("dense", "tied", "experts", "balanced", "zero1", "both", "odd-rows"),
        *("unfit", "stages", "relu", "stages-dcn"),
    ],
)
def test_counts_and_bytes_are_those_of_the_trainer(changes: dict[str, Any]) -> None:
    recipe = _recipe(**changes)
    num_devices = math.prod(map(int, recipe.hardware.topology.split("x")))
    shape = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=num_devices)
    count, total_bytes, device_bytes = _trainer_state(recipe, shape.total)
    assert count_parameters(recipe.model) == count
    assert state_bytes(recipe) == total_bytes
    assert state_bytes_per_device(recipe, shape) == device_bytes


def _trainer_state(recipe: Recipe, degrees: Mapping[str, int]) -> tuple[int, int, int]:
    """Parameters, bytes of all state, and of one device, by the trainer's own model, optimizer and table.

    Nothing is allocated.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from trainer.execution import execution_of
    from trainer.models.decoder import Decoder
    from trainer.optimizers import make_optimizer
    from trainer.sharding import named_sharding, zero1_sharding

    mesh: Any = jax.sharding.AbstractMesh(tuple(degrees.values()), tuple(degrees))
    decoder = nnx.eval_shape(lambda: Decoder(recipe.model, execution_of(recipe), rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(recipe.optimizer, recipe.train.num_steps)
    count = total_bytes = device_bytes = 0
    for _, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        shape, axes = variable.get_value().shape, variable.get_metadata("out_sharding")
        weight = jax.ShapeDtypeStruct(shape, jnp.dtype(recipe.model.weight_dtype))
        of_weight = named_sharding(mesh, axes)
        of_moment = zero1_sharding(mesh, axes, shape) if recipe.mesh.zero1 else of_weight
        opt_state = jax.eval_shape(optimizer.init, {"weight": weight})
        moments = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.shape == shape]
        assert len(moments) == 2
        count += math.prod(shape)
        for leaf, sharding in ((weight, of_weight), *((moment, of_moment) for moment in moments)):
            total_bytes += math.prod(shape) * leaf.dtype.itemsize
            device_bytes += math.prod(sharding.shard_shape(shape)) * leaf.dtype.itemsize
    return count, total_bytes, device_bytes
