"""The JobSet of a run that exists: found by what the run was launched with, and checked to be its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.gke import names
from launcher.gke.client import Cluster, connect
from launcher.gke.look import look
from launcher.gke.objects import JOBSETS, Object, annotation, items, number
from launcher.gke.observe import Observation, explain
from launcher.gke.submit import is_ours
from launcher.rundir import RunDir, read_recipe
from launcher.storage import StorageError, open_storage
from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.schema_target import TargetConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What ``muster status`` shows of the cluster."""

    context: str
    """What the recipe says when the cluster could not be reached."""
    namespace: str
    problem: str
    """Why nobody can tell; empty when somebody can."""
    seen: Observation | None


def last_launch(run: RunDir) -> Recipe | None:
    """What was launched onto a cluster last, None when nothing ever was.

    A change of target is a safe one, so the recipe that the run was created with may be out of date.
    """
    newest = next(iter(run.launches()), None)
    return None if newest is None else read_recipe(run.storage, newest)


def target_of(run: RunDir) -> TargetConfig | None:
    """Where the run was launched last, None when never onto a cluster."""
    launched = last_launch(run)
    return launched.target if launched else None


def targets_of(run: RunDir) -> Sequence[TargetConfig]:
    """Every place where the run was launched, newest first; without older launches that are damaged."""
    found: dict[tuple[str | None, str], TargetConfig] = {}
    for age, path in enumerate(run.launches()):
        with contextlib.nullcontext() if age == 0 else contextlib.suppress(StorageError):
            target = read_recipe(run.storage, path).target
            found.setdefault((target.cluster, target.namespace), target)
    return list(found.values())


def place(target: TargetConfig, near: Cluster) -> Cluster:
    """The cluster of a target; over the connections of another one if it is the same.

    Raises:
      UserError: the kubeconfig does not have it.
    """
    if target.cluster == near.context:
        return near.inside(target.namespace)
    return connect(target.cluster, target.namespace)


def view(run: RunDir, name: str, target: TargetConfig) -> ClusterView:
    """What the cluster says of a run; never an error."""
    found = ClusterView(context=target.cluster or "", namespace=target.namespace, problem="", seen=None)
    try:
        cluster = connect(target.cluster, target.namespace)
        found = dataclasses.replace(found, context=cluster.context)
        jobset = own_jobset(cluster, run, name)
        return dataclasses.replace(found, seen=explain(look(cluster, jobset)))
    except UserError as error:
        return dataclasses.replace(found, problem=error.message)


def is_of(jobset: Object, run: RunDir, name: str) -> bool:
    """Whether a JobSet is this run's."""
    if not is_ours(jobset, name):
        return False
    try:
        return open_storage(annotation(jobset, names.RUN_DIR)).url == run.url
    except UserError:
        return False


def own_jobset(cluster: Cluster, run: RunDir, name: str) -> Object | None:
    """The run's JobSet; None when there is none.

    Raises:
      UserError: the one of that name is another's.
    """
    found = cluster.get(JOBSETS, name)
    if found is None:
        return None
    where = f"JobSet {name} in namespace {cluster.namespace} of cluster {cluster.context}"
    if is_of(found, run, name):
        return found
    if not is_ours(found, name):
        raise UserError(
            f"{where} was not made by Muster for this run", hint="see who made it; it was left alone"
        )
    raise UserError(
        f"{where} belongs to the run in {annotation(found, names.RUN_DIR)}, not to {run.url}",
        hint="give that address instead",
    )


def num_slices(jobset: Object) -> int:
    """Slices that a JobSet has; a head beside them is a single one."""
    return max((number(each, "replicas") for each in items(jobset, "spec", "replicatedJobs")), default=0)
