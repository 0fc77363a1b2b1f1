"""What submission makes of what is there under a run's name: the decision, and what differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from launcher.gke import names
from launcher.gke.differing import differences, from_to
from launcher.gke.follow import ended
from launcher.gke.observe import JobState, Observation
from launcher.gke.submit import Standing, Wanted, grace_left_s, standing
from launcher.ledger import AttemptEnd
from recipes.contract import ExitCode


def jobset(spec: str = "aaaa", **changes: Any) -> dict[str, Any]:
    """Of the run ``r``; keyword arguments replace labels (with _ for / and -)."""
    labels = {names.MANAGED_BY: names.OWNER, names.RUN: "r", names.SPEC: spec}
    metadata = {"name": "r", "labels": labels, "annotations": {names.RUN_DIR: "gs://bucket/runs/r"}}
    return {"metadata": metadata, "spec": {"replicatedJobs": [{"name": "slice", "replicas": 2}]}, **changes}


WANTED = Wanted(manifest=jobset("aaaa"), fallback=jobset("bbbb"))


def with_metadata(**changes: Any) -> dict[str, Any]:
    found = jobset()
    found["metadata"] |= changes
    return found


def status(kind: str, value: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": value}]}


FOUND: dict[str, tuple[dict[str, Any] | None, Standing]] = {
    "nothing": (None, Standing.ABSENT),
    "the same": (jobset("aaaa"), Standing.SAME),
    "the same, suspended by Kueue": (jobset("aaaa", status=status("Suspended", "True")), Standing.SAME),
    "the same without message patterns": (jobset("bbbb"), Standing.SAME),
    "other code or settings": (jobset("cccc"), Standing.OTHER),
    "no spec label": (jobset(""), Standing.OTHER),
    "completed": (jobset("aaaa", status=status("Completed", "True")), Standing.ENDED),
    "failed": (jobset("cccc", status=status("Failed", "True")), Standing.ENDED),
    "not failed": (jobset("aaaa", status=status("Failed", "False")), Standing.SAME),
    "being deleted": (with_metadata(deletionTimestamp="2026-01-01T00:00:00Z"), Standing.DELETING),
    "no labels": (with_metadata(labels={}), Standing.FOREIGN),
    "somebody's, being deleted": (with_metadata(labels={}, deletionTimestamp="now"), Standing.FOREIGN),
    "somebody else's": (with_metadata(labels={names.MANAGED_BY: "Helm", names.RUN: "r"}), Standing.FOREIGN),
    "of another run": (
        with_metadata(labels={names.MANAGED_BY: names.OWNER, names.RUN: "q"}),
        Standing.FOREIGN,
    ),
    "in another root": (with_metadata(annotations={names.RUN_DIR: "gs://other/r"}), Standing.FOREIGN),
    "labels of another shape": (with_metadata(labels=["x"]), Standing.FOREIGN),
}


@pytest.mark.parametrize("what", FOUND)
def test_standing(what: str) -> None:
    found, expected = FOUND[what]
    assert standing(found, WANTED) is expected


def test_what_differs_is_named_and_defaults_of_the_server_do_not_count() -> None:
    wanted = jobset()
    wanted["spec"]["replicatedJobs"][0] |= {
        "containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}]}]
    }
    found = copy.deepcopy(wanted)
    found["metadata"] |= {"uid": "u", "generation": 3}
    found["metadata"]["labels"][names.SPEC] = "other"
    found["spec"] |= {"suspend": False}
    assert list(differences(wanted, found)) == []
    found["spec"]["replicatedJobs"][0]["replicas"] = 3
    found["spec"]["replicatedJobs"][0]["containers"][0]["env"][0]["value"] = "2"
    assert list(differences(wanted, found)) == [
        "spec.replicatedJobs[slice].replicas: 3 -> 2",
        "spec.replicatedJobs[slice].containers[trainer].env[A].value: '2' -> '1'",
    ]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("1", "2", "1 -> 2"),
        (
            "gs://b/" + "x" * 80 + "/one",
            "gs://b/" + "x" * 80 + "/two",
            "...xxxxxxxxxxxxxxx/one -> ...xxxxxxxxxxxxxxx/two",
        ),
        ("a" * 70, "b" * 70, f"{'a' * 60}... -> {'b' * 60}..."),
        ("c" * 80, "c" * 90, f"...{'c' * 16} -> ...{'c' * 26}"),
    ],
)
def test_long_values_are_cut_to_what_differs(old: str, new: str, shown: str) -> None:
    assert from_to(old, new) == shown


def pod(deletion: str = "", grace_s: object = 30) -> dict[str, Any]:
    metadata = {"deletionTimestamp": deletion} if deletion else {}
    return {"metadata": metadata, "spec": {"terminationGracePeriodSeconds": grace_s}}


@pytest.mark.parametrize(
    ("pods", "left_s"),
    [
        ([], 0.0),
        ([pod("1970-01-01T00:01:55Z")], 15.0),
        ([pod("1970-01-01T00:01:55Z"), pod("1970-01-01T00:02:00Z")], 20.0),
        ([pod("1970-01-01T00:01:39Z")], 0.0),
        ([pod("1970-01-01T00:01:39Z"), pod()], 30.0),
        ([pod("soon", "long")], 0.0),
    ],
)
def test_how_long_hosts_may_still_save(pods: list[dict[str, Any]], left_s: float) -> None:
    assert grace_left_s(pods, now=100.0) == left_s


def seen(state: JobState, exit_code: int | None = None) -> Observation:
    return Observation(
        state=state,
        why="why",
        restarts=0,
        counted_restarts=0,
        ready=0,
        total=2,
        failed_host="",
        exit_code=exit_code,
    )


def attempt_end(exit_code: int) -> AttemptEnd:
    return AttemptEnd(
        end_s=1.0, exit_code=exit_code, first_failing_host=None, message="m", hint="h", from_step=0, to_step=1
    )


@pytest.mark.parametrize(
    ("observed", "end", "code"),
    [
        (seen(JobState.COMPLETED), None, ExitCode.COMPLETE),
        (seen(JobState.ABSENT), attempt_end(0), ExitCode.COMPLETE),
        (seen(JobState.ABSENT), attempt_end(42), ExitCode.PREEMPTED),
        (seen(JobState.ABSENT), None, ExitCode.PREEMPTED),
        (seen(JobState.FAILED, 1), attempt_end(75), ExitCode.EXPERIMENT_FAILED),
        (seen(JobState.FAILED, 2), None, ExitCode.BAD_INPUT),
        (seen(JobState.FAILED), attempt_end(2), ExitCode.BAD_INPUT),
        (seen(JobState.FAILED, 137), attempt_end(75), ExitCode.INFRASTRUCTURE),
        (seen(JobState.FAILED), None, ExitCode.INFRASTRUCTURE),
    ],
)
def test_how_a_followed_run_ends(observed: Observation, end: AttemptEnd | None, code: ExitCode) -> None:
    assert ended(observed, end).exit_code is code
