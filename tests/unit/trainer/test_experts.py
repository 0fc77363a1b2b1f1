"""Routing: capacity in turn, balance without a loss, the router's losses, and the state that they need."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.schema import Recipe
from tests.unit.trainer.test_parallelism import EXPERTS
from tests.unit.trainer.test_program import run
from trainer.devices import make_mesh
from trainer.models.moe import _places, expert_places
from trainer.models.router import RouterStats, Routing, balanced, router_loss

MakeRecipe = Callable[..., Recipe]


def test_places_are_given_in_turn_and_first_choices_first() -> None:
    chosen_btp = jnp.array([[[0, 1], [0, 1], [1, 0], [0, 2]]])
    gate_btp = jnp.full((1, 4, 2), 0.5)
    dispatch, combine = _places(Routing(chosen_btp, gate_btp), 3, 2, jnp.float32)
    # Expert 0 takes tokens 0 and 1 (3 is too late), expert 1 token 2 and then token 0's second choice.
    taken = {tuple(map(int, index)) for index in np.argwhere(np.asarray(dispatch[0]))}
    assert taken == {(0, 0, 0), (1, 0, 1), (2, 1, 0), (0, 1, 1), (3, 2, 0)}
    np.testing.assert_array_equal(combine, 0.5 * dispatch)


@pytest.mark.parametrize(("capacity", "places"), [(1.0, 8), (1.25, 10), (0.1, 1), (9.0, 16)])
def test_places_of_an_expert(small: MakeRecipe, capacity: float, places: int) -> None:
    model = small({**EXPERTS, "model.expert_capacity": capacity}).model
    assert expert_places(model, 16) == places


def test_router_losses_by_hand(small: MakeRecipe) -> None:
    model = small({**EXPERTS, "model.router_loss_weight": 0.1, "model.router_z_loss_weight": 0.01}).model
    even = RouterStats(jnp.full((2, 4), 0.25), jnp.full((2, 4), 0.25), jnp.array([4.0, 2.0]))
    assert float(router_loss(model, even)) == pytest.approx(0.1 * 1 + 0.01 * 3)
    one = jnp.array([[1.0, 0, 0, 0]])
    assert float(router_loss(model, RouterStats(one, one, jnp.zeros(1)))) == pytest.approx(0.1 * 4)


def test_the_bias_moves_against_the_load() -> None:
    load = jnp.array([[0.4, 0.1, 0.25, 0.25]])
    np.testing.assert_allclose(balanced(jnp.zeros((1, 4)), load, 0.01), [[-0.01, 0.01, 0, 0]], atol=1e-7)


def test_bias_balancing_over_steps(small: MakeRecipe) -> None:
    changes = {**EXPERTS, "mesh.expert": 2, "model.weight_dtype": "bfloat16", "optimizer.weight_decay": 0.5}
    recipe = small({**changes, "model.router_bias_rate": 0.01})
    metrics, params = run(recipe, make_mesh(recipe), num_steps=4)
    balance = params["blocks"]["mlp"]["router"]["balance_e"]
    assert balance.dtype == np.float32
    # Only the rule moves it: whole steps of the rate, no gradient, no decay.
    np.testing.assert_allclose(np.round(balance / 0.01), balance / 0.01, atol=1e-4)
    assert np.any(balance != 0)
    assert all(1.0 <= step["train/expert_load_max"] <= 4.0 for step in metrics)


def test_state_in_narrow_types(small: MakeRecipe) -> None:
    recipe = small(
        {
            "model.weight_dtype": "bfloat16",
            "optimizer.first_moment_dtype": "bfloat16",
            "optimizer.second_moment_dtype": "bfloat16",
        }
    )
    metrics, params = run(recipe, make_mesh(recipe))
    exact, _ = run(small(), make_mesh(small()))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    for rounded, whole in zip(metrics, exact, strict=True):
        assert rounded["train/loss"] == pytest.approx(whole["train/loss"], rel=0.02)
