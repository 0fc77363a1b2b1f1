"""Other ways to run the same experiment: meshes, what is recomputed, saved or offloaded, accumulation, flags.

Only keys are changed that leave the experiment as it is (`Effect.SPEED`), and only what passes the recipe's
own rules is a candidate.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.preflight.remedies import Changes, override_text
from recipes.check import check
from recipes.flags import DEFAULT, tuned_flags
from recipes.hardware import slice_shape
from recipes.parallelism import AXES, recipe_mesh
from recipes.schema import Recipe

_MOST_SHARDS = 16
"""Of the tensor, context, expert and ICI data axes: more were never published, and hardly fit a torus."""
_LONG_SEQUENCE = 16_384
"""From here on the sequence is worth dividing."""
_PARTS = (1, 2, 4, 8)
_VOCAB_CHUNKS = (8, 32)
_PROJECTIONS = ("query", "key", "value")
_ATTENTION = (*_PROJECTIONS, "attention_out")
_NAMED: Sequence[tuple[Sequence[str], Sequence[str]]] = (
    ((), ("layer_input",)),
    (("key", "value"), ()),
    (("key", "value"), ("layer_input",)),
    (("attention_out",), ()),
    (("attention_out",), ("layer_input",)),
    (_ATTENTION, ()),
    ((*_PROJECTIONS, "attention_projected", "mlp_out"), ()),
    ((*_ATTENTION, "attention_projected"), ("layer_input",)),
    ((*_ATTENTION, "attention_projected", "mlp_up"), ()),
    ((), ("layer_input", *_PROJECTIONS)),
    ((), ("layer_input", *_PROJECTIONS, "attention_projected")),
)
"""What is saved on the device and what in the host's memory, of a layer."""


type _Policy = tuple[str, Sequence[str], Sequence[str]]


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
    """The recipe itself, then all others; each passes the rules, and no two are the same."""
    own = Candidate(changes={}, recipe=recipe)
    yield own
    seen: set[tuple[str, ...]] = {()}
    policies = tuple(_remat(recipe))
    for mesh, queue, parts in itertools.product(_meshes(recipe), _microbatches(recipe), _parts(recipe)):
        divided = changed(own, {**mesh, **queue, "train.grad_accum_steps": parts})
        if divided is None:
            continue
        for policy in policies:
            found = changed(divided, policy)
            if found is not None and found.overrides not in seen:
                seen.add(found.overrides)
                yield found


def thriftier(candidate: Candidate) -> Iterator[Candidate]:
    """The same in less memory and hardly more time: optimizer state divided over copies of the weights, then
    more parts of the vocabulary as well. Ever less memory."""
    zero1 = changed(candidate, {"mesh.zero1": True}) if _has_copies(candidate.recipe) else None
    if zero1 is not None and not candidate.recipe.mesh.zero1:
        candidate = zero1
        yield candidate
    for chunks in _VOCAB_CHUNKS:
        if chunks > candidate.recipe.train.vocab_chunks:
            found = changed(candidate, {"train.vocab_chunks": chunks})
            if found is not None:
                yield found


def with_other_flags(candidate: Candidate) -> Iterator[Candidate]:
    """The same without one of the tuned flags."""
    hardware = candidate.recipe.hardware
    for flag in tuned_flags(hardware.generation) if hardware.tuned_flags else ():
        if flag.name not in hardware.compiler_flags:
            flags = {**hardware.compiler_flags, flag.name: DEFAULT}
            found = changed(candidate, {"hardware.compiler_flags": flags})
            if found is not None:
                yield found


def changed(candidate: Candidate, changes: Changes) -> Candidate | None:
    """With further changes; None where the recipe's rules are against them."""
    differing = {key: value for key, value in changes.items() if _value(candidate.recipe, key) != value}
    if not differing:
        return candidate
    sections: dict[str, dict[str, Any]] = {}
    for key, value in differing.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    replaced = {
        name: dataclasses.replace(getattr(candidate.recipe, name), **values)
        for name, values in sections.items()
    }
    recipe = dataclasses.replace(candidate.recipe, **replaced)
    if check(recipe):
        return None
    return Candidate(changes={**candidate.changes, **differing}, recipe=recipe)


def _value(recipe: Recipe, key: str) -> object:
    """What a key comes to: degrees and parts of a pipeline are numbers, whether written or left open."""
    section, name = key.split(".")
    if section == "mesh" and name in AXES:
        return recipe_mesh(recipe).ici[name]
    if section == "multislice":
        return recipe_mesh(recipe).dcn[name]
    if key == "mesh.stage_microbatches":
        return recipe.mesh.stage_microbatches or recipe_mesh(recipe).total["stage"]
    return getattr(getattr(recipe, section), name)


def _meshes(recipe: Recipe) -> Iterator[Mapping[str, int]]:
    """All degrees of axes that the model has a use for; fsdp is what is left."""
    mesh, model, train = recipe_mesh(recipe), recipe.model, recipe.train
    devices = slice_shape(recipe.hardware).num_devices // mesh.ici["stage"]
    shards = [size for size in range(1, _MOST_SHARDS + 1) if devices % size == 0]
    is_few = train.global_batch_size < devices * mesh.dcn["data"] * mesh.dcn["fsdp"]
    is_long = train.sequence_length >= _LONG_SEQUENCE or mesh.ici["context"] > 1 or is_few
    axes = {
        "data": shards,
        "context": shards if is_long else [1],
        "expert": [size for size in shards if model.num_experts % size == 0],
        "tensor": [size for size in shards if model.num_kv_heads % size == 0],
    }
    across = tuple(_across_slices(recipe))
    for degrees in itertools.product(*axes.values()):
        inside = dict(zip(axes, degrees, strict=True))
        taken = inside["data"] * inside["context"] * inside["expert"] * inside["tensor"]
        if devices % taken == 0:
            named = {f"mesh.{axis}": degree for axis, degree in inside.items()}
            yield from ({**named, "mesh.fsdp": devices // taken, **slices} for slices in across)


def _across_slices(recipe: Recipe) -> Iterator[Mapping[str, int]]:
    """Copies of the weights on slices, shards of them, or both. An axis that is open stays open, so that an
    elastic run can go on with fewer slices."""
    degrees, written = recipe_mesh(recipe).dcn, recipe.multislice
    slices = degrees["data"] * degrees["fsdp"]
    for shards in (size for size in range(1, slices + 1) if slices % size == 0):
        both = {"data": slices // shards, "fsdp": shards}
        yield {f"multislice.{axis}": size for axis, size in both.items() if getattr(written, axis) != -1}


def _microbatches(recipe: Recipe) -> Iterator[Changes]:
    """Parts of a batch in a pipeline: with more of them stages wait less, and each does less at a time."""
    stages = recipe_mesh(recipe).total["stage"]
    yield {}
    if stages > 1:
        yield from ({"mesh.stage_microbatches": factor * stages} for factor in _PARTS)


def _parts(recipe: Recipe) -> Sequence[int]:
    return sorted({*_PARTS, recipe.train.grad_accum_steps})


def _remat(recipe: Recipe) -> Iterator[Changes]:
    """The recipe's own, then others; in which order tensors are named says nothing."""
    train = recipe.train
    own = train.remat_policy, set(train.remat_save), set(train.remat_offload)
    plain: Sequence[_Policy] = [(policy, (), ()) for policy in ("full", "minimal", "none")]
    yield {}
    for policy, saved, moved in (*plain, *(("named", saved, moved) for saved, moved in _NAMED)):
        if (policy, set(saved), set(moved)) != own:
            yield {
                "train.remat_policy": policy,
                "train.remat_save": tuple(saved),
                "train.remat_offload": tuple(moved),
            }


def _has_copies(recipe: Recipe) -> bool:
    return recipe_mesh(recipe).total["data"] > 1
