"""The same experiment on fewer slices: same fingerprint, same batch, no larger share for a device."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.compose import compose
from recipes.elastic import possible_slices, with_slices
from recipes.fingerprint import fingerprint
from recipes.parallelism import mesh_shape
from recipes.schema import Recipe

BASE = compose("llama3-8b-v6e-16x16-x2", ["target=tpu", "mesh.fsdp=16", "mesh.data=16"]).recipe


def made(num_slices: int, per_shard: int, parts: int) -> Recipe:
    multislice = dataclasses.replace(BASE.multislice, num_slices=num_slices, min_slices=1, data=-1, fsdp=1)
    batch = num_slices * 256 * per_shard * parts
    train = dataclasses.replace(BASE.train, global_batch_size=batch, grad_accum_steps=parts)
    return dataclasses.replace(BASE, multislice=multislice, train=train)


def at_a_time(recipe: Recipe) -> int:
    mesh = mesh_shape(recipe.mesh, recipe.multislice, devices_per_slice=256)
    shards = mesh.batch_shards * recipe.train.grad_accum_steps
    share, rest = divmod(recipe.train.global_batch_size, shards)
    assert rest == 0
    return share


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 4), st.data())
def test_fewer_slices(num_slices: int, per_shard: int, parts: int, data: st.DataObject) -> None:
    recipe = made(num_slices, per_shard, parts)
    possible = possible_slices(recipe)
    assert possible[0] == num_slices and 1 in possible and list(possible) == sorted(possible, reverse=True)
    fewer = with_slices(recipe, data.draw(st.sampled_from(possible)))
    assert fingerprint(fewer) == fingerprint(recipe)
    assert fewer.train.global_batch_size == recipe.train.global_batch_size
    assert at_a_time(fewer) <= at_a_time(recipe)


def test_all_slices_are_the_recipe_itself() -> None:
    recipe = made(4, 2, 1)
    assert with_slices(recipe, 4) is recipe


def test_what_cannot_be_divided_is_named() -> None:
    recipe = made(4, 1, 1)
    with pytest.raises(ValueError, match=r"train\.global_batch_size=1024 cannot be divided"):
        with_slices(recipe, 3)
    fixed = dataclasses.replace(recipe, multislice=dataclasses.replace(recipe.multislice, data=4, fsdp=1))
    with pytest.raises(ValueError, match=r"multislice\.data does not fit 2 slices"):
        with_slices(fixed, 2)
