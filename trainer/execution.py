"""How a model is computed, as far as its layers must know: nothing here changes what is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from recipes.hardware import CPU
from recipes.parallelism import recipe_mesh
from recipes.parameters import divides_expert_rows
from recipes.schema import Recipe

RematPolicy = Literal["none", "minimal", "full", "named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Everything but sharding, which is one table (`trainer/sharding.py`)."""

    remat_policy: RematPolicy = "none"
    remat_save: Sequence[str] = ()
    remat_offload: Sequence[str] = ()
    context_exchange: Literal["all_gather", "ring"] = "all_gather"
    collective_matmul: bool = False
    divide_expert_rows: bool = False
    """Weights of experts' outputs are gathered along rows; see `recipes.parameters.divides_expert_rows`."""
    interpret_kernels: bool = True
    """TPU kernels are interpreted: there is no TPU to run or compile them for."""
    num_stages: int = 1
    stage_rounds: int = 1
    stage_microbatches: int = 1
    vocab_chunks: int = 1


def execution_of(recipe: Recipe) -> Execution:
    """What the recipe says about it."""
    train, mesh = recipe.train, recipe.mesh
    shape = recipe_mesh(recipe)
    num_stages = shape.total["stage"]
    return Execution(
        remat_policy=train.remat_policy,
        remat_save=train.remat_save,
        remat_offload=train.remat_offload,
        context_exchange=mesh.context_exchange,
        collective_matmul=mesh.collective_matmul,
        divide_expert_rows=divides_expert_rows(recipe.model, shape),
        interpret_kernels=recipe.hardware.generation == CPU,
        num_stages=num_stages,
        stage_rounds=mesh.stage_rounds,
        stage_microbatches=mesh.stage_microbatches or num_stages,
        vocab_chunks=train.vocab_chunks,
    )


def largest_block(size: int, largest: int) -> int:
    """The largest divisor of ``size`` up to ``largest``: kernels take blocks that leave nothing over."""
    return max(part for part in range(1, min(size, largest) + 1) if size % part == 0)


def named(x: jax.Array, name: str) -> jax.Array:
    """``x``, which remat policies know by ``name``: one of `recipes/remat.py`."""
    out: jax.Array = checkpoint_name(x, name)
    return out


def rematerialized[**P, R](body: Callable[P, R], execution: Execution) -> Callable[P, R]:
    """``body``, a step of a scan, with its backward pass recomputing what the policy does not keep."""
    if execution.remat_policy == "none":
        return body
    policies = jax.checkpoint_policies
    if execution.remat_policy == "named":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(execution.remat_save),
            names_which_can_be_offloaded=list(execution.remat_offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = {
            "full": policies.nothing_saveable,
            "minimal": policies.dots_with_no_batch_dims_saveable,
        }[execution.remat_policy]
    # prevent_cse is only needed outside of scan (jax.checkpoint's documentation).
    wrapped: Callable[P, R] = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return wrapped
