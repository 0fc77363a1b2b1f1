"""One table: logical axis -> mesh axes. Weights and activations name their dimensions; only this
file says over which mesh axes each is divided, and what a wrong shape is told.

Works under Auto axes (the compiler divides what is between constraints) and Explicit ones (the
sharding is part of every array's type, so what is asked for here is what happens).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipes.errors import UserError
from recipes.hardware import CPU
from recipes.parallelism import BATCH_AXES

LogicalAxes = Sequence[str | None]

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": BATCH_AXES,
    "sequence": ("context",),
    # between attention and MLP nothing crosses positions, so the tensor axis divides them too
    "split_sequence": ("context", "tensor"),
    # the rows that embeddings are looked up for, while their width is divided over fsdp
    "lookup_batch": tuple(axis for axis in BATCH_AXES if axis != "fsdp"),
    # rows of the batch while the expert axis divides experts instead
    "expert_batch": tuple(axis for axis in BATCH_AXES if axis != "expert"),
    "places": (),
    # weights; "embed" is divided over fsdp and gathered where it is used
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    # of an expert's output matrix, where fsdp divides its rows instead of its width
    "expert_rows": ("tensor", "fsdp"),
    "expert_width": (),
    "layers": ("stage",),
    "stages": ("stage",),
    "head_dim": (),
    "norm": (),
}

_ZERO1 = {**RULES, "embed": ("fsdp", "data"), "expert_width": ("data",)}
"""The table for optimizer state under ZeRO-1."""

_GATHERED: Mapping[str | None, str | None] = {"embed": None, "expert_rows": "mlp"}
"""What weights are divided by while they are used; the rest as they are stored."""


class ShardingError(UserError):
    """A tensor whose shape does not fit its logical axes or the mesh."""


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    """The axes of the mesh in context that divide each dimension; None leaves a dimension whole."""
    return _spec(axes, RULES, jax.sharding.get_abstract_mesh().shape)


def _spec(
    axes: LogicalAxes, rules: Mapping[str, tuple[str, ...]], mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    # An axis of degree 1 divides nothing, and sharded types would have to agree on it all the same.
    over = [() if axis is None else tuple(a for a in rules[axis] if mesh_shape[a] > 1) for axis in axes]
    return PartitionSpec(*(part or None for part in over))


def named_sharding(mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
    return NamedSharding(mesh, _spec(axes, RULES, mesh.shape))


def zero1_sharding(mesh: Mesh, axes: LogicalAxes, shape: Sequence[int]) -> NamedSharding:
    """Of a moment, over data too; as its weight where that does not divide it."""
    spec = _spec(axes, _ZERO1, mesh.shape)
    fits = all(size % _degree(mesh.shape, over) == 0 for size, over in zip(shape, spec, strict=True))
    return NamedSharding(mesh, spec) if fits else named_sharding(mesh, axes)


def check_shape(name: str, shape: Sequence[int], axes: LogicalAxes, mesh_shape: Mapping[str, int]) -> None:
    """Refuses a tensor that the mesh cannot divide evenly.

    Raises:
      ShardingError: naming the tensor, its shape, its logical axes and the mesh axes.
    """
    what = f"{name} {_by_dimension(shape, axes)}"
    if len(shape) != len(axes):
        raise ShardingError(f"{what}: {len(shape)} dimensions, but {len(axes)} logical axes")
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ShardingError(f"{what}: no such logical axis: {unknown[0]}", hint="trainer/sharding.py has all")
    for size, axis in zip(shape, axes, strict=True):
        over = () if axis is None else RULES[axis]
        degree = _degree(mesh_shape, over)
        if size % degree:
            mesh = " x ".join(f"{part} {mesh_shape[part]}" for part in over if mesh_shape[part] > 1)
            raise ShardingError(
                f"{what}: logical axis {axis} of size {size} cannot be divided over the mesh axes {mesh}",
                hint=f"use a size that {degree} divides, or smaller degrees of {' and '.join(over)}",
            )


def _by_dimension(shape: Sequence[int], axes: LogicalAxes) -> str:
    if len(shape) != len(axes):
        return f"{tuple(shape)} with axes {tuple(axes)}"
    return "(" + ", ".join(f"{axis or '-'} {size}" for axis, size in zip(axes, shape, strict=True)) + ")"


def _degree(mesh_shape: Mapping[str, int], over: Iterable[str] | str | None) -> int:
    names = (over,) if isinstance(over, str) else (over or ())
    return math.prod(mesh_shape[axis] for axis in names)


def axis_size(axis: str) -> int:
    """Degree of a mesh axis of the mesh in context; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[axis]


def pass_on[T](tree: T, axis: str) -> T:
    """Within shard_map: gives each array to the next device of the axis, and takes that of the one before."""
    size = jax.lax.axis_size(axis)
    to_next = [(device, (device + 1) % size) for device in range(size)]
    passed: T = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, to_next), tree)
    return passed


def is_explicit() -> bool:
    """Whether the sharding is part of the types of arrays, by the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def constrain(x: jax.Array, axes: LogicalAxes, name: str = "activation") -> jax.Array:
    """Divides ``x`` as the table says; nothing without a mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    check_shape(name, x.shape, axes, mesh.shape)
    return _constrain_to(x, partition_spec(axes))


def _constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    if is_explicit():
        resharded: jax.Array = jax.sharding.reshard(x, spec)
        return resharded
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec)
    return constrained


def divided(tree: Any, shardings: Any) -> Any:
    """Every leaf divided as the like tree of NamedShardings says."""
    return jax.tree.map(lambda leaf, sharding: _constrain_to(leaf, sharding.spec), tree, shardings)


def constrain_leading(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """Divides the first dimensions and leaves the others as they are (Auto axes only)."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    return _constrain_to(x, PartitionSpec(*partition_spec(axes), *rest))


def lookup(table_vd: jax.Array, tokens_bt: jax.Array) -> jax.Array:
    """Rows of an embedding table, (b, t, d), with d divided like the table's.

    The table stays where it is: rows are exchanged instead, which are fewer.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jnp.take(table_vd, tokens_bt, axis=0)
    tokens_bt = constrain(tokens_bt, ("lookup_batch", "sequence"), "tokens")
    axes = ("lookup_batch", "sequence", "embed")
    if is_explicit():
        whole_vd = constrain(table_vd, (None, "embed"), "embedding table")
        rows: jax.Array = whole_vd.at[tokens_bt].get(out_sharding=partition_spec(axes))
        return rows
    return constrain(jnp.take(table_vd, tokens_bt, axis=0), axes, "embeddings")


def use(weight: jax.Array, axes: LogicalAxes, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A weight as a layer needs it: in the compute dtype, gathered over fsdp.

    It is cast before it is gathered, and its gradient is scattered as it comes: half the bytes.
    """
    cast = weight.astype(dtype)
    if jax.sharding.get_abstract_mesh().empty:
        return cast
    stored = partition_spec(axes)
    gathered = partition_spec([_GATHERED.get(axis, axis) for axis in axes])
    if is_explicit():
        return _constrain_to(cast, gathered)
    return _gather(cast, stored, gathered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight: jax.Array, stored: PartitionSpec, gathered: PartitionSpec) -> jax.Array:
    return _constrain_to(weight, gathered)


def _gather_forward(
    weight: jax.Array, stored: PartitionSpec, gathered: PartitionSpec
) -> tuple[jax.Array, None]:
    return _constrain_to(weight, gathered), None


def _gather_backward(
    stored: PartitionSpec, gathered: PartitionSpec, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    # Constrained as a gathered weight it would be summed on every device before it is cut up.
    return (_constrain_to(cotangent, stored),)


_gather.defvjp(_gather_forward, _gather_backward)


def einsum(
    subscripts: str, x: jax.Array, y: jax.Array, out_axes: LogicalAxes, *, name: str, **options: Any
) -> jax.Array:
    """``jnp.einsum`` of two arrays whose result is divided as the table says."""
    if is_explicit():
        out: jax.Array = jnp.einsum(subscripts, x, y, out_sharding=partition_spec(out_axes), **options)
        return out
    by_rows = _by_rows(subscripts)
    if by_rows is None or not _has_whole_rows_on_cpu():
        return constrain(jnp.einsum(subscripts, x, y, **options), out_axes, name)
    rows = jnp.einsum(by_rows, x.reshape(-1, *x.shape[2:]), y, **options)
    return constrain(rows.reshape(*x.shape[:2], *rows.shape[1:]), out_axes, name)


def _by_rows(subscripts: str) -> str | None:
    """``btd,df->btf`` as ``md,df->mf``: batch and sequence as one dimension. None where that is not it."""
    operands, out = subscripts.split("->")
    x, y = operands.split(",")
    if not (x.startswith("bt") and out.startswith("bt")) or set("bt") & set(y):
        return None
    return f"m{x[2:]},{y}->m{out[2:]}"


def _has_whole_rows_on_cpu() -> bool:
    """Whether the batch is all that is divided, on CPU devices.

    There XLA copies activations into a transposed layout for the gradient of a weight that contracts two
    dimensions, a third of the time of a step; with one it does not. TPUs contract both as they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None or mesh.abstract_device.platform != CPU:
        return False
    return bool(mesh.shape["context"] * mesh.shape["tensor"] == 1)
