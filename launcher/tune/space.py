"""Other ways to run the same experiment: meshes, what is recomputed, saved or offloaded, accumulation, flags.

Only keys are changed that leave the experiment as it is (`Effect.SPEED`), and only what passes the recipe's
own rules is a candidate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.preflight.remedies import Changes, changed_recipe, override_text
from recipes.flags import tuned_flags
from recipes.hardware import slice_shape
from recipes.load import flatten, recipe_to_dict
from recipes.parallelism import recipe_mesh
from recipes.schema import Recipe

_MOST_SHARDS = 16
"""Of the tensor, context, expert and ICI data axes: more were never published, and hardly fit a torus."""
_LONG_SEQUENCE = 16_384
"""From here on the sequence is worth dividing."""
_PARTS = (1, 2, 4, 8)
_PROJECTIONS = ["query", "key", "value"]
_REMAT: tuple[Mapping[str, Any], ...] = (
    {"remat_policy": "full"},
    {"remat_policy": "minimal"},
    {"remat_policy": "named", "remat_save": [], "remat_offload": ["layer_input"]},
    {"remat_policy": "named", "remat_save": ["attention_out"], "remat_offload": []},
    {"remat_policy": "named", "remat_save": [*_PROJECTIONS, "attention_out"], "remat_offload": []},
    {"remat_policy": "named", "remat_save": [], "remat_offload": ["layer_input", *_PROJECTIONS]},
    {
        "remat_policy": "named",
        "remat_save": [],
        "remat_offload": ["layer_input", *_PROJECTIONS, "attention_projected"],
    },
    {
        "remat_policy": "named",
        "remat_save": [*_PROJECTIONS, "attention_out", "attention_projected"],
        "remat_offload": ["layer_input"],
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The recipe with some values changed."""

    changes: Changes
    """By dotted key; only what differs from the recipe. Empty: the recipe itself."""
    recipe: Recipe

    @property
    def overrides(self) -> tuple[str, ...]:
        """As they are written on the command line."""
        return tuple(override_text(self.changes))


def candidates(recipe: Recipe) -> Iterator[Candidate]:
    """The recipe itself, then all others; each passes the rules."""
    yield Candidate(changes={}, recipe=recipe)
    seen: set[tuple[str, ...]] = {()}
    for mesh in _meshes(recipe):
        based = _changed(recipe, mesh)
        if based is None:
            continue
        for remat, parts in itertools.product((None, *_REMAT), _PARTS):
            changes = dict(mesh)
            if remat is not None:
                changes |= {f"train.{name}": value for name, value in remat.items()}
            changes["train.grad_accum_steps"] = parts
            found = _changed(recipe, changes)
            if found is not None and found.overrides not in seen:
                seen.add(found.overrides)
                yield found


def with_other_flags(candidate: Candidate) -> Iterator[Candidate]:
    """The same without one of the tuned flags."""
    recipe = candidate.recipe
    for flag in tuned_flags(recipe.hardware.generation):
        if flag.name not in recipe.hardware.compiler_flags and recipe.hardware.tuned_flags:
            flags = {**recipe.hardware.compiler_flags, flag.name: "default"}
            found = _changed(recipe, {"hardware.compiler_flags": flags})
            if found is not None:
                yield Candidate(changes={**candidate.changes, **found.changes}, recipe=found.recipe)


def _changed(recipe: Recipe, changes: Changes) -> Candidate | None:
    own = flatten(recipe_to_dict(recipe))
    differing = {key: value for key, value in changes.items() if own[key] != value}
    changed = changed_recipe(recipe, differing) if differing else recipe
    return None if changed is None else Candidate(changes=differing, recipe=changed)


def _meshes(recipe: Recipe) -> Iterator[Changes]:
    """All degrees of axes that the model has a use for; fsdp is what is left."""
    mesh, model = recipe_mesh(recipe), recipe.model
    devices = slice_shape(recipe.hardware).num_devices // mesh.ici["stage"]
    shards = [size for size in _powers(_MOST_SHARDS) if devices % size == 0]
    is_long = recipe.train.sequence_length >= _LONG_SEQUENCE or mesh.ici["context"] > 1
    contexts = shards if is_long else [1]
    experts = [size for size in shards if model.num_experts % size == 0] if model.num_experts > 1 else [1]
    across = list(_across_slices(recipe))
    queues = list(_microbatches(recipe))
    for tensor, context, expert, data in itertools.product(shards, contexts, experts, shards):
        taken = tensor * context * expert * data
        if devices % taken:
            continue
        inside = {"data": data, "context": context, "expert": expert, "tensor": tensor}
        degrees = {f"mesh.{axis}": degree for axis, degree in inside.items()}
        for slices, queue in itertools.product(across, queues):
            replicas = data * slices.get("multislice.data", 1)
            zero1 = {"mesh.zero1": True} if replicas > 1 else {}
            yield {**degrees, "mesh.fsdp": devices // taken, **slices, **queue, **zero1}


def _across_slices(recipe: Recipe) -> Iterator[dict[str, int]]:
    """Copies of the weights on every slice, or shards of them."""
    degrees = recipe_mesh(recipe).dcn
    slices = degrees["data"] * degrees["fsdp"]
    if slices == 1:
        yield {}
        return
    yield {"multislice.data": slices, "multislice.fsdp": 1}
    yield {"multislice.data": 1, "multislice.fsdp": slices}


def _microbatches(recipe: Recipe) -> Iterator[dict[str, int]]:
    """Parts of a batch in a pipeline: with more of them stages wait less, and each does less at a time."""
    stages = recipe_mesh(recipe).total["stage"]
    if stages == 1:
        yield {}
        return
    yield from ({"mesh.stage_microbatches": factor * stages} for factor in _PARTS)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
