"""What is garbage and what is not: JobSets by their state, look-alikes, run directories, code bundles."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.gke import names
from launcher.gke.gc import RunSeen, find_garbage, is_proven, look_at_run, unused_bundles, why_garbage
from launcher.gke.objects import Object
from launcher.gke.observe import JobState
from launcher.gke.owned import describe, state, unix_time
from launcher.storage import Storage, open_storage
from recipes.errors import UserError

NOW = unix_time("2026-06-30T00:00:00Z")
WEEK_S = 7 * 86400.0
LONG_AGO, YESTERDAY = "2026-06-01T00:00:00Z", "2026-06-29T00:00:00Z"
HEARD = {"long ago": unix_time(LONG_AGO), "yesterday": unix_time(YESTERDAY), "never": 0.0}


def fields(manager: str = "muster", operation: str = "Apply", label: str = names.RUN) -> Mapping[str, Any]:
    return {
        "manager": manager,
        "operation": operation,
        "fieldsV1": {"f:metadata": {"f:labels": {f"f:{label}": {}}}},
    }


def jobset(
    *,
    ended: str = "",
    condition: str = "Completed",
    created: str = LONG_AGO,
    ready: int = 0,
    suspend: bool = False,
    queue: str = "",
    labels: Mapping[str, str] | None = None,
    run_dir: str = "gs://bucket/runs/r",
    managers: Sequence[Mapping[str, Any]] = (fields(), fields("jobset", "Update", "other")),
    deleting: bool = False,
    bundle: str = "",
) -> dict[str, Any]:
    """A JobSet of 2 slices of 4 hosts of 4 chips, as Muster makes it."""
    own = {names.MANAGED_BY: names.OWNER, names.RUN: "r"} | dict(labels or {})
    conditions = [{"type": condition, "status": "True", "lastTransitionTime": ended}] if ended else []
    container = {
        "resources": {"requests": {"google.com/tpu": "4"}},
        "env": [{"name": "MUSTER_BUNDLE", "value": f"sha256:{bundle}"}],
    }
    pod = {"spec": {"containers": [container]}}
    job = {"name": "slice", "replicas": 2, "template": {"spec": {"parallelism": 4, "template": pod}}}
    return {
        "metadata": {
            "name": "r",
            "namespace": "team",
            "creationTimestamp": created,
            "labels": own | ({"kueue.x-k8s.io/queue-name": queue} if queue else {}),
            "annotations": {names.RUN_DIR: run_dir} if run_dir else {},
            "managedFields": list(managers),
            **({"deletionTimestamp": YESTERDAY} if deleting else {}),
        },
        "spec": {"suspend": suspend, "replicatedJobs": [job]},
        "status": {
            "conditions": conditions,
            "restarts": 3,
            "replicatedJobsStatus": [{"name": "slice", "ready": ready, "succeeded": 0}],
        },
    }


LOOK_ALIKES = {
    "no managed-by label": jobset(ended=LONG_AGO, labels={names.MANAGED_BY: ""}),
    "somebody else's managed-by": jobset(ended=LONG_AGO, labels={names.MANAGED_BY: "helm"}),
    "label of another run": jobset(ended=LONG_AGO, labels={names.RUN: "r2"}),
    "no annotation": jobset(ended=LONG_AGO, run_dir=""),
    "no record of fields": jobset(ended=LONG_AGO, managers=()),
    "another field manager": jobset(ended=LONG_AGO, managers=[fields("kubectl")]),
    "updated, not applied": jobset(ended=LONG_AGO, managers=[fields(operation="Update")]),
    "applied something else": jobset(ended=LONG_AGO, managers=[fields(label="other")]),
    "nothing at all": {"metadata": {"name": "r"}},
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left_alone(name: str) -> None:
    found = LOOK_ALIKES[name]
    assert not is_proven(found)
    for run in (None, RunSeen(exists=False, heard_s=0.0), RunSeen(exists=True, heard_s=0.0)):
        assert why_garbage(found, run, now=NOW, older_than_s=0.0) == ""


GONE, QUIET = RunSeen(exists=False, heard_s=0.0), RunSeen(exists=True, heard_s=HEARD["long ago"])
HEARD_OF, NEVER = RunSeen(exists=True, heard_s=HEARD["yesterday"]), RunSeen(exists=True, heard_s=0.0)


@pytest.mark.parametrize(
    ("found", "run", "why"),
    [
        (jobset(ended=LONG_AGO), None, "it has ended"),
        (jobset(ended=LONG_AGO, condition="Failed"), None, "it has ended"),
        (jobset(ended=LONG_AGO), HEARD_OF, "it has ended"),
        (jobset(ended=LONG_AGO, deleting=True), GONE, ""),
        (jobset(ended=YESTERDAY), None, ""),
        (jobset(ended=YESTERDAY), QUIET, ""),
        (jobset(ended=YESTERDAY), GONE, "it has ended, and its run directory is gone"),
        (jobset(ended=YESTERDAY, condition="Suspended"), None, ""),
        (jobset(), None, ""),
        (jobset(), GONE, "no slice is up, and its run directory is gone"),
        (jobset(), QUIET, "no slice is up, and no host was heard of for as long"),
        (jobset(), NEVER, "no slice is up, and no host was heard of for as long"),
        (jobset(), HEARD_OF, ""),
        (jobset(suspend=True), QUIET, "no slice is up, and no host was heard of for as long"),
        (jobset(suspend=True, queue="tpu"), QUIET, ""),
        (jobset(suspend=True, queue="tpu"), GONE, "no slice is up, and its run directory is gone"),
        (jobset(queue="tpu"), QUIET, "no slice is up, and no host was heard of for as long"),
        (jobset(ready=1), GONE, ""),
        (jobset(ready=2), QUIET, ""),
        (jobset(created=YESTERDAY), GONE, ""),
        (jobset(created=YESTERDAY), NEVER, ""),
    ],
)
def test_garbage(found: Object, run: RunSeen | None, why: str) -> None:
    assert why_garbage(found, run, now=NOW, older_than_s=WEEK_S) == why


def make_run(root: Path, name: str, **files: str) -> None:
    for path, text in {"recipe.yaml": "", **files}.items():
        place = root / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_only_directories_below_the_root_are_looked_at(tmp_path: Path) -> None:
    root = open_storage(str(tmp_path / "runs"))
    make_run(tmp_path / "runs", "there")
    make_run(tmp_path / "elsewhere", "there")

    def seen(run_dir: str) -> RunSeen | None:
        return look_at_run(root, run_dir, NOW)

    assert seen(f"{root.url}/gone") == RunSeen(exists=False, heard_s=0.0)
    # Its recipe cannot be read, so nobody knows when it was last heard of.
    assert seen(f"{root.url}/there") == RunSeen(exists=True, heard_s=math.inf)
    assert seen(f"{tmp_path}/elsewhere/gone") is None
    assert seen(f"{root.url}-2/gone") is None
    assert seen("") is None
    assert seen(f"{root.url}/a\0b") is None
    assert look_at_run(None, f"{root.url}/gone", NOW) is None


def test_find_garbage(tmp_path: Path) -> None:
    root = open_storage(str(tmp_path))
    make_run(tmp_path, "there")
    gone, there = jobset(run_dir=f"{tmp_path}/gone"), jobset(run_dir=f"{tmp_path}/there")
    ended = jobset(ended=LONG_AGO, run_dir="gs://other/runs/r")
    found = find_garbage([gone, there, ended], root, now=NOW, older_than_s=WEEK_S)
    assert [each.jobset for each in found] == [gone, ended]
    assert [
        each.jobset for each in find_garbage([gone, there, ended], None, now=NOW, older_than_s=WEEK_S)
    ] == [ended]


# Listing


def test_describe() -> None:
    found = describe(jobset(ended=YESTERDAY, queue="tpu"))
    assert (found.name, found.namespace, found.state) == ("r", "team", JobState.COMPLETED)
    assert (found.slices, found.chips, found.restarts) == (2, 32, 3)
    assert (found.queue, found.run_dir) == ("tpu", "gs://bucket/runs/r")
    assert (found.created_s, found.ended_s) == (HEARD["long ago"], HEARD["yesterday"])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (jobset(ready=2), JobState.RUNNING),
        (jobset(ready=1), JobState.RESTARTING),
        (jobset(ready=2, deleting=True), JobState.DELETING),
        (jobset(ready=2, suspend=True), JobState.SUSPENDED),
        (jobset(suspend=True, queue="tpu"), JobState.QUEUED),
        (jobset(ended=LONG_AGO, condition="Failed"), JobState.FAILED),
        ({"metadata": {"name": "r"}, "spec": {"replicatedJobs": [{"replicas": 1}]}}, JobState.STARTING),
    ],
)
def test_state(found: Object, expected: JobState) -> None:
    assert state(found) is expected


def test_a_time_that_is_none() -> None:
    assert unix_time("yesterday") == 0.0


# Bundles

A, B, C, D, E = (letter * 64 for letter in "abcde")


@pytest.fixture
def root(tmp_path: Path) -> Storage:
    """Five old bundles and a young one, of which runs name two."""
    (tmp_path / ".bundles").mkdir()
    for name in (f"{A}.tar.gz", f"{B}.tar.gz", f"{C}.tar.gz", f"{D}.tar.gz", "notes.txt", f"{E}.tar"):
        path = tmp_path / ".bundles" / name
        path.write_bytes(b"")
        os.utime(path, (NOW - 31 * 86400, NOW - 31 * 86400))
    (tmp_path / ".bundles" / f"{E}.tar.gz").write_bytes(b"")
    os.utime(tmp_path / ".bundles" / f"{E}.tar.gz", (NOW - 29 * 86400, NOW - 29 * 86400))
    make_run(tmp_path, "first", **{"lock.json": f'{{"code": {{"bundle": "sha256:{A}"}}}}'})
    make_run(tmp_path, "second", **{"attempts/0002/start.json": f'{{"lock": {{"bundle": "sha256:{B}"}}}}'})
    make_run(tmp_path, "third")
    return open_storage(str(tmp_path))


def test_bundles_that_nothing_names(root: Storage) -> None:
    assert unused_bundles(root, [], now=NOW) == [f".bundles/{C}.tar.gz", f".bundles/{D}.tar.gz"]
    assert unused_bundles(root, [jobset(bundle=C)], now=NOW) == [f".bundles/{D}.tar.gz"]
    assert unused_bundles(root, [], now=NOW - 2 * 86400) == []


def test_bundles_while_a_run_cannot_be_read(root: Storage, tmp_path: Path) -> None:
    (tmp_path / "first" / "lock.json").unlink()
    (tmp_path / "first" / "lock.json").mkdir()
    with pytest.raises(UserError):
        unused_bundles(root, [], now=NOW)


# Command line


@pytest.mark.parametrize("age", ["7", "d", "-1d", "1.5d", "1w", ""])
def test_ages_that_are_none(age: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gc", "--older-than", age]) == 2
    assert "is no age; write for example 7d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gc", "-n", "team", "-A"], "exclude each other"),
        (["ls", "-n", "team", "-A"], "exclude each other"),
        (["ls", "--root", "runs", "-A"], "--root is for the runs of a folder"),
        (["gc", "--bundles"], "--bundles needs --root"),
    ],
)
def test_words_that_contradict(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUSTER_ROOT", raising=False)
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
