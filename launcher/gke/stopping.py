"""Stops a run on a cluster: deletes its JobSet, waits until nothing of it is left, and proves it.

Deleting in the foreground sends SIGTERM to the pods first: they save, leave with 42, and are gone before
their Job, which is gone before the JobSet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.gke.client import Cluster
from launcher.gke.objects import JOBS, JOBSETS, PODS, Object, label, name, uid
from launcher.gke.observe import JOBSET_NAME, JOBSET_UID
from launcher.gke.submit import wait_gone
from recipes.contract import ExitCode
from recipes.errors import UserError


def stop_jobset(
    cluster: Cluster,
    jobset: Object,
    timeout_s: float,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once no JobSet, Job or pod of it is left.

    Raises:
      UserError: something is left after ``timeout_s``; the deletion goes on.
    """
    deadline_s = monotonic() + timeout_s
    where = f"JobSet {name(jobset)} in namespace {cluster.namespace} of cluster {cluster.context}"
    cluster.delete(JOBSETS, name(jobset), uid=uid(jobset))
    say(f"deleting {where}: its hosts save and stop")
    wait_gone(cluster, jobset, say=say, sleep=sleep, monotonic=monotonic, timeout_s=timeout_s)
    while left := leftovers(cluster, jobset):
        if monotonic() >= deadline_s:
            raise UserError(
                f"JobSet {name(jobset)} is gone, but not {', '.join(left[:3])}",
                hint="look at them; `muster stop` again goes on waiting",
                exit_code=ExitCode.INFRASTRUCTURE,
            )
        sleep(0.5)
    say(f"gone, with its Jobs and pods: {where}")


def leftovers(cluster: Cluster, jobset: Object) -> Sequence[str]:
    """Some of the Jobs and pods that a JobSet left behind."""
    found: list[str] = []
    for resource, kind in ((JOBS, "Job"), (PODS, "pod")):
        listed = cluster.list(resource, labels=f"{JOBSET_NAME}={name(jobset)}", limit=10, metadata_only=True)
        found += [
            f"{kind} {name(each)}" for each in listed.items if label(each, JOBSET_UID) in ("", uid(jobset))
        ]
    return found
