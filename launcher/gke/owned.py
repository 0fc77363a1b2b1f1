"""The JobSets of Muster's in a namespace or a whole cluster, each described from itself alone.

One paged request however many there are: what keeps a pending one waiting is `muster status`'s to say.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.gke import names
from launcher.gke.client import Cluster
from launcher.gke.doctor_checks import pod_sets
from launcher.gke.objects import (
    JOBSETS,
    Object,
    Resource,
    annotation,
    condition,
    is_true,
    items,
    label,
    name,
    number,
    text,
)
from launcher.gke.observe import JobState, Seen, explain
from launcher.gke.podspec import TPU
from launcher.gke.submit import is_ours

EVERYWHERE = Resource(group=names.GROUP, version=names.VERSION, plural=names.PLURAL, namespaced=False)
"""JobSets of all namespaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """One JobSet."""

    name: str
    namespace: str
    state: JobState
    restarts: int
    slices: int
    chips: int
    created_s: float
    """Unix time."""
    ended_s: float | None
    queue: str
    """Kueue's LocalQueue; empty without."""
    run_dir: str


def list_ours(cluster: Cluster, *, everywhere: bool) -> Sequence[Object]:
    """JobSets that are labelled as Muster's, by namespace and name."""
    selector = f"{names.MANAGED_BY}={names.OWNER},{names.RUN}"
    found = cluster.list(EVERYWHERE if everywhere else JOBSETS, labels=selector).items
    ours = [each for each in found if is_ours(each, name(each))]
    return sorted(ours, key=lambda each: (text(each, "metadata", "namespace"), name(each)))


def describe(jobset: Object) -> Owned:
    sets = pod_sets(jobset)
    with_chips = [each for each in sets if each.requests.get(TPU)]
    return Owned(
        name=name(jobset),
        namespace=text(jobset, "metadata", "namespace"),
        state=state(jobset),
        restarts=number(jobset, "status", "restarts"),
        slices=sum(each.jobs for each in with_chips or sets),
        chips=int(sum(each.total(TPU) for each in with_chips)),
        created_s=unix_time(text(jobset, "metadata", "creationTimestamp")),
        ended_s=ended_s(jobset),
        queue=label(jobset, names.QUEUE),
        run_dir=annotation(jobset, names.RUN_DIR),
    )


def state(jobset: Object) -> JobState:
    """JobSet counts its ready Jobs itself, so that they need not be read."""
    found = explain(Seen(jobset=jobset)).state
    is_live = found in (JobState.STARTING, JobState.RESTARTING, JobState.PENDING)
    return JobState.RUNNING if is_live and num_up(jobset) == _num_jobs(jobset) else found


def num_up(jobset: Object) -> int:
    """Jobs all of whose hosts are up, or done."""
    counts = items(jobset, "status", "replicatedJobsStatus")
    return sum(number(each, "ready") + number(each, "succeeded") for each in counts)


def _num_jobs(jobset: Object) -> int:
    return sum(each.jobs for each in pod_sets(jobset))


def ended_s(jobset: Object) -> float | None:
    """When it completed or failed; None when it did not."""
    for kind in ("Completed", "Failed"):
        if is_true(jobset, kind):
            return unix_time(text(condition(jobset, kind), "lastTransitionTime"))
    return None


def unix_time(timestamp: str) -> float:
    """0.0 when it is none."""
    try:
        return datetime.datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return 0.0
