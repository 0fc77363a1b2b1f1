"""What a JobSet is said to be doing, and why it is not running: a table of situations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from launcher.gke.objects import Object
from launcher.gke.observe import JobState, Seen, explain, num_hosts, pod_host

IMAGE = "registry/image@sha256:00"
LEADER_EVENT = "Error creating: admission webhook denied the request: leader pod not yet scheduled"
QUOTA_EVENT = (
    'Error creating: pods "r-slice-0-0-x" is forbidden: exceeded quota: q, requested: google.com/tpu=4'
)


def jobset(
    *conditions: tuple[str, str, str, str],
    suspend: bool = False,
    queue: str = "",
    status: Mapping[str, Any] | None = None,
    deleting: bool = False,
    replicas: int = 2,
) -> Object:
    """A JobSet of two slices of one host; conditions are (type, status, reason, message)."""
    found = [{"type": a, "status": b, "reason": c, "message": d} for a, b, c, d in conditions]
    return {
        "metadata": {
            "name": "r",
            "uid": "u",
            "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {},
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {}),
        },
        "spec": {
            "suspend": suspend,
            "replicatedJobs": [{"replicas": replicas, "template": {"spec": {"parallelism": 1}}}],
        },
        "status": {"conditions": found, **(status or {})},
    }


def job(index: int, *, ready: int = 0, succeeded: int = 0, active: int = 0, attempt: int = 0) -> Object:
    labels = {"jobset.sigs.k8s.io/restart-attempt": str(attempt)}
    return {
        "metadata": {"name": f"r-slice-{index}", "uid": f"job-{index}", "labels": labels},
        "status": {"ready": ready, "succeeded": succeeded, "active": active},
    }


def pod(index: int, phase: str, *, attempt: int = 0, **status: Any) -> Object:
    labels = {
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        "jobset.sigs.k8s.io/job-index": str(index),
        "batch.kubernetes.io/job-completion-index": "0",
    }
    return {
        "metadata": {"name": f"r-slice-{index}-0-abc", "labels": labels},
        "status": {"phase": phase, **status},
    }


def waiting(index: int, reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(index, "Pending", containerStatuses=[{"name": "trainer", "image": IMAGE, "state": state}])


def unplaced(index: int, message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(index, "Pending", conditions=[condition])


def ended(index: int, code: int, message: str, *, at: str, attempt: int = 0) -> Object:
    state = {"terminated": {"exitCode": code, "message": message, "finishedAt": at}}
    status = [
        {"name": "trainer", "state": state},
        {"name": "sidecar", "state": {"terminated": {"exitCode": 9}}},
    ]
    return pod(index, "Failed", attempt=attempt, containerStatuses=status)


def workload(*conditions: tuple[str, str, str], **more: Any) -> Object:
    found = [{"type": a, "status": b, "message": c} for a, b, c in conditions]
    return {"spec": more.get("spec", {}), "status": {"conditions": found, **more.get("status", {})}}


def event(kind: str, message: str, at: str = "2026-01-01T00:00:00Z") -> Object:
    return {
        "involvedObject": {"kind": kind},
        "message": message,
        "reason": "FailedCreate",
        "lastTimestamp": at,
    }


FAILED = ("Failed", "True", "FailJobSetFailurePolicyAction", "jobset failed due to FailJobSet action")
OUT_OF_RESTARTS = (
    "Failed",
    "True",
    "ReachedMaxRestarts",
    "jobset failed due to reaching max number of restarts",
)
QUOTA = (
    "couldn't assign flavors to pod set slice: insufficient unused quota for google.com/tpu, 8 more needed"
)
JOBS = (job(0), job(1))

SITUATIONS: dict[str, tuple[Seen, JobState, str]] = {
    "nothing": (Seen(jobset=None), JobState.ABSENT, "no JobSet"),
    "deleting": (Seen(jobset=jobset(deleting=True)), JobState.DELETING, "being deleted"),
    "completed": (Seen(jobset=jobset(("Completed", "True", "", "done"))), JobState.COMPLETED, ""),
    "a condition that is False says the opposite": (
        Seen(jobset=jobset(("Failed", "False", "", ""), ("Completed", "False", "", "")), jobs=JOBS),
        JobState.STARTING,
        "0 of 2 hosts are up",
    ),
    "running": (Seen(jobset=jobset(), jobs=(job(0, ready=1), job(1, ready=1))), JobState.RUNNING, ""),
    "one is done, the other still ends": (
        Seen(jobset=jobset(), jobs=(job(0, succeeded=1), job(1, ready=1))),
        JobState.RUNNING,
        "",
    ),
    "starting": (Seen(jobset=jobset(), jobs=(job(0, ready=1), job(1))), JobState.STARTING, "1 of 2 hosts"),
    "no controller": (Seen(jobset=jobset()), JobState.STARTING, "no Jobs yet"),
    "suspended": (Seen(jobset=jobset(suspend=True)), JobState.SUSPENDED, "somebody suspended it"),
    "kueue has not looked": (
        Seen(jobset=jobset(suspend=True, queue="lq")),
        JobState.QUEUED,
        "queue lq: Kueue has not taken it up yet",
    ),
    "no quota": (
        Seen(jobset=jobset(suspend=True, queue="lq"), workload=workload(("QuotaReserved", "False", QUOTA))),
        JobState.QUEUED,
        f"queue lq: {QUOTA}",
    ),
    "preempted by kueue": (
        Seen(
            jobset=jobset(suspend=True, queue="lq"),
            workload=workload(
                ("QuotaReserved", "False", "no quota"),
                ("Evicted", "True", "Preempted to accommodate a workload"),
            ),
        ),
        JobState.QUEUED,
        "queue lq: no quota (after: Preempted to accommodate a workload)",
    ),
    "evicted once, long ago": (
        Seen(
            jobset=jobset(suspend=True, queue="lq"),
            workload=workload(("QuotaReserved", "False", "no quota"), ("Evicted", "False", "QuotaReserved")),
        ),
        JobState.QUEUED,
        "queue lq: no quota",
    ),
    "admission check": (
        Seen(
            jobset=jobset(suspend=True, queue="lq"),
            workload=workload(
                ("QuotaReserved", "True", "ok"),
                status={"admissionChecks": [{"name": "dws", "state": "Pending", "message": "no capacity"}]},
            ),
        ),
        JobState.QUEUED,
        "queue lq: dws is Pending: no capacity",
    ),
    "deactivated": (
        Seen(
            jobset=jobset(suspend=True, queue="lq"),
            workload=workload(("Evicted", "True", "requeued too often"), spec={"active": False}),
        ),
        JobState.QUEUED,
        "queue lq: Kueue has deactivated it: requeued too often",
    ),
    "unschedulable": (
        Seen(
            jobset=jobset(),
            jobs=JOBS,
            pods=(unplaced(0, "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes"),),
            events=(event("Job", LEADER_EVENT),),
        ),
        JobState.PENDING,
        "s0-h0, of 2 hosts, cannot be placed: 0/1 nodes are available: 1 Insufficient cpu.",
    ),
    "several unschedulable": (
        Seen(jobset=jobset(), jobs=JOBS, pods=(unplaced(0, "no nodes"), unplaced(1, "no nodes"))),
        JobState.PENDING,
        "s0-h0 and 1 other, of 2 hosts, cannot be placed: no nodes",
    ),
    "image pull": (
        Seen(jobset=jobset(), jobs=JOBS, pods=(waiting(1, "ImagePullBackOff", "not found"),)),
        JobState.PENDING,
        f"s1-h0 cannot pull {IMAGE}: not found",
    ),
    "a missing secret": (
        Seen(
            jobset=jobset(),
            jobs=JOBS,
            pods=(waiting(0, "CreateContainerConfigError", 'secret "s" not found'),),
        ),
        JobState.PENDING,
        's0-h0 cannot start its container: secret "s" not found',
    ),
    "only being created": (
        Seen(jobset=jobset(), jobs=JOBS, pods=(waiting(0, "ContainerCreating"),)),
        JobState.STARTING,
        "0 of 2 hosts are up",
    ),
    "waiting for the leader is no cause": (
        Seen(jobset=jobset(), jobs=JOBS, events=(event("Job", LEADER_EVENT),)),
        JobState.STARTING,
        "0 of 2 hosts are up",
    ),
    "quota exceeded": (
        Seen(jobset=jobset(), jobs=JOBS, events=(event("Job", QUOTA_EVENT), event("Job", "old", "2025"))),
        JobState.PENDING,
        "pods are refused: exceeded quota: q, requested: google.com/tpu=4",
    ),
    "a quota that was exceeded once": (
        Seen(jobset=jobset(), jobs=(job(0, active=1), job(1, active=1)), events=(event("Job", QUOTA_EVENT),)),
        JobState.STARTING,
        "0 of 2 hosts are up",
    ),
    "a controller that tried twice": (
        Seen(jobset=jobset(), jobs=JOBS, events=(event("JobSet", 'jobs.batch "r-slice-1" already exists'),)),
        JobState.STARTING,
        "0 of 2 hosts are up",
    ),
    "restarting, the old Jobs still there": (
        Seen(
            jobset=jobset(status={"restarts": 1}),
            jobs=JOBS,
            pods=(ended(1, 75, "", at="2"), ended(0, 137, "", at="1")),
        ),
        JobState.RESTARTING,
        "restart 1, after s0-h0 left with 137",
    ),
    "restarted and running": (
        Seen(
            jobset=jobset(status={"restarts": 1}),
            jobs=(job(0, ready=1, attempt=1), job(1, ready=1, attempt=1)),
        ),
        JobState.RUNNING,
        "",
    ),
    "an old pod is no cause": (
        Seen(
            jobset=jobset(status={"restarts": 1}),
            jobs=(job(0, attempt=1), job(1, attempt=1)),
            pods=(waiting(0, "ImagePullBackOff"),),
        ),
        JobState.STARTING,
        "0 of 2 hosts are up",
    ),
    "failed by its user": (
        Seen(
            jobset=jobset(FAILED),
            pods=(
                ended(0, 75, "s0-h0: a peer was lost", at="2026-01-01T00:00:01Z"),
                ended(1, 2, "s1-h0: data.path: no such file; correct it", at="2026-01-01T00:00:02Z"),
            ),
        ),
        JobState.FAILED,
        "s1-h0 left with 2: data.path: no such file; correct it",
    ),
    "failed out of restarts": (
        Seen(
            jobset=jobset(OUT_OF_RESTARTS, status={"restarts": 2, "restartsCountTowardsMax": 1}),
            pods=(ended(0, 1, "old", at="1", attempt=1), ended(1, 137, "", at="2", attempt=2)),
        ),
        JobState.FAILED,
        "no restart is left (run.max_restarts); the last failure: s1-h0 left with 137: it left no words",
    ),
    "failed, its pods gone": (Seen(jobset=jobset(FAILED)), JobState.FAILED, FAILED[3]),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation: str) -> None:
    seen, state, why = SITUATIONS[situation]
    found = explain(seen)
    assert (found.state, why in found.why, bool(why) == bool(found.why)) == (state, True, True), found


def test_counts() -> None:
    counts = {"restarts": 3, "restartsCountTowardsMax": 1}
    jobs = (job(0, ready=1, attempt=3), job(1, attempt=3), job(1, ready=1, attempt=2))
    found = explain(Seen(jobset=jobset(status=counts), jobs=jobs))
    assert (found.restarts, found.counted_restarts, found.ready, found.total) == (3, 1, 1, 2)
    assert num_hosts(jobset(replicas=199)) == 199


def test_the_first_to_fail_is_named() -> None:
    pods = (ended(1, 75, "", at="2"), ended(0, 134, "", at="1"))
    found = explain(Seen(jobset=jobset(OUT_OF_RESTARTS), pods=pods))
    assert (found.failed_host, found.exit_code) == ("s0-h0", 134)


@pytest.mark.parametrize("broken", [None, 1, "x", [], {}, {"conditions": {}}, {"conditions": [1, None]}])
def test_objects_of_another_shape_break_nothing(broken: Any) -> None:
    odd: dict[str, Any] = {"metadata": broken, "spec": {"replicatedJobs": broken}, "status": broken}
    events = (odd, {"involvedObject": broken, "message": broken})
    found = explain(Seen(jobset=odd, jobs=(odd,), pods=(odd,), workload=odd, events=events))
    assert found.state in (JobState.STARTING, JobState.PENDING)
    assert pod_host(odd) == ""


def test_words_of_a_pod_are_one_harmless_line() -> None:
    seen = Seen(jobset=jobset(FAILED), pods=(ended(0, 1, "a\n\x1b[31mb" + "c" * 5000, at="1"),))
    why = explain(seen).why
    assert "\n" not in why and "\x1b" not in why and len(why) <= 600
