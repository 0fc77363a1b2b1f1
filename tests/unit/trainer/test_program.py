"""The same numbers whatever the mesh, the accumulation and the number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from recipes.fingerprint import fingerprint
from recipes.flops import step_flops, token_flops
from recipes.parallelism import AXES, mesh_shape
from recipes.schema import Recipe
from trainer.devices import _cpu_grid, make_mesh
from trainer.feed import Feed
from trainer.optimizers import learning_rate_schedule, make_optimizer
from trainer.program import abstract_batch, build_program

MakeRecipe = Callable[..., Recipe]

MESHES = {
    "data 8": {"mesh.data": 8, "mesh.fsdp": 1},
    "fsdp 8": {"mesh.fsdp": 8},
    "fsdp 4 tensor 2": {"mesh.fsdp": 4, "mesh.tensor": 2},
    "fsdp 2 context 4": {"mesh.fsdp": 2, "mesh.context": 4},
    "2 slices, data over DCN": {"hardware.topology": "1x4", "multislice.num_slices": 2},
    "2 slices, fsdp over DCN": {
        "hardware.topology": "1x4",
        "multislice.num_slices": 2,
        "multislice.data": 1,
        "multislice.fsdp": 2,
    },
    "accumulation": {"train.grad_accum_steps": 4, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context": 2},
}
EXPERT_MESHES = {
    "fsdp 8": {"mesh.fsdp": 8},
    "expert 4 tensor 2": {"mesh.expert": 4, "mesh.tensor": 2, "mesh.fsdp": 1},
    "expert 2 fsdp 2 context 2": {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.context": 2},
}
EXPERTS = {
    "model.family": "mixtral",
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.router_loss_weight": 0.01,
}


def run(recipe: Recipe, mesh: Mesh, num_steps: int = 3) -> tuple[list[dict[str, float]], Any]:
    """Metrics of each step and the final weights, on fixed random batches."""
    program = build_program(recipe, mesh)
    feed = Feed(program.batch)
    rng = np.random.default_rng(0)
    metrics = []
    with jax.set_mesh(mesh):
        state = program.init(jnp.int32(0))
        for _ in range(num_steps):
            shape = (recipe.train.global_batch_size, recipe.train.sequence_length + 1)
            sequences = rng.integers(recipe.model.vocab_size, size=shape, dtype=np.int32)
            state, step_metrics = program.train_step(state, feed.place(sequences[list(feed.rows)]))
            metrics.append({name: float(value) for name, value in step_metrics.items()})
    return metrics, jax.device_get(state.params)


def one_device() -> Mesh:
    grid = np.array(jax.devices()[:1]).reshape([1] * len(AXES))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


_REFERENCES: dict[str, tuple[list[dict[str, float]], Any]] = {}


def on_one_device(recipe: Recipe) -> tuple[list[dict[str, float]], Any]:
    """Computed once for each experiment."""
    key = fingerprint(recipe)
    if key not in _REFERENCES:
        _REFERENCES[key] = run(recipe, one_device())
    return _REFERENCES[key]


def assert_same(recipe: Recipe, reference: Recipe) -> None:
    metrics, params = run(recipe, make_mesh(recipe))
    expected, expected_params = on_one_device(reference)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, expected_params)


@pytest.mark.parametrize("name", MESHES)
def test_mesh_does_not_change_the_numbers(small: MakeRecipe, name: str) -> None:
    assert_same(small(MESHES[name]), small())


@pytest.mark.parametrize("name", EXPERT_MESHES)
def test_mesh_does_not_change_the_numbers_of_experts(small: MakeRecipe, name: str) -> None:
    assert_same(small({**EXPERTS, **EXPERT_MESHES[name]}), small(EXPERTS))


def test_weights_and_moments_are_divided(small: MakeRecipe) -> None:
    recipe = small({"mesh.fsdp": 4, "mesh.tensor": 2})
    state = build_program(recipe, make_mesh(recipe)).state
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.ndim > 2:
            shard = leaf.sharding.shard_shape(leaf.shape)
            assert np.prod(shard) == leaf.size // 8, leaf


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_slices_are_contiguous_and_outermost(count: int, small: MakeRecipe) -> None:
    recipe = small({"hardware.topology": f"1x{8 // count}", "multislice.num_slices": count, "mesh.fsdp": -1})
    shape = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=8 // count)
    grid = _cpu_grid(jax.devices(), shape)
    by_slice = grid.reshape(count, -1)
    ids = [[device.id for device in row] for row in by_slice]
    assert ids == np.arange(8).reshape(count, -1).tolist()


def test_feed_reads_only_its_rows_and_keeps_their_order(small: MakeRecipe) -> None:
    recipe = small({"train.grad_accum_steps": 2, "mesh.fsdp": 4, "mesh.context": 2})
    feed = Feed(abstract_batch(recipe, make_mesh(recipe)))
    assert list(feed.rows) == list(range(8))
    sequences = np.arange(8 * 17, dtype=np.int32).reshape(8, 17)
    batch = feed.place(sequences)
    np.testing.assert_array_equal(np.asarray(batch.tokens_abt).reshape(8, 16), sequences[:, :-1])
    np.testing.assert_array_equal(np.asarray(batch.targets_abt).reshape(8, 16), sequences[:, 1:])


def test_dropout_is_a_function_of_the_step(small: MakeRecipe) -> None:
    recipe = small({"model.dropout_rate": 0.3})
    first, _ = run(recipe, make_mesh(recipe))
    again, _ = run(recipe, make_mesh(recipe))
    plain, _ = run(small(), make_mesh(recipe))
    assert first == again
    assert first != plain


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 0, 0.0),
        ("cosine", 5, 0.5),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.55),
        ("cosine", 110, 0.1),
        ("constant", 10, 1.0),
        ("constant", 110, 1.0),
    ],
)
def test_learning_rate(small: MakeRecipe, schedule: str, step: int, expected: float) -> None:
    recipe = small(
        {"optimizer.learning_rate": 1.0, "optimizer.warmup_steps": 10, "optimizer.schedule": schedule}
    )
    assert float(learning_rate_schedule(recipe.optimizer, 110)(step)) == pytest.approx(expected, abs=1e-6)


def test_norms_are_not_decayed_and_gradients_are_clipped(small: MakeRecipe) -> None:
    config = dataclasses.replace(small().optimizer, schedule="constant", weight_decay=1.0)
    optimizer = make_optimizer(config, 10)
    params = {"norm": {"scale_d": jnp.ones(4)}, "mlp": {"up_df": jnp.ones((4, 4))}}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["norm"]["scale_d"], 0)
    np.testing.assert_allclose(updates["mlp"]["up_df"], -config.learning_rate)
    clip = optax.clip_by_global_norm(1.0)
    large = jax.tree.map(lambda leaf: 100 * leaf, params)
    clipped, _ = clip.update(large, clip.init(params))
    assert float(optax.tree.norm(clipped)) == pytest.approx(1.0)


def test_flops_of_llama3_8b_are_close_to_6_n(small: MakeRecipe) -> None:
    recipe = small(
        {
            "model.vocab_size": 128_256,
            "model.num_layers": 32,
            "model.embed_dim": 4096,
            "model.mlp_dim": 14_336,
            "model.num_heads": 32,
            "model.num_kv_heads": 8,
            "model.head_dim": 128,
        }
    )
    matmul_weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert token_flops(recipe.model, 0) == 6 * matmul_weights
    assert token_flops(recipe.model, 8192) == 6 * matmul_weights + 6 * 32 * 4096 * 8192
    assert step_flops(recipe) == 8 * 16 * token_flops(recipe.model, 16)
