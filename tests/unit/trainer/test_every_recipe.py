"""Every complete recipe, with a small model on eight CPU devices, trains."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launcher.compose import compose
from recipes.check import check
from recipes.schema import Recipe
from trainer.devices import make_mesh
from trainer.feed import Feed
from trainer.program import build_program

RECIPES = sorted(path.stem for path in Path(__file__).parents[3].joinpath("recipes").glob("*.yaml"))


def small(recipe: Recipe) -> Recipe:
    """The recipe's own mesh axes, slices, accumulation, remat, attention and schedule; all else small."""
    model = dataclasses.replace(
        recipe.model,
        vocab_size=256,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        attention_chunk=128,
    )
    parallel = {axis: min(getattr(recipe.mesh, axis), 2) for axis in ("tensor", "context", "expert")}
    return dataclasses.replace(
        recipe,
        model=model,
        mesh=dataclasses.replace(recipe.mesh, **parallel),
        hardware=dataclasses.replace(
            recipe.hardware,
            generation="cpu",
            topology=f"1x{8 // recipe.multislice.num_slices}",
            chips_per_host=None,
        ),
        target=dataclasses.replace(recipe.target, kind="local"),
        optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=1, learning_rate=1e-2),
        train=dataclasses.replace(recipe.train, num_steps=3, global_batch_size=16, sequence_length=128),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps(name: str) -> None:
    recipe = small(compose(name, []).recipe)
    assert not check(recipe)
    mesh = make_mesh(recipe)
    program = build_program(recipe, mesh)
    feed = Feed(program.batch)
    sequences = np.random.default_rng(0).integers(256, size=(len(feed.rows), 129), dtype=np.int32)
    losses = []
    with jax.set_mesh(mesh):
        state = program.init(jnp.int32(recipe.train.seed))
        for _ in range(3):
            state, metrics = program.train_step(state, feed.place(sequences))
            losses.append(float(metrics["train/loss"]))
    assert int(state.step) == 3
    assert losses[0] == pytest.approx(math.log(256), rel=0.2)
    assert losses[-1] < losses[0]
