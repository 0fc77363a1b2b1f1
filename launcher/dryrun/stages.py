"""All stages of a rehearsal in their order; one that fails does not keep the others from being seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.dryrun.checks import data_stage, manifest_stage, plan_stage, skipped, staged
from launcher.dryrun.children import child_env, run_env
from launcher.dryrun.compiling import preflight_stage
from launcher.dryrun.rehearsal import Lab, rehearse
from launcher.dryrun.report import Outcome, Stage, describe
from recipes.hardware import CPU
from recipes.miniature import miniature
from recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be rehearsed, and how."""

    recipe: Recipe
    preflight: Sequence[str] | None
    """Words after `muster preflight`; None: it is left out."""
    synthetic_data: bool
    """Random tokens, whatever the recipe's data are."""


def stages(wanted: Wanted, directory: Path, say: Callable[[str], None]) -> Generator[Stage]:
    """Each stage when it has ended; ``say`` hears the progress of the longer ones."""
    recipe = wanted.recipe
    yield staged("plan", lambda: plan_stage(recipe))
    yield staged("manifest", lambda: manifest_stage(recipe, Path.cwd()))
    data = _data(wanted)
    yield data
    yield _preflight(wanted, directory, say)
    # Without its data the rest of a recipe can be rehearsed all the same.
    synthetic_data = wanted.synthetic_data or data.outcome == Outcome.FAILED
    small = miniature(recipe, synthetic_data=synthetic_data)
    say(f"miniature: {describe(small)}; twice, which takes a minute or two")
    yield from rehearse(Lab(recipe=small, directory=directory, env=run_env(os.environ, directory)))


def _data(wanted: Wanted) -> Stage:
    if wanted.synthetic_data:
        return skipped("data", "random tokens, as --synthetic-data says")
    return staged("data", lambda: data_stage(wanted.recipe))


def _preflight(wanted: Wanted, directory: Path, say: Callable[[str], None]) -> Stage:
    words = wanted.preflight
    if words is None:
        return skipped("preflight", "as --no-preflight says")
    if wanted.recipe.hardware.generation == CPU:
        return skipped("preflight", "is for TPUs, and the recipe is for CPU devices")
    env = child_env(os.environ, directory)
    return staged("preflight", lambda: preflight_stage(words, directory=directory, env=env, say=say))
