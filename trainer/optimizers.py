"""Optimizers and schedules by name, on Optax."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import optax

from recipes.schema import OptimizerConfig


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
    """Clipping by global norm, then the optimizer that the recipe names."""
    schedule = learning_rate_schedule(config, num_steps)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, _OPTIMIZERS[config.name](config, schedule))


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
    """True for matrices; norms (named scale_*) are not decayed, stacked or not."""

    def is_matrix(path: tuple[jax.tree_util.DictKey, ...], _: jax.Array) -> bool:
        return not str(path[-1].key).startswith("scale")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


_OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw,
}
