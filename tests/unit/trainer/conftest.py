"""Eight CPU devices, so that a wrong sharding shows; small recipes to vary."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

# Most of these tests' time is compilation; what is compared does not need it optimised.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import jax
import pytest

from recipes.load import flatten, nest, recipe_from_dict
from recipes.schema import Recipe

# libtpu, which is there to compile for TPUs, would otherwise look for chips and take over SIGTERM.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

SMALL = {
    "name": "small",
    "hardware": {"generation": "cpu", "topology": "1x8"},
    "model": {
        "vocab_size": 64,
        "num_layers": 2,
        "embed_dim": 16,
        "mlp_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "compute_dtype": "float32",
    },
    "data": {"source": "synthetic"},
    "optimizer": {"learning_rate": 1e-2},
    "target": {"kind": "local"},
    "train": {"num_steps": 10, "global_batch_size": 8, "sequence_length": 16, "remat_policy": "none"},
}


@pytest.fixture
def small() -> Callable[..., Recipe]:
    """``small({"mesh.fsdp": 4, ...})``: a small recipe with some keys replaced."""

    def make(changes: dict[str, Any] | None = None) -> Recipe:
        return recipe_from_dict(nest({**flatten(SMALL), **(changes or {})}))

    return make


@pytest.fixture
def on_devices() -> Callable[[Recipe, int], Recipe]:
    """The same recipe on another number of CPU devices."""

    def resize(recipe: Recipe, count: int) -> Recipe:
        hardware = dataclasses.replace(recipe.hardware, topology=f"1x{count}")
        return dataclasses.replace(recipe, hardware=hardware)

    return resize
