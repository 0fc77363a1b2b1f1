"""Makes a run's JobSet be there, once, however often and by however many launchers it is asked for.

The JobSet's name is the run's, so the API server itself keeps a second one out. What to do about what
is there already is one pure decision, ``standing``; its table is tests/unit/test_gke_submit.py. Killed
anywhere, the next submission finds one of these standings and goes on from there.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from launcher.gke import names
from launcher.gke.api_errors import ClusterError, Conflicting, Refused
from launcher.gke.client import Cluster
from launcher.gke.manifest import manifest, manifest_bytes
from launcher.gke.objects import (
    JOBSETS,
    Object,
    annotation,
    is_deleting,
    is_true,
    label,
    name,
    number,
    text,
    uid,
)
from launcher.plan import Plan
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.schema import Recipe

GONE_TIMEOUT_S = 900.0
"""For all pods of an ended JobSet to be gone."""
POLL_S = 0.2
MAX_POLL_S = 2.0
SAY_PERIOD_S = 10.0
MAX_ROUNDS = 10
"""Of looking and acting: more means that others keep changing it."""
PATTERNS = "onJobFailureMessagePatterns"
NO_REHEARSAL = "does not support dry run"
"""Of some webhook in the cluster, not necessarily one that matters here."""


class Standing(enum.StrEnum):
    """What is there under the run's name, seen from what is wanted."""

    ABSENT = "absent"
    SAME = "the same, live"
    OTHER = "another specification, live"
    ENDED = "ended"
    DELETING = "being deleted"
    FOREIGN = "not ours"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be submitted."""

    manifest: Mapping[str, Any]
    fallback: Mapping[str, Any]
    """The same without message patterns, for a JobSet that does not know them."""

    @property
    def run(self) -> str:
        return name(self.manifest)

    @property
    def specs(self) -> Sequence[str]:
        return [label(each, names.SPEC) for each in (self.manifest, self.fallback)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A run's JobSet that is there now."""

    jobset: Object
    created: bool
    """False: it was there already, and is what was wanted."""
    degraded: bool
    """JobSet is too old for message patterns: preemptions count as restarts."""


def wanted_jobset(recipe: Recipe, plan: Plan, bundle: str | None) -> Wanted:
    """The JobSet of a recipe and its plan."""
    return Wanted(
        manifest=manifest(recipe, plan, bundle=bundle),
        fallback=manifest(recipe, plan, bundle=bundle, message_patterns=False),
    )


def standing(found: Object | None, wanted: Wanted) -> Standing:
    """What is there, seen from what is wanted."""
    if found is None:
        return Standing.ABSENT
    if not is_ours(found, wanted.run) or annotation(found, names.RUN_DIR) != annotation(
        wanted.manifest, names.RUN_DIR
    ):
        return Standing.FOREIGN
    if is_deleting(found):
        return Standing.DELETING
    if is_over(found):
        return Standing.ENDED
    return Standing.SAME if label(found, names.SPEC) in wanted.specs else Standing.OTHER


def is_ours(found: Object, run: str) -> bool:
    """Whether its labels prove that Muster made it for a run of this name."""
    return label(found, names.MANAGED_BY) == names.OWNER and label(found, names.RUN) == run


def is_over(found: Object) -> bool:
    """Whether a JobSet has nothing running any more."""
    return is_true(found, "Completed") or is_true(found, "Failed")


def refuse(kind: Standing, found: Object, wanted: Wanted, cluster: Cluster, differing: Differing) -> None:
    """Raises UserError when what is there must not be touched."""
    where = f"JobSet {wanted.run} in namespace {cluster.namespace} of cluster {cluster.context}"
    if kind is Standing.FOREIGN:
        raise _foreign(where, found, wanted)
    if kind is Standing.OTHER:
        lines = "".join(f"\n  {line}" for line in differing(found))
        raise UserError(
            f"{where} runs with other settings or code; what differs:{lines}",
            hint=f"stop it first: `muster stop {annotation(found, names.RUN_DIR)}`, then launch again;"
            " it resumes from its checkpoint",
        )


type Differing = Callable[[Object], Sequence[str]]
"""How a live JobSet differs from the wanted one, in lines; raises UserError for another experiment."""


class Submission:
    """One submission; each method goes one step."""

    def __init__(
        self,
        cluster: Cluster,
        wanted: Wanted,
        differing: Differing,
        *,
        say: Callable[[str], None],
        sleep: Callable[[float], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._cluster, self._wanted, self._differing = cluster, wanted, differing
        self._say, self._sleep, self._monotonic = say, sleep, monotonic
        self._degraded = False

    def rehearse(self) -> None:
        """Has the cluster check what would be created, where nothing is there yet; changes nothing.

        Raises:
          UserError: it refuses: no namespace, no right, a quota, an immutable field, a webhook's reason.
        """
        try:
            self._apply(dry_run=True)
        except Refused as error:
            if NO_REHEARSAL not in error.message:
                raise

    def submit(self) -> Submitted:
        """Looks and acts until the wanted JobSet is there.

        Raises:
          UserError: what is there must not be touched, the cluster refuses, or the old one does not go away.
        """
        lost: ClusterError | None = None
        for _ in range(MAX_ROUNDS):
            found = self._cluster.get(JOBSETS, self._wanted.run)
            kind = standing(found, self._wanted)
            if found is None:
                try:
                    if made := self._create():
                        return made
                except (Conflicting, Refused) as error:
                    # Somebody else was quicker: look again at what is there now.
                    if self._cluster.get(JOBSETS, self._wanted.run) is None:
                        raise
                    lost = error
                continue
            if kind is Standing.SAME:
                return Submitted(jobset=found, created=False, degraded=self._is_degraded(found))
            refuse(kind, found, self._wanted, self._cluster, self._differing)
            self._remove(found, kind)
        raise lost or UserError(
            f"JobSet {self._wanted.run} keeps changing: others act on it too",
            hint="see who launches this run, then try again",
            exit_code=ExitCode.INFRASTRUCTURE,
        )

    def _create(self) -> Submitted | None:
        """None when what it met was being deleted after all."""
        made = self._apply()
        if standing(made, self._wanted) is not Standing.SAME:
            return None
        return Submitted(jobset=made, created=True, degraded=self._degraded)

    def _apply(self, *, dry_run: bool = False) -> Object:
        """What is wanted or, for a JobSet that does not know all of it, what comes nearest."""
        if not self._degraded:
            try:
                body = manifest_bytes(self._wanted.manifest)
                return self._cluster.apply(JOBSETS, self._wanted.run, body, dry_run=dry_run)
            except ClusterError as error:
                if PATTERNS not in error.message:
                    raise
                self._degraded = True
        body = manifest_bytes(self._wanted.fallback)
        return self._cluster.apply(JOBSETS, self._wanted.run, body, dry_run=dry_run)

    def _remove(self, found: Object, kind: Standing) -> None:
        """Deletes an ended JobSet, if nobody does yet, and waits until it is gone with its pods."""
        if kind is Standing.ENDED:
            self._say(f"removing the ended JobSet {self._wanted.run}")
            self._cluster.delete(JOBSETS, self._wanted.run, uid=uid(found))
        wait_gone(self._cluster, found, say=self._say, sleep=self._sleep, monotonic=self._monotonic)

    def _is_degraded(self, found: Object) -> bool:
        return label(found, names.SPEC) == label(self._wanted.fallback, names.SPEC)


def wait_gone(
    cluster: Cluster,
    jobset: Object,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
    monotonic: Callable[[], float],
    timeout_s: float = GONE_TIMEOUT_S,
) -> None:
    """Returns once this very JobSet is gone; its Jobs and pods go before it.

    Raises:
      UserError: it is still there after ``timeout_s``; the message names a pod that stays.
    """
    run, began_s, poll_s = name(jobset), monotonic(), POLL_S
    said_s = began_s
    while (found := cluster.get(JOBSETS, run)) is not None and uid(found) == uid(jobset):
        now_s = monotonic()
        if now_s - began_s >= timeout_s:
            raise _stuck(cluster, jobset, timeout_s)
        if now_s - said_s >= SAY_PERIOD_S:
            said_s = now_s
            say(f"JobSet {run} is being deleted: {now_s - began_s:.0f} s; its hosts may still save")
        sleep(poll_s)
        poll_s = min(poll_s * 1.5, MAX_POLL_S)


def _foreign(where: str, found: Object, wanted: Wanted) -> UserError:
    if not is_ours(found, wanted.run):
        return UserError(
            f"{where} was not made by Muster for this run",
            hint="choose another name with run.name=NAME, or another target.namespace",
        )
    return UserError(
        f"{where} belongs to the run in {annotation(found, names.RUN_DIR)},"
        f" not to {annotation(wanted.manifest, names.RUN_DIR)}",
        hint="choose another name with run.name=NAME, another target.namespace, or that run's run.root",
    )


def _stuck(cluster: Cluster, jobset: Object, timeout_s: float) -> UserError:
    from launcher.gke.look import pods_in  # a launch that goes well does without

    left = [pod for phase in ("Running", "Pending", "Failed") for pod in pods_in(cluster, jobset, phase)]
    message = f"JobSet {name(jobset)} is still being deleted after {timeout_s:g} s"
    hint = "the deletion goes on: try again to wait for it"
    if left and (saving_s := grace_left_s(left, cluster.time_s() or time.time())) > 0:
        message = f"JobSet {name(jobset)} is still saving: its hosts have up to {saving_s:.0f} s more"
    elif left:
        message += f": pod {name(left[0])} on node {text(left[0], 'spec', 'nodeName') or '-'} stays"
        hint = "look at that node (a lost one keeps its pods until it is removed), then try again"
    return UserError(message, hint=hint, exit_code=ExitCode.INFRASTRUCTURE)


def grace_left_s(pods: Sequence[Object], now: float) -> float:
    """For how long some of these pods, whose JobSet is being deleted, may go on; 0 when none may.

    Args:
      pods: what is left.
      now: Unix time by the cluster's clock.
    """
    return max([0.0, *(_grace_end_s(pod, now) - now for pod in pods)])


def _grace_end_s(pod: Object, now: float) -> float:
    """The API server writes the end of the grace period, not its beginning, as the time of deletion."""
    try:
        return datetime.fromisoformat(text(pod, "metadata", "deletionTimestamp")).timestamp()
    except ValueError:
        # Its turn to be deleted has not come yet.
        return now + number(pod, "spec", "terminationGracePeriodSeconds")
