"""The plan's parameter counts against the model that the trainer really builds, per matrix and per device."""

from __future__ import annotations

import math

import pytest

from recipes.load import nest, recipe_from_dict
from recipes.parallelism import mesh_shape
from recipes.parameters import count_active_parameters, count_parameters, parameters_per_device
from recipes.schema import ModelConfig, Recipe
from tests.unit.test_plan import LLAMA3_8B

MIXTRAL_8X7B = {
    "model.family": "mixtral",
    "model.vocab_size": 32000,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
}


def _recipe(**changes: object) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return recipe_from_dict(nest({**LLAMA3_8B, **dotted}))


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ({}, 8_030_261_248),
        (MIXTRAL_8X7B, 46_702_792_704),
        (
            {
                "model.num_layers": 126,
                "model.embed_dim": 16384,
                "model.mlp_dim": 53248,
                "model.num_heads": 128,
            },
            405_853_388_800,
        ),
    ],
    ids=["llama3-8b", "mixtral-8x7b", "llama3-405b"],
)
def test_the_published_counts_of_known_models(changes: dict[str, object], published: int) -> None:
    assert count_parameters(_recipe(**changes).model) == published


def test_a_token_meets_two_of_eight_experts() -> None:
    assert count_active_parameters(_recipe(**MIXTRAL_8X7B).model) == 12_879_925_248
    model = _recipe().model
    assert count_active_parameters(model) == count_parameters(model)


@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        ({}, {"mesh.tensor": 4}),
        ({"model.tie_embeddings": True}, {"mesh.tensor": 2, "multislice.data": 1, "multislice.fsdp": 2}),
        (MIXTRAL_8X7B, {"mesh.expert": 4, "mesh.tensor": 2}),
    ],
    ids=["dense", "tied", "experts"],
)
def test_counts_are_those_of_the_trainers_model(changes: dict[str, object], mesh: dict[str, int]) -> None:
    recipe = _recipe(**changes, **mesh)
    shape = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=64)
    total, per_device = _trainer_counts(recipe.model, dict(shape.total))
    assert count_parameters(recipe.model) == total
    assert parameters_per_device(recipe.model, shape) == per_device


def _trainer_counts(model: ModelConfig, degrees: dict[str, int]) -> tuple[int, int]:
    """All parameters, and those of one device by the trainer's own sharding table; nothing is allocated."""
    from flax import nnx

    from trainer.models.llama import Decoder
    from trainer.sharding import RULES

    decoder = nnx.eval_shape(lambda: Decoder(model, "none", rngs=nnx.Rngs(0)))
    total = per_device = 0
    for _, parameter in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        size = math.prod(parameter.get_value().shape)
        axes = [axis for name in parameter.get_metadata("out_sharding") if name for axis in RULES[name]]
        total += size
        per_device += size // math.prod(degrees[axis] for axis in axes)
    return total, per_device
