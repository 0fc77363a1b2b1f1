"""The run in miniature of a rehearsal: every axis and feature is still there, and every check passes."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest

from launcher.compose import compose
from recipes.check import check
from recipes.hardware import slice_shape
from recipes.miniature import NUM_STEPS, SAVE_INTERVAL_STEPS, miniature
from recipes.parallelism import AXES, recipe_mesh
from recipes.schema import Recipe

RECIPES = sorted(path.stem for path in Path(__file__).parents[2].joinpath("recipes").glob("*.yaml"))
MOST_PARAMETERS_OF_A_SIDE = 256


@pytest.mark.parametrize("name", RECIPES)
def test_shipped(name: str) -> None:
    recipe = compose(name, []).recipe
    small = miniature(recipe)
    check_kept(recipe, small)
    assert slice_shape(small.hardware).num_hosts * small.multislice.num_slices == 2


def check_kept(recipe: Recipe, small: Recipe) -> None:
    """All that a miniature promises."""
    assert check(small) == []
    assert miniature(small) == small
    before, after = recipe_mesh(recipe), recipe_mesh(small)
    for axis in AXES:
        assert (after.ici[axis], after.dcn[axis]) == (min(before.ici[axis], 2), min(before.dcn[axis], 2))
    check_model(recipe, small)
    kept = ("zero1", "context_exchange", "collective_matmul", "sharding_mode")
    assert [getattr(small.mesh, key) for key in kept] == [getattr(recipe.mesh, key) for key in kept]
    for key in ("remat_policy", "remat_save", "remat_offload", "seed"):
        assert getattr(small.train, key) == getattr(recipe.train, key)
    for old, new in (
        (recipe.mesh.stage_rounds, small.mesh.stage_rounds),
        (recipe.train.grad_accum_steps, small.train.grad_accum_steps),
        (recipe.train.vocab_chunks, small.train.vocab_chunks),
        (recipe.multislice.num_slices, small.multislice.num_slices),
    ):
        assert (new > 1) == (old > 1)
    assert (small.target.kind, small.hardware.generation) == ("local", "cpu")
    assert small.optimizer.learning_rate == recipe.optimizer.learning_rate
    assert NUM_STEPS >= 3 * SAVE_INTERVAL_STEPS, "no step to be killed in between two checkpoints"


def check_model(recipe: Recipe, small: Recipe) -> None:
    old, new = recipe.model, small.model
    sizes = {"num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size"}
    sizes |= {"num_experts", "num_experts_per_token", "num_shared_experts"}
    sizes |= {"attention_chunk", "attention_window"}
    for field in dataclasses.fields(old):
        if field.name not in sizes:
            assert getattr(new, field.name) == getattr(old, field.name), field.name
    assert (new.num_kv_heads < new.num_heads) == (old.num_kv_heads < old.num_heads)
    assert (new.num_experts > 1) == (old.num_experts > 1)
    assert new.num_experts <= max(4, recipe_mesh(small).total["expert"])
    assert (new.num_experts_per_token > 1) == (old.num_experts_per_token > 1)
    assert (new.num_shared_experts > 0) == (old.num_shared_experts > 0)
    assert (new.attention_window is None) == (old.attention_window is None)
    assert max(new.embed_dim, new.mlp_dim, new.num_heads * new.head_dim) <= MOST_PARAMETERS_OF_A_SIDE


@pytest.mark.parametrize("seed", range(8))
def test_meshes_and_features(seed: int) -> None:
    chance = random.Random(seed)
    base = compose("quickstart", ["data=synthetic"]).recipe
    found = [recipe for _ in range(120) if not check(recipe := any_recipe(base, chance))]
    assert len(found) >= 10, "too few of the recipes were valid to say anything"
    for recipe in found:
        check_kept(recipe, miniature(recipe))


def any_recipe(base: Recipe, chance: random.Random) -> Recipe:
    """A recipe for CPU devices that may well be valid."""
    ici = {axis: chance.choice((1, 1, 1, 2, 3, 4, 6)) for axis in AXES}
    dcn = {axis: chance.choice((1, 1, 2, 3)) for axis in ("data", "stage", "fsdp")}
    devices, slices = math.prod(ici.values()), math.prod(dcn.values())
    rounds = chance.choice((1, 2, 3))
    stages = ici["stage"] * dcn["stage"]
    replace = dataclasses.replace
    chunks = chance.choice((1, 2, 3, 8))
    accum = chance.choice((1, 2, 4))
    parts = chance.choice((None, stages, 3 * stages))
    shards = ici["data"] * dcn["data"] * ici["fsdp"] * dcn["fsdp"] * ici["expert"]
    mesh: dict[str, Any] = {**ici}
    mesh |= {"stage_rounds": rounds if stages > 1 else 1, "stage_microbatches": parts}
    mesh |= {"zero1": chance.random() < 0.5, "collective_matmul": chance.random() < 0.2}
    mesh |= {"sharding_mode": chance.choice(("auto", "auto", "explicit"))}
    mesh |= {"context_exchange": chance.choice(("all_gather", "ring"))}
    return replace(
        base,
        hardware=replace(base.hardware, topology=f"1x{devices}"),
        mesh=replace(base.mesh, **mesh),
        multislice=replace(base.multislice, num_slices=slices, **dcn),
        model=replace(base.model, **any_model(chance, stages * rounds, 12 * chunks)),
        train=replace(
            base.train,
            global_batch_size=accum * shards * (parts or stages),
            sequence_length=128 * 12 * ici["context"],
            grad_accum_steps=accum,
            vocab_chunks=chunks,
        ),
        data=replace(base.data, document_separator=chance.choice((None, 0, 3))),
    )


def any_model(chance: random.Random, num_layers: int, vocab_size: int) -> dict[str, Any]:
    experts = chance.choice((1, 1, 12, 24))
    attention = chance.choice(("xla", "xla_chunked", "splash"))
    model: dict[str, Any] = {
        "num_layers": num_layers,
        "vocab_size": vocab_size,
        "embed_dim": 36 * 4,
        "mlp_dim": 36,
        "num_kv_heads": chance.choice((1, 12)),
        "num_heads": chance.choice((12, 48)),
        "attention": attention,
        "attention_chunk": chance.choice((128, 384) if attention == "splash" else (3, 12, 128, 512)),
        "attention_window": chance.choice((None, None, 1, 5, 1000)),
        "dropout_rate": chance.choice((0.0, 0.0, 0.0, 0.1)),
        "quantization": chance.choice(("none", "none", "int8", "fp8")),
    }
    if experts > 1:
        model |= {
            "family": "mixtral",
            "num_experts": experts,
            "num_experts_per_token": chance.choice((1, 2, 8)),
        }
        model |= {"num_shared_experts": chance.choice((0, 3)), "expert_capacity": chance.choice((None, 1.25))}
        model |= {"grouped_matmul": chance.choice(("xla", "megablox"))}
    return model


def test_real_data_keep_their_vocabulary() -> None:
    changes = ["data=token-file", "data.path=tokens", "model.vocab_size=5001", "train.vocab_chunks=3"]
    recipe = compose("quickstart", changes).recipe
    assert miniature(recipe).model.vocab_size == 5002, "all tokens, in two chunks"
    small = miniature(recipe, synthetic_data=True)
    assert small.model.vocab_size == 256
    assert small.data.source == "synthetic"
    assert check(small) == []


def test_what_belongs_to_other_machines_is_left_out() -> None:
    recipe = compose(
        "llama3-8b-v5e-16x16",
        [
            "target=tpu-spot",
            "target.fallbacks=[us-south1-a]",
            "run.max_restarts=0",
            "run.deadline=2020-01-01T00:00Z",
            "run.max_cost=1",
            "hardware.compiler_flags.xla_tpu_scoped_vmem_limit_kib=65536",
            "target.env.NAME=1e-3",
        ],
    ).recipe
    small = miniature(recipe)
    assert check(small) == []
    assert (small.run.deadline, small.run.max_cost, small.run.max_restarts) == (None, None, 2)
    assert dict(small.hardware.compiler_flags) == {}
    assert dict(small.target.env) == {"NAME": "1e-3"}


def test_one_device_stays_one() -> None:
    recipe = compose("quickstart", ["hardware.topology=1x1", "multislice=one-slice"]).recipe
    small = miniature(recipe)
    check_kept(recipe, small)
    assert small.hardware.topology == "1x1"
