"""Saves and restores the state of a recipe: ``python -m benchmarks.saves RECIPE.yaml FOLDER``.

One process with all of the recipe's devices and the trainer's own checkpoints. Prints JSON: the seconds
that the loop is held up, those until the commit is seen, and those of a restore with its checks.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from recipes.contract import HostContext
from recipes.load import recipe_from_dict
from recipes.schema import Recipe
from trainer.checkpoints import Checkpoints
from trainer.devices import configure_platform, connect, make_mesh
from trainer.process import free_address
from trainer.program import build_program

NUM_SAVES = 5


def measure(recipe: Recipe, run_dir: str) -> dict[str, Any]:
    """Seconds by kind, one for each of NUM_SAVES saves and restores."""
    configure_platform(recipe, 1)
    connect(_alone(run_dir), peer_timeout_s=recipe.run.peer_timeout_s)
    mesh = make_mesh(recipe)
    program = build_program(recipe, mesh)
    times: dict[str, Any] = {"held_s": [], "committed_s": [], "restored_s": []}
    with contextlib.closing(_open(recipe, run_dir)) as checkpoints, jax.set_mesh(mesh):
        state = jax.block_until_ready(program.init(jnp.int32(0)))
        times["size_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        for step in range(1, NUM_SAVES + 2):
            start_s = time.perf_counter()
            checkpoints.after_step(step, state)
            times["held_s"].append(time.perf_counter() - start_s)
            while checkpoints.committed_step < step:
                time.sleep(0.002)
                checkpoints.after_step(step, state)
            times["committed_s"].append(time.perf_counter() - start_s)
    for _ in range(NUM_SAVES + 1):
        with contextlib.closing(_open(recipe, run_dir)) as checkpoints, jax.set_mesh(mesh):
            start_s = time.perf_counter()
            jax.block_until_ready(checkpoints.restore(program.state))
            times["restored_s"].append(time.perf_counter() - start_s)
    # The first of each compiles the fingerprints.
    return {name: values[1:] if isinstance(values, list) else values for name, values in times.items()}


def _open(recipe: Recipe, run_dir: str) -> Checkpoints:
    return Checkpoints(
        run_dir, recipe.checkpoint, recipe_fingerprint="benchmark", data_fingerprint="benchmark", attempt=1
    )


def _alone(run_dir: str) -> HostContext:
    return HostContext(
        run_dir=run_dir,
        attempt=1,
        slice_id=0,
        num_slices=1,
        host_id=0,
        hosts_per_slice=1,
        coordinator=free_address(),
        grace_period_s=30.0,
        scratch_dir=run_dir,
    )


def main() -> None:
    recipe = recipe_from_dict(yaml.safe_load(Path(sys.argv[1]).read_text()))
    json.dump(measure(recipe, sys.argv[2]), sys.stdout)


if __name__ == "__main__":
    main()
