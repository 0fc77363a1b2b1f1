"""Stages that start no process: plan, manifest, data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.bundle import make_bundle
from launcher.dryrun.report import Outcome, Stage
from launcher.inputs import check_inputs
from launcher.manifest import target_manifest
from launcher.plan import make_plan
from launcher.supervise.limits import refuse_passed_deadline
from launcher.text import size_text
from recipes.check_target import launch_problems
from recipes.errors import RecipeError, UserError
from recipes.schema import Recipe

_IMAGE = f"placeholder/image@sha256:{'0' * 64}"
_PLACEHOLDERS: Mapping[str, str] = {
    "run.root": "gs://placeholder/runs",
    "target.image": _IMAGE,
    "target.pathways_server_image": _IMAGE,
    "target.pathways_proxy_image": _IMAGE,
    "target.project": "placeholder",
    "target.zone": "us-east5-b",
}
"""For what a launch needs and a rehearsal need not be given."""


_ANYWAY = "where the data are elsewhere, --synthetic-data rehearses with random tokens"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a stage found to be well."""

    detail: str
    skipped: bool = False
    """There was nothing to look at; ``detail`` says why."""


def staged(name: str, work: Callable[[], Seen]) -> Stage:
    """Runs one stage; what the user can mend becomes its failure."""
    began_s = time.monotonic()
    try:
        seen = work()
    except UserError as error:
        return failed(name, error, time.monotonic() - began_s)
    return passed(name, seen, time.monotonic() - began_s)


def passed(name: str, seen: Seen, duration_s: float) -> Stage:
    outcome = Outcome.SKIPPED if seen.skipped else Outcome.OK
    return Stage(name=name, outcome=outcome, duration_s=duration_s, detail=seen.detail)


def failed(name: str, error: UserError, duration_s: float) -> Stage:
    return Stage(
        name=name,
        outcome=Outcome.FAILED,
        duration_s=duration_s,
        detail=error.message,
        hint=error.hint,
        exit_code=error.exit_code,
    )


def skipped(name: str, why: str) -> Stage:
    return Stage(name=name, outcome=Outcome.SKIPPED, detail=why)


def plan_stage(recipe: Recipe) -> Seen:
    """Raises a UserError when a launch would refuse its plan."""
    refuse_passed_deadline(recipe, time.time())
    plan = make_plan(recipe)
    slices = f"{plan.hardware.num_slices} slice{'s' * (plan.hardware.num_slices > 1)}"
    hosts = f"{plan.hardware.hosts_per_slice} host{'s' * (plan.hardware.hosts_per_slice > 1)}"
    return Seen(detail=f"{slices} of {recipe.hardware.generation} {recipe.hardware.topology}, each {hosts}")


def manifest_stage(recipe: Recipe, folder: Path) -> Seen:
    """The JobSet or queued resource, made and checked as far as it can be offline.

    Raises:
      UserError: the code in ``folder`` cannot be sent, or the manifest could not run.
    """
    if recipe.target.kind == "local":
        return Seen(detail="runs on this machine have none", skipped=True)
    lacking = launch_problems(recipe)
    unknown = [problem for problem in lacking if problem.key not in _PLACEHOLDERS]
    if unknown:
        raise RecipeError(recipe.name, unknown)
    bundle = make_bundle(folder) if recipe.target.ship_code else None
    complete = _with_placeholders(recipe, [problem.key for problem in lacking])
    manifest = target_manifest(complete, bundle=bundle.digest if bundle else None)
    what = "JobSet" if recipe.target.kind == "gke" else "queued resource"
    open_keys = ", ".join(problem.key for problem in lacking)
    needs = f"; a launch also needs {open_keys}, here with placeholders" if lacking else ""
    return Seen(detail=f"{what} of {size_text(len(manifest))}{needs}")


def _with_placeholders(recipe: Recipe, keys: list[str]) -> Recipe:
    for key in keys:
        section, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(recipe, section), **{name: _PLACEHOLDERS[key]})
        recipe = dataclasses.replace(recipe, **{section: changed})
    return recipe


def data_stage(recipe: Recipe) -> Seen:
    """Raises a UserError when the recipe's own data are not on this machine."""
    data = recipe.data
    paths = {"data.path": data.path, "data.eval_path": data.eval_path}
    for key, path in paths.items():
        if path is not None and path.startswith("gs://"):
            raise UserError(
                f"{key}={path}: data are read from local paths",
                hint=f"copy them to each host or mount the bucket there (docs/data.md); {_ANYWAY}",
            )
    try:
        check_inputs(recipe)
    except UserError as error:
        raise UserError(error.message, hint=f"{error.hint}; {_ANYWAY}", exit_code=error.exit_code) from error
    return Seen(detail=f"{data.source}{f': {data.path}' if data.path else ''}")
