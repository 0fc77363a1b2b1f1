"""What runs on the devices: the train state, its shardings, and the compiled init, train and eval steps.

Legend: a accumulation part, b sequence of one part, t position, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipes.schema import Recipe
from trainer.models.llama import Decoder
from trainer.optimizers import learning_rate_schedule, make_optimizer
from trainer.sharding import named_sharding

Params = dict[str, Any]
Metrics = Mapping[str, jax.Array]
Loss = Callable[[Params, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]
Gradient = Callable[[Params, jax.Array, jax.Array, jax.Array | None], tuple[Params, jax.Array]]


class TrainState(NamedTuple):
    """Everything that a checkpoint holds."""

    step: jax.Array
    """int32 scalar: optimizer steps completed."""
    params: Params
    """Nested dict of float32 weights."""
    opt_state: optax.OptState


class Batch(NamedTuple):
    """One global batch; int32 (a, b, t) each, ``targets_abt`` one position ahead."""

    tokens_abt: jax.Array
    targets_abt: jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Compiled steps of one recipe on one mesh."""

    state: TrainState
    """Abstract: jax.ShapeDtypeStruct leaves with the shardings of the mesh."""
    batch: Batch
    """Abstract, likewise."""
    init: jax.stages.Wrapped
    """(seed: int32 scalar) -> TrainState."""
    train_step: jax.stages.Compiled
    """(state, batch) -> (state, metrics); donates the state."""
    eval_step: jax.stages.Wrapped
    """(params, batch) -> mean loss over the batch, float32 scalar."""


def build_program(recipe: Recipe, mesh: Mesh) -> Program:
    """Lowers and compiles the train step; init and eval compile at their first use."""
    abstract_params, graphdef = _abstract_model(recipe, mesh)
    optimizer = make_optimizer(recipe.optimizer, recipe.train.num_steps)
    state = _abstract_state(abstract_params, optimizer, mesh)
    batch = abstract_batch(recipe, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

    loss = functools.partial(_loss, recipe, graphdef)
    init = jax.jit(
        functools.partial(_init, recipe, optimizer),
        out_shardings=shardings,
        compiler_options=_run_once_options(mesh),
    )
    train_step = jax.jit(
        functools.partial(_train_step, recipe, optimizer, loss),
        donate_argnums=0,
        out_shardings=(shardings, replicated),
    )
    eval_step = jax.jit(functools.partial(_eval_step, loss), out_shardings=replicated)
    with jax.set_mesh(mesh):
        compiled = train_step.lower(state, batch).compile()
    return Program(
        state=state,
        batch=batch,
        init=init,
        train_step=compiled,
        eval_step=eval_step,
    )


def abstract_batch(recipe: Recipe, mesh: Mesh) -> Batch:
    """Shape and sharding of a global batch, in ``grad_accum_steps`` parts."""
    parts = recipe.train.grad_accum_steps
    shape = (parts, recipe.train.global_batch_size // parts, recipe.train.sequence_length)
    sharding = named_sharding(mesh, (None, "batch", "sequence"))
    leaf = _abstract(shape, jnp.int32, sharding)
    return Batch(leaf, leaf)


def _run_once_options(mesh: Mesh) -> dict[str, bool | str] | None:
    """On CPU a program that runs once costs more to optimise than to run."""
    return {"xla_backend_optimization_level": "0"} if mesh.devices.flat[0].platform == "cpu" else None


def _abstract(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, sharding: NamedSharding) -> jax.Array:
    """A ShapeDtypeStruct, typed as the array that it stands for."""
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))


def _new_model(recipe: Recipe, seed: jax.Array | int) -> Decoder:
    return Decoder(recipe.model, recipe.train.remat_policy, rngs=nnx.Rngs(params=jax.random.key(seed)))


def _abstract_model(recipe: Recipe, mesh: Mesh) -> tuple[Params, nnx.GraphDef[Decoder]]:
    """Nested dict of ShapeDtypeStructs with shardings, and the model without its weights."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _new_model(recipe, 0)))

    def sharded(variable: nnx.Variable[Any]) -> jax.Array:
        sharding = named_sharding(mesh, variable.get_metadata("out_sharding"))
        return _abstract(variable.shape, variable.dtype, sharding)

    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    params = nnx.to_pure_dict(jax.tree.map(sharded, state, is_leaf=is_variable))
    return params, graphdef


def _abstract_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Optimizer moments are divided as their weights; counters are whole on every device."""
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, weight: _abstract(leaf.shape, leaf.dtype, weight.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: _abstract(leaf.shape, leaf.dtype, replicated),
    )
    return TrainState(_abstract((), jnp.int32, replicated), params, opt_state)


def _init(recipe: Recipe, optimizer: optax.GradientTransformation, seed: jax.Array) -> TrainState:
    params = nnx.to_pure_dict(nnx.state(_new_model(recipe, seed)))
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def _loss(
    recipe: Recipe,
    graphdef: nnx.GraphDef[Decoder],
    params: Params,
    tokens_bt: jax.Array,
    targets_bt: jax.Array,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Loss to minimise (with the router's share) and mean cross-entropy in nats per token."""
    model: Decoder = nnx.merge(graphdef, _as_state(params))
    logits_btv, router_loss = model(tokens_bt, dropout_key)
    cross_entropy = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_btv, targets_bt))
    return cross_entropy + recipe.model.router_loss_weight * router_loss, cross_entropy


def _as_state(params: Params) -> nnx.State[Any, Any]:
    return nnx.State(jax.tree.map(nnx.Param, params))


def _train_step(
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    grads, cross_entropy = _gradients(recipe, loss, state, batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "train/loss": cross_entropy,
        "train/grad_norm": optax.tree.norm(grads),
        "train/learning_rate": jnp.float32(
            learning_rate_schedule(recipe.optimizer, recipe.train.num_steps)(state.step)
        ),
    }
    return TrainState(state.step + 1, params, opt_state), metrics


def _gradients(recipe: Recipe, loss: Loss, state: TrainState, batch: Batch) -> tuple[Params, jax.Array]:
    """Mean gradient and mean cross-entropy over the accumulation parts."""
    parts = recipe.train.grad_accum_steps
    grad: Gradient = jax.grad(loss, has_aux=True)

    def key(part: jax.Array | int) -> jax.Array | None:
        """Dropout is a function of seed, step and part: nothing random is carried along."""
        if recipe.model.dropout_rate == 0:
            return None
        return jax.random.fold_in(jax.random.key(recipe.train.seed), state.step * parts + part)

    if parts == 1:
        return grad(state.params, batch.tokens_abt[0], batch.targets_abt[0], key(0))

    def add(carry: tuple[Params, jax.Array], part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        index, (tokens_bt, targets_bt) = part
        new = grad(state.params, tokens_bt, targets_bt, key(index))
        return jax.tree.map(jnp.add, carry, new), None

    zero = (jax.tree.map(jnp.zeros_like, state.params), jnp.float32(0))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(parts), batch))
    grads, cross_entropy = total
    return jax.tree.map(lambda leaf: leaf / parts, grads), cross_entropy / parts


def _eval_step(loss: Loss, params: Params, batch: Batch) -> jax.Array:
    losses_a = jax.lax.map(lambda part: loss(params, part.tokens_abt, part.targets_abt, None)[1], batch)
    return jnp.mean(losses_a)
