"""The JobSet of one run, as the supervisor sees it: implements :class:`launcher.supervise.place.Place`.

JobSet itself restarts attempts. What is left for a supervisor are limits, and runs that go on with fewer
slices: their JobSet is made anew with another number of slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher import lease
from launcher.gke.api_errors import Conflicting, Denied
from launcher.gke.client import Cluster, connect
from launcher.gke.doctor import NODES
from launcher.gke.doctor_checks_nodes import Hosts
from launcher.gke.look import look
from launcher.gke.objects import JOBSETS, PODS, Object, Resource, created_s, is_deleting, uid
from launcher.gke.observe import JobState, explain
from launcher.gke.of_run import is_of, num_slices
from launcher.gke.podspec import node_selector, tolerations
from launcher.gke.room import room
from launcher.gke.submit import Submission, wanted_jobset
from launcher.plan import make_plan
from launcher.rundir import RunDir, launched_recipe
from launcher.storage import StorageError
from launcher.supervise.observation import Fault, Machines, Option, Phase
from launcher.supervise.place import Look, Refusal
from launcher.supervise.records import Order, Provision, Trouble
from launcher.supervise.wanted import cluster_place
from recipes.contract import ExitCode
from recipes.elastic import possible_slices, with_slices
from recipes.errors import UserError
from recipes.hardware import CPU
from recipes.schema import Recipe

ROOM_PERIOD_S = 30.0
"""Between two counts of the nodes."""
ALL_PODS = Resource(group="", version="v1", plural="pods", namespaced=False)
BOUND = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
PHASES = {
    JobState.QUEUED: Phase.WAITING,
    JobState.PENDING: Phase.WAITING,
    JobState.STARTING: Phase.STARTING,
    JobState.RUNNING: Phase.UP,
    JobState.RESTARTING: Phase.DEGRADED,
    JobState.COMPLETED: Phase.OVER,
    JobState.FAILED: Phase.OVER,
    JobState.DELETING: Phase.DELETING,
}
"""A JobSet that somebody suspended is left alone, as what is not known."""


class GkePlace:
    """The JobSet of one run."""

    def __init__(
        self,
        *,
        run: RunDir,
        recipe: Recipe,
        order: Order,
        cluster: Cluster | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """See the class.

        Args:
          run: its run directory.
          recipe: as launched, with all its slices.
          order: the launch.
          cluster: None: connected to when first needed.
          monotonic: clock.
        """
        self._run, self._recipe, self._order = run, recipe, order
        self._cluster, self._monotonic = cluster, monotonic
        self._place = cluster_place(recipe)
        self._is_elastic = len(possible_slices(recipe)) > 1
        self._jobset: Object | None = None
        """What the last look showed."""
        self._deleted_uid = ""
        self._room: int | None = None
        self._room_s = 0.0

    def look(self) -> Look:
        """See :class:`launcher.supervise.place.Place`."""
        try:
            cluster = self._connected()
            found = cluster.get(JOBSETS, self._recipe.run_name)
            self._jobset = found if found is not None and is_of(found, self._run, self._name) else None
            there = [] if self._jobset is None else [self._machines(cluster, self._jobset)]
            return Look(machines=there, room=self._count_room(cluster) if self._is_elastic else None)
        except UserError:
            return Look(machines=[], unseen=[self._place])

    def create(self, option: Option, number: int, *, is_probe: bool) -> None:
        """See :class:`launcher.supervise.place.Place`."""
        if is_probe:
            raise _refusal(self._name, Trouble.BAD_REQUEST, "probe", "nodes are counted, not asked for")
        effective = with_slices(self._recipe, option.num_slices)
        try:
            cluster = self._connected()
            found = cluster.get(JOBSETS, self._name)
            if found is not None and is_deleting(found):
                message = "an earlier one is still being deleted"
                raise _refusal(self._name, Trouble.UNAVAILABLE, "deleting", message)
            path, body = launched_recipe(effective)
            self._run.storage.replace(path, body)
            if found is None and self._deleted_uid:
                # The pods that held it are gone with their JobSet.
                lease.release_of(self._run.storage, lease.job_owner(self._deleted_uid))
            self._submission(cluster, effective).submit()
        except (Refusal, StorageError):
            raise
        except UserError as error:
            raise _refused(f"submitting {self._name}", error) from error
        self._room = None

    def delete(self, machines: Machines) -> None:
        """See :class:`launcher.supervise.place.Place`."""
        jobset = self._jobset
        if jobset is None:
            return
        try:
            self._connected().delete(JOBSETS, self._name, uid=uid(jobset))
        except UserError as error:
            raise _refused(f"deleting {self._name}", error) from error
        self._deleted_uid, self._room = uid(jobset), None

    def name(self, option: Option, *, is_probe: bool) -> str:
        """See :class:`launcher.supervise.place.Place`."""
        return self._name

    def words(self, machines: Machines) -> str:
        """See :class:`launcher.supervise.place.Place`."""
        return ""

    def left_lease(self, provision: Provision) -> str:
        """See :class:`launcher.supervise.place.Place`."""
        return lease.job_owner(self._deleted_uid)

    @property
    def _name(self) -> str:
        return self._recipe.run_name

    def _connected(self) -> Cluster:
        if self._cluster is None:
            target = self._recipe.target
            self._cluster = connect(target.cluster, target.namespace)
        return self._cluster

    def _machines(self, cluster: Cluster, jobset: Object) -> Machines:
        seen = explain(look(cluster, jobset))
        return Machines(
            name=self._name,
            place=self._place,
            provision=0,
            order="",
            num_slices=num_slices(jobset),
            capacity=self._recipe.target.capacity,
            is_probe=False,
            phase=PHASES.get(seen.state, Phase.UNKNOWN),
            state=f"{seen.state.value}: {seen.why}" if seen.why else seen.state.value,
            created_s=created_s(jobset),
        )

    def _count_room(self, cluster: Cluster) -> int:
        """Counted now and then: it reads every node and pod."""
        if self._room is None or self._monotonic() - self._room_s >= ROOM_PERIOD_S:
            self._room, self._room_s = self._counted(cluster), self._monotonic()
        return self._room

    def _counted(self, cluster: Cluster) -> int:
        hosts = hosts_of(self._recipe)
        try:
            nodes = cluster.list(NODES, labels=",".join(f"{k}={v}" for k, v in hosts.labels.items())).items
        except Denied:
            # Nobody can tell: it stays as it is.
            return num_slices(self._jobset) if self._jobset is not None else hosts.num_slices
        return room(nodes, _bound(cluster), hosts, run=self._name, namespace=cluster.namespace)

    def _submission(self, cluster: Cluster, effective: Recipe) -> Submission:
        return Submission(
            cluster,
            wanted_jobset(effective, make_plan(effective), self._order.bundle),
            lambda _found: ["it was made by another launch"],
            say=lambda _text: None,
            sleep=time.sleep,
            monotonic=self._monotonic,
        )


def hosts_of(recipe: Recipe) -> Hosts:
    """What the run's pods ask of their nodes."""
    plan = make_plan(recipe)
    hardware = plan.hardware
    return Hosts(
        labels=node_selector(recipe.target, plan),
        tolerations=tolerations(recipe),
        chips_per_host=hardware.chips_per_host if hardware.generation != CPU else 0,
        hosts_per_slice=hardware.hosts_per_slice,
        num_slices=hardware.num_slices,
        machine_type=hardware.machine_type,
    )


def _bound(cluster: Cluster) -> Sequence[Object]:
    """Pods on nodes: of all namespaces or, where that may not be seen, of the run's own."""
    for resource in (ALL_PODS, PODS):
        try:
            return cluster.list(resource, fields=BOUND).items
        except Denied:
            continue
    return []


def fault_of(error: UserError) -> Fault:
    """What a cluster's refusal means."""
    trouble = Trouble.BAD_REQUEST
    if error.exit_code == ExitCode.INFRASTRUCTURE or isinstance(error, Conflicting):
        trouble = Trouble.UNAVAILABLE
    elif isinstance(error, Denied):
        trouble = Trouble.PERMISSION
    elif "exceeded quota" in error.message:
        trouble = Trouble.QUOTA
    return Fault(trouble=trouble, code=type(error).__name__, message=error.message)


def _refused(what: str, error: UserError) -> Refusal:
    return Refusal(what, fault_of(error), hint=error.hint)


def _refusal(what: str, trouble: Trouble, code: str, message: str) -> Refusal:
    return Refusal(what, Fault(trouble=trouble, code=code, message=message))
