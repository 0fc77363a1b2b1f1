"""Keeps a run to one JobSet: a second one elsewhere would train into the same run directory.

Where a run was launched last is recorded in its directory; whoever runs it, there or anywhere, holds its
lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher import lease
from launcher.beside import beside
from launcher.gke.client import Cluster
from launcher.gke.objects import JOBSETS, Object, uid
from launcher.gke.of_run import is_of, place
from launcher.gke.submit import is_over
from launcher.lease import LeaseHeld
from launcher.rundir import RunDir, launched_recipe, read_recipe
from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig


def check_alone(
    run: RunDir,
    recipe: Recipe,
    cluster: Cluster,
    jobset: Object | None,
    *,
    adopts: bool,
    note: Callable[[str], None],
) -> None:
    """Looks whether somebody else runs it.

    Args:
      run: the run directory, made or not.
      recipe: what is to be launched.
      cluster: where to.
      jobset: what is there under the run's name.
      adopts: nothing is to be submitted, because that one is the same.
      note: is told what could not be found out.

    Raises:
      UserError: its JobSet lives elsewhere, somebody else holds its lease, or the lease is damaged.
    """
    holding = beside(lambda: lease.read(run.storage))
    last = _last_target(run, recipe)
    if last is not None:
        _refuse_elsewhere(run, recipe.run_name, last, cluster, note)
    holder = holding.result()
    own = lease.job_owner(uid(jobset)) if jobset is not None else ""
    now = time.time()
    if not adopts and holder is not None and lease.is_held(holder, now) and holder.owner.id != own:
        raise LeaseHeld(run.url, holder, now)


def _last_target(run: RunDir, recipe: Recipe) -> TargetConfig | None:
    """Of the newest launch, unless it was this very recipe."""
    newest = next(iter(run.launches()), None)
    if newest is None or newest == launched_recipe(recipe)[0]:
        return None
    return read_recipe(run.storage, newest).target


def _refuse_elsewhere(
    run: RunDir, name: str, target: TargetConfig, here: Cluster, note: Callable[[str], None]
) -> None:
    try:
        there = place(target, here)
        if (there.server, there.namespace) == (here.server, here.namespace):
            return
        found = there.get(JOBSETS, name)
    except UserError as error:
        # Its cluster may be gone for good. If it does run there, it holds the lease.
        note(
            f"{name} was launched elsewhere before, and nobody can tell whether it is there: {error.message}"
        )
        return
    if found is None or is_over(found) or not is_of(found, run, name):
        return
    raise UserError(
        f"{name} is live elsewhere: JobSet {name} in namespace {there.namespace} of cluster {there.context}",
        hint=f"stop it first: `muster stop {run.url}`, then launch again; it resumes from its checkpoint",
    )
