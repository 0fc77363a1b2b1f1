"""What runs on the devices: the train state, its shardings, and the compiled init, train and eval steps.

Legend: a accumulation part, b sequence of one part, t position, l layer, e expert.
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
from trainer.attention import Places, balanced_order, documents, to_balanced
from trainer.execution import execution_of
from trainer.loss import cross_entropy
from trainer.models.decoder import Decoder
from trainer.models.router import BALANCE_NAME, balanced, router_loss
from trainer.optimizers import learning_rate_schedule, make_optimizer
from trainer.sharding import (
    axis_size,
    check_shape,
    constrain,
    divided,
    named_sharding,
    zero1_sharding,
)

Params = dict[str, Any]
Metrics = Mapping[str, jax.Array]


class Outcome(NamedTuple):
    """What a pass over part of a batch found, besides its gradient."""

    cross_entropy: jax.Array
    """Mean over the tokens, in nats."""
    load_le: jax.Array
    """Share of the routed tokens by layer and expert; one column of zeros without experts."""


Loss = Callable[[Params, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Outcome]]
Gradient = Callable[[Params, jax.Array, jax.Array, jax.Array | None], tuple[Params, Outcome]]


class TrainState(NamedTuple):
    """Everything that a checkpoint holds."""

    step: jax.Array
    """int32 scalar: optimizer steps completed."""
    params: Params
    """Nested dict of weights, in ``model.weight_dtype``."""
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
    model = _abstract_model(recipe, mesh)
    optimizer = make_optimizer(recipe.optimizer, recipe.train.num_steps)
    state = _abstract_state(model, optimizer, mesh)
    batch = abstract_batch(recipe, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

    loss = functools.partial(_loss, recipe, model.graphdef)
    init = jax.jit(
        functools.partial(_init, recipe, optimizer),
        out_shardings=shardings,
        compiler_options=_run_once_options(mesh),
    )
    train_step = jax.jit(
        functools.partial(_train_step, recipe, optimizer, loss, shardings, model.moments),
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
    return Decoder(recipe.model, execution_of(recipe), rngs=nnx.Rngs(params=jax.random.key(seed)))


class _Abstract(NamedTuple):
    """The model without its weights, and how they are divided; nested dicts alike."""

    params: Params
    """jax.ShapeDtypeStructs with shardings."""
    moments: Params
    """NamedShardings of the optimizer's moments."""
    graphdef: nnx.GraphDef[Decoder]


def _abstract_model(recipe: Recipe, mesh: Mesh) -> _Abstract:
    """Raises ShardingError for a weight that the mesh does not divide, before anything is compiled."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _new_model(recipe, 0)))

    def weight(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> jax.Array:
        name, axes = ".".join(str(part.key) for part in path), variable.get_metadata("out_sharding")
        check_shape(name, variable.shape, axes, mesh.shape)
        return _abstract(variable.shape, _kept_dtype(recipe, path), named_sharding(mesh, axes))

    def moment(variable: nnx.Variable[Any]) -> NamedSharding:
        axes = variable.get_metadata("out_sharding")
        if recipe.mesh.zero1:
            return zero1_sharding(mesh, axes, variable.shape)
        return named_sharding(mesh, axes)

    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(weight, state, is_leaf=is_variable)
    moments = jax.tree.map(moment, state, is_leaf=is_variable)
    return _Abstract(nnx.to_pure_dict(params), nnx.to_pure_dict(moments), graphdef)


def _abstract_state(model: _Abstract, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Moments are divided as the table says for them; counters are whole on every device."""
    replicated = NamedSharding(mesh, PartitionSpec())
    flat, _ = jax.tree_util.tree_flatten_with_path(model.moments)
    by_path = {tuple(part.key for part in path): sharding for path, sharding in flat}

    def abstract(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        # A moment has its weight's path, below the fields of the optimizer's state.
        keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
        return _abstract(leaf.shape, leaf.dtype, by_path.get(keys, replicated))

    opt_state = jax.tree_util.tree_map_with_path(abstract, jax.eval_shape(optimizer.init, model.params))
    return TrainState(_abstract((), jnp.int32, replicated), model.params, opt_state)


def _init(recipe: Recipe, optimizer: optax.GradientTransformation, seed: jax.Array) -> TrainState:
    params = nnx.to_pure_dict(nnx.state(_new_model(recipe, seed)))
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype(_kept_dtype(recipe, path)), params
    )
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def _kept_dtype(recipe: Recipe, path: tuple[Any, ...]) -> jnp.dtype[Any]:
    """Of a weight; a router's bias moves in steps too small for bfloat16."""
    return jnp.dtype("float32" if path[-1].key == BALANCE_NAME else recipe.model.weight_dtype)


def _loss(
    recipe: Recipe,
    graphdef: nnx.GraphDef[Decoder],
    params: Params,
    tokens_bt: jax.Array,
    targets_bt: jax.Array,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, Outcome]:
    """Loss to minimise (with the router's share), and what is reported of it."""
    model: Decoder = nnx.merge(graphdef, nnx.State(jax.tree.map(nnx.Param, params)))
    separator = recipe.data.document_separator
    segments_bt = None if separator is None else _placed(documents(tokens_bt, separator))
    order_t = balanced_order(tokens_bt.shape[1], axis_size("context"))
    places = Places(constrain(jnp.asarray(order_t), ("sequence",), "positions"), segments_bt)
    hidden_btd, stats_l = model(_placed(tokens_bt), places, dropout_key)
    mean = cross_entropy(hidden_btd, model.table_vd, _placed(targets_bt), recipe.train.vocab_chunks)
    total = mean if recipe.model.num_experts == 1 else mean + router_loss(recipe.model, stats_l)
    return total, Outcome(mean, stats_l.load_e)


def _placed(tokens_bt: jax.Array) -> jax.Array:
    """Tokens in the order that the context axis holds them in."""
    whole_bt = constrain(tokens_bt, ("batch", None), "tokens")
    return constrain(to_balanced(whole_bt, 1, axis_size("context")), ("batch", "sequence"), "tokens")


def _train_step(
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    shardings: TrainState,
    moments: Params,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    grads, outcome = _gradients(recipe, loss, state, batch)
    # Under ZeRO-1 the update is computed where the moments are, on a part of each weight.
    grads, old = divided(grads, moments), divided(state.params, moments)
    updates, opt_state = optimizer.update(grads, state.opt_state, old)
    params = divided(optax.apply_updates(old, updates), shardings.params)
    metrics = {
        "train/loss": outcome.cross_entropy,
        "train/grad_norm": optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)),
        "train/learning_rate": jnp.float32(
            learning_rate_schedule(recipe.optimizer, recipe.train.num_steps)(state.step)
        ),
    }
    if recipe.model.num_experts > 1:
        metrics["train/expert_load_max"] = jnp.max(outcome.load_le) * recipe.model.num_experts
    if recipe.model.router_bias_rate > 0:
        params = _with_balance(params, outcome.load_le, recipe.model.router_bias_rate)
    return TrainState(state.step + 1, params, opt_state), metrics


def _with_balance(params: Params, load_le: jax.Array, rate: float) -> Params:
    def moved(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.Array) -> jax.Array:
        return balanced(leaf, load_le, rate) if path[-1].key == BALANCE_NAME else leaf

    return cast(Params, jax.tree_util.tree_map_with_path(moved, params))


def _gradients(recipe: Recipe, loss: Loss, state: TrainState, batch: Batch) -> tuple[Params, Outcome]:
    """Mean gradient and mean outcome over the accumulation parts."""
    parts = recipe.train.grad_accum_steps
    grad: Gradient = jax.grad(loss, has_aux=True)

    def key(part: jax.Array | int) -> jax.Array | None:
        """Dropout is a function of seed, step and part: nothing random is carried along."""
        if recipe.model.dropout_rate == 0:
            return None
        return jax.random.fold_in(jax.random.key(recipe.train.seed), state.step * parts + part)

    if parts == 1:
        return grad(state.params, batch.tokens_abt[0], batch.targets_abt[0], key(0))

    def add(carry: tuple[Params, Outcome], part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        index, (tokens_bt, targets_bt) = part
        new = grad(state.params, tokens_bt, targets_bt, key(index))
        return jax.tree.map(jnp.add, carry, new), None

    experts = recipe.model.num_experts
    load_le = jnp.zeros((recipe.model.num_layers, experts), jnp.float32)
    zero_grads = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), state.params)
    zero = (zero_grads, Outcome(jnp.float32(0), load_le))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(parts), batch))
    grads, outcome = jax.tree.map(lambda leaf: leaf / parts, total)
    return grads, outcome


def _eval_step(loss: Loss, params: Params, batch: Batch) -> jax.Array:
    def one(part: Batch) -> jax.Array:
        return loss(params, part.tokens_abt, part.targets_abt, None)[1].cross_entropy

    return jnp.mean(jax.lax.map(one, batch))
