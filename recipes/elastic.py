"""The same experiment on another number of slices: the same global batch, in more parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recipes.hardware import slice_shape
from recipes.parallelism import mesh_shape
from recipes.schema import Recipe


def with_slices(recipe: Recipe, num_slices: int) -> Recipe:
    """The recipe in effect on ``num_slices`` slices.

    A device has no more sequences at a time than on all slices: what the missing slices would have taken is
    done one part after the other (``train.grad_accum_steps``).

    Raises:
      ValueError: the mesh across slices or the global batch cannot be divided so; the message names the key.
    """
    if num_slices == recipe.multislice.num_slices:
        return recipe
    fewer = dataclasses.replace(
        recipe, multislice=dataclasses.replace(recipe.multislice, num_slices=num_slices)
    )
    shards_before, shards = _batch_shards(recipe), _batch_shards(fewer)
    batch, parts_before = recipe.train.global_batch_size, recipe.train.grad_accum_steps
    at_a_time = batch // (shards_before * parts_before)
    per_shard, rest = divmod(batch, shards)
    if rest or not at_a_time:
        raise ValueError(
            f"train.global_batch_size={batch} cannot be divided over {shards} shards of {num_slices} slices"
        )
    # At least as many parts as keep a device's share no larger, and a number that divides.
    fewest = -(-per_shard // at_a_time)
    parts = next(number for number in range(fewest, per_shard + 1) if per_shard % number == 0)
    return dataclasses.replace(fewer, train=dataclasses.replace(fewer.train, grad_accum_steps=parts))


def possible_slices(recipe: Recipe) -> Sequence[int]:
    """Numbers of slices that the run may be launched with, most first. Pathways drops slices by itself."""
    most, fewest = recipe.multislice.num_slices, recipe.multislice.min_slices
    if recipe.target.controller == "pathways":
        return (most,)
    numbers = range(most, (most if fewest is None else fewest) - 1, -1)
    return tuple(number for number in numbers if number == most or _is_possible(recipe, number))


def _is_possible(recipe: Recipe, num_slices: int) -> bool:
    try:
        with_slices(recipe, num_slices)
    except ValueError:
        return False
    return True


def _batch_shards(recipe: Recipe) -> int:
    devices = slice_shape(recipe.hardware).num_devices
    slices = recipe.multislice
    fixed = slices.data if slices.fsdp == -1 else slices.fsdp if slices.data == -1 else 0
    total = fixed or slices.data * slices.fsdp
    if (fixed and slices.num_slices % fixed) or (not fixed and total != slices.num_slices):
        key = "multislice.data" if slices.data != -1 and slices.data > 1 else "multislice.fsdp"
        raise ValueError(f"{key} does not fit {slices.num_slices} slices")
    return mesh_shape(recipe.mesh, slices, devices_per_slice=devices).batch_shards
