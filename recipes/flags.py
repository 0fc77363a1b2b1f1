"""Compiler flags: which of the catalogue a recipe compiles with, and what its users add or drop.

The data is in `compiler_flags.json` beside this file, each flag with its reason and its public source. What
libtpu does with it is in docs/compiler-flags.md; what it refuses is a rule of `check_flags.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.hardware import CPU
from recipes.schema import Recipe

LIBTPU_ARGS = "LIBTPU_INIT_ARGS"
"""Environment variable that libtpu reads its flags from, once, when a process loads it."""
DEFAULT = "default"
"""Value in `hardware.compiler_flags` that leaves a tuned flag to libtpu."""
OWN_REASON = "hardware.compiler_flags"

CONDITIONS: Mapping[str, tuple[str, Callable[[Recipe], bool]]] = {
    "always": ("", lambda recipe: True),
    "dense": ("model.num_experts=1", lambda recipe: recipe.model.num_experts == 1),
    "experts": ("model.num_experts>1", lambda recipe: recipe.model.num_experts > 1),
    "no_tensor": ("mesh.tensor=1", lambda recipe: recipe.mesh.tensor == 1),
    "multislice": ("multislice.num_slices>1", lambda recipe: recipe.multislice.num_slices > 1),
    "dcn_fsdp": (
        "multislice.fsdp>1",
        lambda recipe: recipe.multislice.num_slices > 1 and recipe.multislice.fsdp != 1,
    ),
    "host_offload": (
        "train.remat_offload is given",
        lambda recipe: recipe.train.remat_policy == "named" and bool(recipe.train.remat_offload),
    ),
}
"""When a tuned flag is set: by name, for people, and as a question to a recipe."""

_DATA_FILE = Path(__file__).with_name("compiler_flags.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag that a process is started with."""

    name: str
    """Without the two hyphens."""
    value: str
    reason: str
    source: str
    """Public; empty for a user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedFlag:
    """One entry of the catalogue."""

    name: str
    value: str
    generations: Sequence[str]
    when: str
    """A name in CONDITIONS."""
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedFlag:
    """A value of a flag that the pinned libtpu refuses, or that does harm there."""

    name: str
    value: str | None
    """None: any."""
    generations: Sequence[str]
    shown_with: Mapping[str, str]
    """Flags beside which libtpu shows that it refuses it."""
    message: str
    """Part of what libtpu says."""
    reason: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExclusiveFlags:
    """Two flags of which one must be false."""

    names: Sequence[str]
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagCatalogue:
    """All that is known of flags."""

    libtpu: str
    """Version of libtpu that everything was tried with."""
    tuned: Sequence[TunedFlag]
    refused: Sequence[RefusedFlag]
    exclusive: Sequence[ExclusiveFlags]


@functools.cache
def flag_catalogue() -> FlagCatalogue:
    """The whole catalogue."""
    data: dict[str, Any] = json.loads(_DATA_FILE.read_text())
    return FlagCatalogue(
        libtpu=data["libtpu"],
        tuned=tuple(TunedFlag(**entry) for entry in data["tuned"]),
        refused=tuple(RefusedFlag(**entry) for entry in data["refused"]),
        exclusive=tuple(ExclusiveFlags(**entry) for entry in data["exclusive"]),
    )


def tuned_flags(generation: str) -> Sequence[TunedFlag]:
    """What the catalogue has for a TPU generation, under whatever condition."""
    return [flag for flag in flag_catalogue().tuned if generation in flag.generations]


def flags_of(recipe: Recipe) -> Sequence[Flag]:
    """What the trainer of ``recipe`` is compiled with beside libtpu's defaults; nothing on CPU.

    On Pathways the tuned ones are left out: its images have a libtpu of their own.
    """
    hardware = recipe.hardware
    if hardware.generation == CPU:
        return ()
    found: dict[str, Flag] = {}
    if hardware.tuned_flags and recipe.target.controller != "pathways":
        for tuned in tuned_flags(hardware.generation):
            if CONDITIONS[tuned.when][1](recipe):
                found[tuned.name] = Flag(
                    name=tuned.name, value=tuned.value, reason=tuned.reason, source=tuned.source
                )
    for name, value in hardware.compiler_flags.items():
        found.pop(name, None)
        if value != DEFAULT:
            found[name] = Flag(name=name, value=value, reason=OWN_REASON, source="")
    return tuple(found[name] for name in sorted(found))


def flag_arguments(recipe: Recipe) -> Sequence[str]:
    """:func:`flags_of` as arguments of a command line."""
    return [f"--{flag.name}={flag.value}" for flag in flags_of(recipe)]


def libtpu_env(recipe: Recipe) -> Mapping[str, str]:
    """What the flags of ``recipe`` add to the environment of every process that loads libtpu."""
    arguments = flag_arguments(recipe)
    return {LIBTPU_ARGS: " ".join(arguments)} if arguments else {}
