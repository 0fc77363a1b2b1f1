"""What can be cleared away: JobSets that are provably ours and of no use, and code that no run names.

A JobSet is ours when its labels say so, its annotation names a run directory, and the API server's own
record says that Muster's field manager wrote them. A live one whose hosts are up is never garbage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from launcher.gke import names
from launcher.gke.client import Cluster
from launcher.gke.objects import JOBSETS, Object, annotation, dig, is_deleting, items, label, name, text, uid
from launcher.gke.owned import ended_s, num_up, unix_time
from launcher.gke.submit import is_ours, wait_gone
from launcher.rundir import RunDir
from launcher.storage import NotFound, Storage, StorageError, Unavailable, open_storage
from launcher.summary import summary
from recipes.contract import BUNDLES, RunPath, is_run_name
from recipes.errors import UserError

THREADS = 16
GONE_TIMEOUT_S = 120.0
"""For the pods of one JobSet; those of an ended one are over already."""
BUNDLE_AGE_S = 30 * 86400.0
_BUNDLE = re.compile(r"([0-9a-f]{64})\.tar\.gz")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSeen:
    """What a JobSet's run directory says."""

    exists: bool
    heard_s: float
    """Unix time of the newest sign of life; 0 without one, infinite where nobody can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """A JobSet that can go."""

    jobset: Object
    why: str


def is_proven(jobset: Object) -> bool:
    """Whether Muster made it, by everything that Muster leaves on what it makes."""
    if not is_ours(jobset, name(jobset)) or not annotation(jobset, names.RUN_DIR):
        return False
    return any(
        entry.get("manager") == names.FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and dig(entry, "fieldsV1", "f:metadata", "f:labels", f"f:{names.RUN}") is not None
        for entry in items(jobset, "metadata", "managedFields")
    )


def why_garbage(jobset: Object, run: RunSeen | None, *, now: float, older_than_s: float) -> str:
    """Why it can go, as a clause; empty when it must stay.

    Args:
      jobset: any at all.
      run: None when its run directory was not looked at.
      now: Unix time.
      older_than_s: how long it has to have been of no use.
    """
    if not is_proven(jobset) or is_deleting(jobset):
        return ""
    if (ended := ended_s(jobset)) is not None:
        if run is not None and not run.exists:
            return "it has ended, and its run directory is gone"
        return "it has ended" if now - ended >= older_than_s else ""
    created = unix_time(text(jobset, "metadata", "creationTimestamp"))
    if run is None or num_up(jobset) or now - created < older_than_s:
        return ""
    if not run.exists:
        return "no slice is up, and its run directory is gone"
    is_queued = bool(label(jobset, names.QUEUE)) and dig(jobset, "spec", "suspend") is True
    if not is_queued and now - run.heard_s >= older_than_s:
        return "no slice is up, and no host was heard of for as long"
    return ""


def find_garbage(
    jobsets: Sequence[Object], root: Storage | None, *, now: float, older_than_s: float
) -> Sequence[Garbage]:
    """``root``: where run directories may be looked at; None for nowhere."""
    with ThreadPoolExecutor(THREADS) as pool:
        runs = pool.map(lambda each: look_at_run(root, annotation(each, names.RUN_DIR), now), jobsets)
        found = [
            Garbage(jobset=each, why=why_garbage(each, run, now=now, older_than_s=older_than_s))
            for each, run in zip(jobsets, runs, strict=True)
        ]
    return [each for each in found if each.why]


def look_at_run(root: Storage | None, run_dir: str, now: float) -> RunSeen | None:
    """None when the directory is not below ``root``: a path may mean something else on another machine."""
    if root is None or not run_dir.startswith(f"{root.url}/"):
        return None
    try:
        run = RunDir(open_storage(run_dir))
        if not run.exists():
            return RunSeen(exists=False, heard_s=0.0)
    except Unavailable:
        raise
    except StorageError:
        return None
    try:
        return RunSeen(exists=True, heard_s=summary(run, now).updated_s or 0.0)
    except Unavailable:
        raise
    except UserError:
        # Damaged: nobody can say when it was last heard of.
        return RunSeen(exists=True, heard_s=math.inf)


def remove(
    cluster: Cluster,
    garbage: Garbage,
    still: Callable[[Object], bool],
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
    monotonic: Callable[[], float],
) -> bool:
    """Deletes this very JobSet and waits until it is gone; False when it changed meanwhile and stays.

    Args:
      cluster: at its namespace.
      garbage: as it was shown to the user.
      still: whether what is there now can go too.
      say, sleep, monotonic: for the wait.

    Raises:
      UserError: it may not be deleted, or does not go away.
    """
    run = name(garbage.jobset)
    found = cluster.get(JOBSETS, run)
    if found is None:
        return True
    if uid(found) != uid(garbage.jobset) or not still(found):
        return False
    if not cluster.delete(JOBSETS, run, uid=uid(found)):
        return cluster.get(JOBSETS, run) is None
    wait_gone(cluster, found, say=say, sleep=sleep, monotonic=monotonic, timeout_s=GONE_TIMEOUT_S)
    return True


# Code bundles


def unused_bundles(root: Storage, jobsets: Iterable[Object], *, now: float) -> Sequence[str]:
    """Paths below ``root`` of bundles that are old and that no run and none of ``jobsets`` names.

    Raises:
      UserError: something that may name one could not be read.
    """
    old = {
        match[1]: f"{BUNDLES}/{file}"
        for file, written_s in root.modified(BUNDLES).items()
        if (match := _BUNDLE.fullmatch(file)) and now - written_s >= BUNDLE_AGE_S
    }
    used = named_bundles(root) | {digest for each in jobsets for digest in _in_jobset(each)} if old else set()
    return sorted(path for digest, path in old.items() if digest not in used)


def named_bundles(root: Storage) -> frozenset[str]:
    """Every digest in the locks of all runs and of their attempts, whatever it is a digest of."""
    runs = [root.child(run) for run in root.children() if is_run_name(run)]
    with ThreadPoolExecutor(THREADS) as pool:
        return frozenset(digest for found in pool.map(_in_run, runs) for digest in found)


def _in_run(run: Storage) -> frozenset[str]:
    attempts = run.children(RunPath.ATTEMPTS)
    paths = [RunPath.LOCK, *(f"{RunPath.ATTEMPTS}/{attempt}/start.json" for attempt in attempts)]
    return frozenset(digest for path in paths for digest in _DIGEST.findall(_text(run, path)))


def _text(run: Storage, path: str) -> str:
    try:
        return run.read(path).decode(errors="replace")
    except NotFound:
        return ""


def _in_jobset(jobset: Object) -> Sequence[str]:
    """In the environment of its containers: a run that waits in a queue has no attempt yet."""
    return [
        digest
        for job in items(jobset, "spec", "replicatedJobs")
        for container in items(job, "template", "spec", "template", "spec", "containers")
        for variable in items(container, "env")
        for digest in _DIGEST.findall(text(variable, "value"))
    ]


def remove_bundle(root: Storage, path: str) -> bool:
    """Whether it is gone."""
    root.delete(path)
    return not root.exists(path)
