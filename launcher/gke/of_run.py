"""The JobSet of a run that exists: found by what the run was launched with, and checked to be its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from launcher.gke import names
from launcher.gke.client import Cluster, connect
from launcher.gke.look import observe
from launcher.gke.objects import JOBSETS, Object, annotation
from launcher.gke.observe import Observation
from launcher.gke.submit import is_ours
from launcher.rundir import RunDir, read_recipe
from launcher.storage import open_storage
from recipes.contract import RunPath
from recipes.errors import UserError
from recipes.schema import TargetConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What ``muster status`` shows of the cluster."""

    context: str
    """What the recipe says when the cluster could not be reached."""
    namespace: str
    problem: str
    """Why nobody can tell; empty when somebody can."""
    seen: Observation | None


def target_of(run: RunDir) -> TargetConfig | None:
    """Where the run was launched last, None when never onto a cluster.

    A change of target is a safe one, so the recipe that the run was created with may be out of date.
    """
    launches = run.storage.modified(RunPath.LAUNCHES)
    newest = max(launches, key=lambda name: (launches[name], name), default=None)
    if newest is None:
        return None
    return read_recipe(run.storage, f"{RunPath.LAUNCHES}/{newest}").target


def view(run: RunDir, name: str, target: TargetConfig) -> ClusterView:
    """What the cluster says of a run; never an error."""
    found = ClusterView(context=target.cluster or "", namespace=target.namespace, problem="", seen=None)
    try:
        cluster = connect(target.cluster, target.namespace)
        found = dataclasses.replace(found, context=cluster.context)
        own_jobset(cluster, run, name)
        return dataclasses.replace(found, seen=observe(cluster, name))
    except UserError as error:
        return dataclasses.replace(found, problem=error.message)


def own_jobset(cluster: Cluster, run: RunDir, name: str) -> Object | None:
    """The run's JobSet; None when there is none.

    Raises:
      UserError: the one of that name is another's.
    """
    found = cluster.get(JOBSETS, name)
    if found is None:
        return None
    where = f"JobSet {name} in namespace {cluster.namespace} of cluster {cluster.context}"
    if not is_ours(found, name):
        raise UserError(
            f"{where} was not made by Muster for this run", hint="see who made it; it was left alone"
        )
    theirs = annotation(found, names.RUN_DIR)
    if open_storage(theirs).url != run.url:
        raise UserError(
            f"{where} belongs to the run in {theirs}, not to {run.url}", hint="give that address instead"
        )
    return found
