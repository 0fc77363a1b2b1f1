"""Loss and gradients of a recipe on a mesh of CPU devices, and how far two of them are apart."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recipes.fingerprint import fingerprint
from recipes.hardware import slice_shape
from recipes.schema import Recipe
from trainer import program
from trainer.devices import make_mesh
from trainer.feed import Feed
from trainer.optimizers import make_optimizer

LossAndGradients = tuple[float, Any]

_REFERENCES: dict[str, LossAndGradients] = {}
_WEIGHTS: dict[str, program.Params] = {}


def loss_and_gradients(recipe: Recipe) -> LossAndGradients:
    """On as many CPU devices as the recipe says, from its seed, on one fixed random batch."""
    num_devices = slice_shape(recipe.hardware).num_devices * recipe.multislice.num_slices
    mesh = make_mesh(recipe, jax.devices()[:num_devices])
    model = program._abstract_model(recipe, mesh)
    loss = functools.partial(program._loss, recipe, model.graphdef)
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, leaf: jax.device_put(x, leaf.sharding), _weights(recipe), model.params
        )
        state = program.TrainState(jnp.int32(0), params, ())
        feed = Feed(program.abstract_batch(recipe, mesh))
        shape = (recipe.train.global_batch_size, recipe.train.sequence_length + 1)
        sequences = np.random.default_rng(0).integers(recipe.model.vocab_size, size=shape, dtype=np.int32)
        batch = feed.place(sequences[list(feed.rows)])
        gradients, outcome = jax.jit(lambda state, batch: program._gradients(recipe, loss, state, batch))(
            state, batch
        )
        return float(outcome.cross_entropy), jax.device_get(gradients)


def _weights(recipe: Recipe) -> program.Params:
    """From the recipe's seed, made once for each experiment."""
    key = fingerprint(recipe)
    if key not in _WEIGHTS:
        optimizer = make_optimizer(recipe.optimizer, recipe.train.num_steps)
        init = jax.jit(lambda: program._init(recipe, optimizer, jnp.int32(recipe.train.seed)).params)
        _WEIGHTS[key] = jax.device_get(init())
    return _WEIGHTS[key]


def reference(recipe: Recipe) -> LossAndGradients:
    """The loss and gradients of a recipe of one device, computed once for each experiment."""
    key = fingerprint(recipe)
    if key not in _REFERENCES:
        _REFERENCES[key] = loss_and_gradients(recipe)
    return _REFERENCES[key]


def largest_error(ours: Any, theirs: Any) -> float:
    """Over all leaves: the largest difference over the largest magnitude of the leaf."""

    def error(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) + 1e-12))

    return max(map(float, jax.tree.leaves(jax.tree.map(error, ours, theirs))))


def assert_equal_gradients(
    recipe: Recipe, expected: LossAndGradients, *, loss: float, gradients: float
) -> None:
    """Within a relative tolerance for the loss, and one of each tensor's largest gradient."""
    our_loss, our_gradients = loss_and_gradients(recipe)
    np.testing.assert_allclose(our_loss, expected[0], rtol=loss)
    assert largest_error(our_gradients, expected[1]) < gradients
