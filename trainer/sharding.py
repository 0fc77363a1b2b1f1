"""One table: logical axis -> mesh axes. Weights and activations name their dimensions; only this
file says over which mesh axes each is divided.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from recipes.parallelism import BATCH_AXES

LogicalAxes = Sequence[str | None]

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": BATCH_AXES,
    "sequence": ("context",),
    # weights; "embed" is divided over fsdp and gathered where it is used
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "layers": (),
    "head_dim": (),
    "norm": (),
}


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    """The mesh axes of each dimension; None leaves a dimension whole."""
    return PartitionSpec(*(None if axis is None else (RULES[axis] or None) for axis in axes))


def named_sharding(mesh: jax.sharding.Mesh, axes: LogicalAxes) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))


def constrain(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """Asks the compiler to divide ``x`` as the table says; nothing without a mesh in context."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, partition_spec(axes))
    return constrained
