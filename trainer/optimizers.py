"""Optimizers and schedules by name, on Optax, with their state in the dtypes that the recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from recipes.schema import OptimizerConfig
from trainer.models.router import BALANCE_NAME

_UNDECAYED = ("scale", BALANCE_NAME)


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then constant or cosine down to the final fraction at ``num_steps``."""
    if config.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(config.learning_rate)
    else:
        after = optax.cosine_decay_schedule(
            config.learning_rate,
            max(num_steps - config.warmup_steps, 1),
            alpha=config.final_learning_rate_fraction,
        )
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimizer that the recipe names; computes in float32."""
    schedule = learning_rate_schedule(config, num_steps)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    moments = {"mu": jnp.dtype(config.first_moment_dtype), "nu": jnp.dtype(config.second_moment_dtype)}
    return _kept_as(optax.chain(clip, _OPTIMIZERS[config.name](config, schedule)), moments)


def _kept_as(
    optimizer: optax.GradientTransformation, dtypes: Mapping[str, jnp.dtype[Any]]
) -> optax.GradientTransformation:
    """The same update in float32, from state that is kept in ``dtypes`` by the name of its field."""

    def kept(state: optax.OptState) -> optax.OptState:
        def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            names = {part.name for part in path if isinstance(part, jax.tree_util.GetAttrKey)}
            dtype = next((dtypes[name] for name in dtypes if name in names), leaf.dtype)
            return leaf.astype(dtype)

        return jax.tree_util.tree_map_with_path(cast, state)

    def init(params: optax.Params) -> optax.OptState:
        return kept(optimizer.init(_in_float32(params)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        new_updates, new_state = optimizer.update(
            _in_float32(updates), _in_float32(state), _in_float32(params)
        )
        return new_updates, kept(new_state)

    return optax.GradientTransformation(init, update)


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def _adamw(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )


def _decayed(params: optax.Params) -> optax.Params:
    """True for matrices; norms (named scale_*) and router biases are not decayed, stacked or not."""

    def is_matrix(path: tuple[jax.tree_util.DictKey, ...], _: jax.Array) -> bool:
        return not str(path[-1].key).startswith(_UNDECAYED)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


_OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw,
}
