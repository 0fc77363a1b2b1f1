"""Reads what :mod:`launcher.gke.observe` explains, in few and small requests however many pods there are.

A run of 199 slices has 12,736 pods of some 10 KB each: never are they all read. The Jobs, one a slice,
know how many of theirs are up; pods are looked at only when some are not, and then at most 50 of a phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.gke import names
from launcher.gke.api_errors import ClusterError, Denied, Missing
from launcher.gke.client import Cluster
from launcher.gke.objects import (
    EVENTS,
    JOBS,
    JOBSETS,
    PODS,
    WORKLOADS,
    Object,
    Resource,
    dig,
    label,
    name,
    uid,
)
from launcher.gke.observe import (
    JOBSET_NAME,
    JOBSET_UID,
    MAX_PODS,
    JobState,
    Observation,
    Seen,
    explain,
    lacks_pods,
)

MAX_JOBS = 1000
MAX_EVENTS = 50
EVENTS_TIMEOUT_S = 5.0


def observe(cluster: Cluster, run: str) -> Observation:
    """The JobSet of a run, explained."""
    return explain(look(cluster, cluster.get(JOBSETS, run)))


def look(cluster: Cluster, jobset: Object | None) -> Seen:
    """As much as the explanation of a JobSet needs.

    Raises:
      ClusterError: the cluster does not answer. What may not be read is left out.
    """
    if jobset is None:
        return Seen(jobset=None)
    run = name(jobset)
    jobs = _owned(_list(cluster, JOBS, labels=f"{JOBSET_NAME}={run}", limit=MAX_JOBS), jobset)
    seen = Seen(jobset=jobset, jobs=jobs)
    state = explain(seen).state
    if state is JobState.QUEUED:
        return dataclasses.replace(seen, workload=workload(cluster, jobset))
    if state in (JobState.FAILED, JobState.RESTARTING):
        return dataclasses.replace(seen, pods=pods_in(cluster, jobset, "Failed"))
    if state is not JobState.STARTING:
        return seen
    seen = dataclasses.replace(seen, pods=pods_in(cluster, jobset, "Pending"))
    if explain(seen).state is JobState.PENDING or not lacks_pods(seen):
        return seen
    return dataclasses.replace(seen, events=_warnings(cluster, run, jobs))


def pods_in(cluster: Cluster, jobset: Object, phase: str) -> Sequence[Object]:
    """At most MAX_PODS pods of a JobSet in one phase."""
    labels, fields = f"{JOBSET_NAME}={name(jobset)}", f"status.phase={phase}"
    return _owned(_list(cluster, PODS, labels=labels, fields=fields, limit=MAX_PODS), jobset)


def workload(cluster: Cluster, jobset: Object) -> Object | None:
    """Kueue's Workload of a JobSet, in whichever version it serves."""
    if not label(jobset, names.QUEUE):
        return None
    for resource in WORKLOADS:
        try:
            found = cluster.list(resource, labels=f"kueue.x-k8s.io/job-uid={uid(jobset)}", limit=1).items
        except Missing:
            continue
        except Denied:
            return None
        return found[0] if found else None
    return None


def _warnings(cluster: Cluster, run: str, jobs: Sequence[Object]) -> Sequence[Object]:
    """Of the JobSet and of its Jobs; nothing when the server does not have them soon.

    It looks through all events of the namespace for them, of which thousands of pods make tens of thousands.
    """
    hurried = cluster.impatient(EVENTS_TIMEOUT_S)
    about = f"involvedObject.kind=JobSet,involvedObject.name={run},type=Warning"
    of_jobs = "involvedObject.kind=Job,reason=FailedCreate"
    try:
        found = _list(hurried, EVENTS, fields=about, limit=MAX_EVENTS)
        failed = _list(hurried, EVENTS, fields=of_jobs, limit=MAX_EVENTS)
    except ClusterError:
        return ()
    ours = {uid(job) for job in jobs}
    return [*found, *(event for event in failed if dig(event, "involvedObject", "uid") in ours)]


def _list(
    cluster: Cluster, resource: Resource, *, labels: str = "", fields: str = "", limit: int
) -> Sequence[Object]:
    """Nothing when these credentials may not look: the JobSet itself says most."""
    try:
        return cluster.list(resource, labels=labels, fields=fields, limit=limit).items
    except Denied:
        return ()


def _owned(found: Sequence[Object], jobset: Object) -> Sequence[Object]:
    """Without those of an earlier JobSet of the same name."""
    return [each for each in found if label(each, JOBSET_UID) in ("", uid(jobset))]
