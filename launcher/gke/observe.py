"""What a run's JobSet is doing and why it is not running, from a few objects of the cluster. Pure.

A condition counts only when its status is "True": JobSet and Kueue keep conditions whose status is
"False", and those say the opposite of their type. The table is tests/unit/test_gke_observe.py.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.gke import names
from launcher.gke.objects import (
    Object,
    condition,
    dig,
    is_deleting,
    is_true,
    items,
    label,
    mapping,
    name,
    number,
    text,
)
from launcher.text import one_line
from recipes.contract import ExitCode, host_name

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""JobSet's own labels on the Jobs and pods that it makes."""
JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
POD_INDEX = "batch.kubernetes.io/job-completion-index"
MAX_PODS = 50
"""At most so many are looked at; more need not be counted to say what keeps them."""

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CANNOT_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_USERS_ERRORS = (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT)
_NO_CAUSE = ("leader pod", "already exists")
"""JobSet's webhook refuses the other pods of a slice until its first one is placed; and its controller, when
it creates many Jobs, tries some twice."""
_REFUSED_POD = re.compile(r"^Error creating: (pods \"[^\"]*\" is forbidden: )?")


class JobState(enum.StrEnum):
    """What a JobSet is doing, in one word."""

    ABSENT = "absent"
    QUEUED = "queued"
    """Kueue has not admitted it (again)."""
    SUSPENDED = "suspended"
    PENDING = "pending"
    """Something keeps hosts from starting; ``why`` says what."""
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    COMPLETED = "completed"
    FAILED = "failed"
    DELETING = "deleting"

    @property
    def is_over(self) -> bool:
        return self in (JobState.ABSENT, JobState.COMPLETED, JobState.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Objects of one JobSet at one moment; lists of pods and events may be cut short."""

    jobset: Object | None
    jobs: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    """Those that are pending or failed; others say nothing more than their Job."""
    workload: Object | None = None
    """Kueue's."""
    events: Sequence[Object] = ()
    """Warnings about the JobSet and its Jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A JobSet at one moment."""

    state: JobState
    why: str
    """One sentence on why it is not running; empty when it is, or is complete."""
    restarts: int
    """Of the whole JobSet, since its creation."""
    counted_restarts: int
    """Those that count towards run.max_restarts; preemptions do not."""
    ready: int
    """Hosts that are up."""
    total: int
    failed_host: str
    """First to fail, when it is failed and the pod is still there."""
    exit_code: int | None
    """Of that host."""


def explain(seen: Seen) -> Observation:
    """The state, and one sentence of why it is not running."""
    jobset = seen.jobset
    if jobset is None:
        return _observation(None, seen, JobState.ABSENT, "there is no JobSet of this run")
    if is_deleting(jobset):
        return _observation(jobset, seen, JobState.DELETING, "it is being deleted; its hosts may still save")
    if is_true(jobset, "Completed"):
        return _observation(jobset, seen, JobState.COMPLETED, "")
    if is_true(jobset, "Failed"):
        return _failed(jobset, seen)
    if dig(jobset, "spec", "suspend") is True:
        state, why = _suspended(jobset, seen)
        return _observation(jobset, seen, state, why)
    return _live(jobset, seen)


def pod_host(pod: Object) -> str:
    """The host that a pod is, for example ``s0-h3``; its own name when its labels do not say."""
    indices = label(pod, JOB_INDEX), label(pod, POD_INDEX)
    if all(index.isascii() and index.isdigit() for index in indices):
        return host_name(int(indices[0]), int(indices[1]))
    return name(pod)


def num_hosts(jobset: Object) -> int:
    """Pods that the JobSet is to have."""
    return sum(
        number(each, "replicas") * (number(each, "template", "spec", "parallelism") or 1)
        for each in items(jobset, "spec", "replicatedJobs")
    )


def lacks_pods(seen: Seen) -> bool:
    """Whether some hosts have no pod; once all have, what kept some from being created is history."""
    created = sum(
        number(job, "status", key) for job in _current(seen) for key in ("active", "succeeded", "failed")
    )
    return seen.jobset is not None and created < num_hosts(seen.jobset)


def _current(seen: Seen) -> Sequence[Object]:
    """Jobs of the newest restart."""
    restarts = number(seen.jobset, "status", "restarts")
    return [job for job in seen.jobs if _attempt(job) == restarts]


def _observation(
    jobset: Object | None, seen: Seen, state: JobState, why: str, failure: _Failure | None = None
) -> Observation:
    return Observation(
        state=state,
        why=one_line(why, 600),
        restarts=number(jobset, "status", "restarts"),
        counted_restarts=number(jobset, "status", "restartsCountTowardsMax"),
        ready=sum(number(job, "status", "ready") for job in _current(seen)),
        total=num_hosts(jobset) if jobset is not None else 0,
        failed_host=failure.host if failure else "",
        exit_code=failure.exit_code if failure else None,
    )


def _suspended(jobset: Object, seen: Seen) -> tuple[JobState, str]:
    queue = label(jobset, names.QUEUE)
    if not queue:
        return JobState.SUSPENDED, "spec.suspend is true: somebody suspended it"
    return JobState.QUEUED, f"queue {queue}: {_queued(seen.workload)}"


def _queued(workload: Object | None) -> str:
    """Kueue's own words."""
    if workload is None:
        return "Kueue has not taken it up yet"
    if dig(workload, "spec", "active") is False:
        return "Kueue has deactivated it: " + text(condition(workload, "Evicted"), "message")
    if not is_true(workload, "QuotaReserved"):
        waiting = text(condition(workload, "QuotaReserved"), "message") or "waiting for quota"
        evicted = text(condition(workload, "Evicted"), "message") if is_true(workload, "Evicted") else ""
        return f"{waiting} (after: {evicted})" if evicted and evicted != waiting else waiting
    checks = [
        f"{text(check, 'name')} is {text(check, 'state')}: {text(check, 'message')}".rstrip(": ")
        for check in items(workload, "status", "admissionChecks")
        if check.get("state") != "Ready"
    ]
    return "; ".join(checks) or text(condition(workload, "Admitted"), "message") or "waiting to be admitted"


def _live(jobset: Object, seen: Seen) -> Observation:
    """Neither over, nor deleted, nor suspended."""
    restarts, current = number(jobset, "status", "restarts"), _current(seen)
    up = sum(number(job, "status", "ready") + number(job, "status", "succeeded") for job in current)
    total = num_hosts(jobset)
    if current and 0 < total <= up:
        return _observation(jobset, seen, JobState.RUNNING, "")
    old = [pod for pod in seen.pods if _attempt(pod) < restarts]
    if is_true(jobset, "RestartingJobSet") or (restarts and (not current or len(current) < len(seen.jobs))):
        return _observation(jobset, seen, JobState.RESTARTING, _restarting(restarts, old))
    waiting = [pod for pod in seen.pods if _attempt(pod) == restarts and _phase(pod) == "Pending"]
    if why := _cause(waiting, total, seen.events if lacks_pods(seen) else ()):
        return _observation(jobset, seen, JobState.PENDING, why)
    if not seen.jobs:
        return _observation(jobset, seen, JobState.STARTING, "the JobSet controller has made no Jobs yet")
    return _observation(jobset, seen, JobState.STARTING, f"{up} of {total} hosts are up")


def _restarting(restarts: int, old: Iterable[Object]) -> str:
    failure = _first_failure(old)
    after = f", after {failure.host} left with {failure.exit_code}" if failure else ""
    return f"restart {restarts}{after}: the hosts of the attempt before have to be gone first"


def _cause(waiting: Sequence[Object], total: int, events: Sequence[Object]) -> str:
    """What keeps pods from running, the most telling first; empty when nothing does."""
    for pod in waiting:
        for status in items(pod, "status", "containerStatuses"):
            if why := _container(pod, status):
                return why
    unplaced = [pod for pod in waiting if condition(pod, "PodScheduled").get("status") == "False"]
    reasons = [text(condition(pod, "PodScheduled"), "message") for pod in unplaced]
    if reason := next(filter(None, reasons), ""):
        first, num = pod_host(unplaced[0]), len(unplaced)
        more = f" and {num - 1} other{'s' if num > 2 else ''}" if num > 1 else ""
        at_least = " or more" if more and len(waiting) >= MAX_PODS else ""
        hosts = f"{first}{more}{at_least}, of {total} hosts,"
        return f"{hosts} cannot be placed: {reason.partition(' preemption: ')[0]}"
    return _refused(events)


def _container(pod: Object, status: Object) -> str:
    waiting = mapping(status, "state", "waiting")
    reason, message = text(waiting, "reason"), text(waiting, "message")
    if reason in _PULL:
        image = text(status, "image") or "its image"
        return f"{pod_host(pod)} cannot pull {image}: {message or reason}"
    if reason in _CANNOT_START:
        return f"{pod_host(pod)} cannot start its container: {message or reason}"
    return ""


def _refused(events: Sequence[Object]) -> str:
    """Why pods, Jobs or the service could not be created: quota, policy, a webhook."""
    newest = sorted(events, key=lambda event: text(event, "lastTimestamp") or text(event, "eventTime"))
    for event in reversed(newest):
        message = text(event, "message")
        if message and not any(words in message for words in _NO_CAUSE):
            kind = text(event, "involvedObject", "kind")
            what = "pods are refused" if kind == "Job" else f"{kind} {text(event, 'reason')}"
            return f"{what}: {_REFUSED_POD.sub('', message)}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    host: str
    exit_code: int
    words: str


def _failed(jobset: Object, seen: Seen) -> Observation:
    newest = max((_attempt(pod) for pod in seen.pods), default=0)
    failure = _first_failure(pod for pod in seen.pods if _attempt(pod) == newest)
    said = condition(jobset, "Failed")
    if failure is None:
        return _observation(jobset, seen, JobState.FAILED, text(said, "message") or text(said, "reason"))
    words = failure.words.removeprefix(f"{failure.host}: ") or "it left no words"
    why = f"{failure.host} left with {failure.exit_code}: {words}"
    if text(said, "reason") == "ReachedMaxRestarts":
        why = f"no restart is left (run.max_restarts); the last failure: {why}"
    return _observation(jobset, seen, JobState.FAILED, why, failure)


def _first_failure(pods: Iterable[Object]) -> _Failure | None:
    """The user's own error if there is one, else whoever ended first; a peer's loss follows its cause."""
    found: list[tuple[bool, str, _Failure]] = []
    for pod in pods:
        for status in items(pod, "status", "containerStatuses"):
            ended = mapping(status, "state", "terminated")
            code = number(ended, "exitCode")
            if text(status, "name") == names.CONTAINER and code:
                failure = _Failure(host=pod_host(pod), exit_code=code, words=text(ended, "message").strip())
                found.append((code not in _USERS_ERRORS, text(ended, "finishedAt"), failure))
    return min(found, key=lambda each: each[:2], default=(True, "", None))[2]


def _attempt(value: Object) -> int:
    """JobSet's number of the restart that made a Job or pod."""
    attempt = label(value, RESTART_ATTEMPT)
    return int(attempt) if attempt.isascii() and attempt.isdigit() else 0


def _phase(pod: Object) -> str:
    return text(pod, "status", "phase")
