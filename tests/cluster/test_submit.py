"""Submission against the real API server and controllers: once, whoever asks and however often, and refusals.

pytest tests/cluster/test_submit.py
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import launch_gke
from launcher.gke import client, names
from launcher.gke.look import observe
from launcher.gke.observe import JobState
from launcher.storage import open_storage
from tests.cluster.api import ApiError, Json
from tests.cluster.build import PROGRAMS
from tests.cluster.cluster import IMAGE, Cluster
from tests.cluster.conftest import require
from tests.cluster.control_plane import ADMIN, PLAIN, ControlPlane
from tests.cluster.kueue import make_queue
from tests.cluster.launcher import Capture, Launcher, make_launcher
from tests.cluster.waiting import wait_until
from tests.local.gcs_server import GcsServer
from tests.local.launching import COMMAND

# Once


def test_the_same_again_changes_nothing(launcher: Launcher) -> None:
    code, said = launcher.launch()
    assert (code, "submitted to namespace" in said, "sent the code: 1 files" in said) == (0, True, True), said
    first = launcher.cluster.jobset("quickstart")
    code, said = launcher.launch()
    assert (code, "nothing was changed" in said, "sent" in said) == (0, True, False), said
    again = launcher.cluster.jobset("quickstart")
    assert first is not None and again is not None
    for key in ("uid", "generation", "labels", "annotations"):
        assert first["metadata"][key] == again["metadata"][key]
    lock = open_storage(launcher.url()).read("lock.json")
    assert IMAGE.encode() in lock and b'"manifest_sha256"' in lock and b'"bundle"' in lock


def test_other_settings_or_code_are_refused_while_it_lives(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    before = launcher.uid()
    code, said = launcher.launch("run.max_restarts=7")
    assert (code, "\n  run.max_restarts: 3 -> 7\n" in said, "muster stop" in said) == (2, True, True), said
    (launcher.tree / "mine.py").write_text("VALUE = 2\n")
    code, said = launcher.launch()
    assert (code, "\n  the code changed: sha256:" in said, "labels" in said) == (2, True, False), said
    assert launcher.uid() == before
    code, said = launcher.launch("train.seed=5")
    assert (code, "train.seed  0 -> 5" in said, "run.name=NEW" in said) == (2, True, True), said
    assert "labels" not in said and "remove it" not in said


def test_an_ended_one_is_replaced(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    before = launcher.uid()
    launcher.end()
    (launcher.tree / "mine.py").write_text("VALUE = 3\n")
    code, said = launcher.launch("run.max_restarts=7")
    assert (code, "removing the ended JobSet" in said) == (0, True), said
    assert launcher.uid() not in ("", before)


def test_one_that_is_being_deleted_is_waited_for(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    before, path = launcher.uid(), launcher.cluster.path("jobsets", "quickstart")
    launcher.cluster.api.patch(path, {"metadata": {"finalizers": ["test.example/hold"]}})
    launcher.cluster.api.delete(path)
    free = threading.Timer(2.0, lambda: launcher.cluster.api.patch(path, {"metadata": {"finalizers": None}}))
    free.start()
    code, said = launcher.launch()
    free.join()
    assert code == 0, said
    assert launcher.uid() not in ("", before)


def test_launchers_race_to_one_jobset(launcher: Launcher) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: launcher.launch_apart(), range(4)))
    assert [code for code, _ in results] == [0] * 4, results
    found = launcher.cluster.api.get(launcher.cluster.path("jobsets"))["items"]
    assert [each["metadata"]["name"] for each in found] == ["quickstart"]
    assert found[0]["metadata"]["generation"] == 1


def test_launchers_race_to_replace_an_ended_one(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    before = launcher.uid()
    launcher.end()
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: launcher.launch_apart(), range(3)))
    assert [code for code, _ in results] == [0] * 3, results
    assert launcher.uid() not in ("", before)
    assert sum("submitted to namespace" in said for _, said in results) >= 1


def test_launchers_with_different_settings_race_and_one_wins(launcher: Launcher) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda n: launcher.launch_apart(f"run.max_restarts={n}"), range(3)))
    winners = [number for number, (code, _) in enumerate(results) if code == 0]
    assert len(winners) == 1 and {code for code, _ in results} == {0, 2}, results
    found = launcher.cluster.jobset("quickstart")
    assert found is not None and found["spec"]["failurePolicy"]["maxRestarts"] == winners[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["absent", "ended"])
def test_killed_at_each_request_and_launched_again(launcher: Launcher, scenario: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.submit_killer", scenario, *launcher.keys],
        cwd=launcher.tree,
        env=launcher.env,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.rpartition("kills=")[2]) >= 7, done.stdout


# Refusals


def test_a_foreign_jobset_is_left_alone(launcher: Launcher) -> None:
    assert launcher.launch("run.name=mine")[0] == 0
    found = launcher.cluster.jobset("mine")
    assert found is not None
    foreign = {
        "apiVersion": found["apiVersion"],
        "kind": "JobSet",
        "metadata": {"name": "theirs", "labels": {names.MANAGED_BY: "Helm"}},
        "spec": {"replicatedJobs": found["spec"]["replicatedJobs"]},
    }
    launcher.cluster.create("jobsets", foreign)
    before = launcher.uid("theirs")
    code, said = launcher.launch("run.name=theirs")
    assert (code, "was not made by Muster" in said) == (2, True), said
    assert launcher.runs() == ["mine"]
    open_storage(launcher.url("theirs")).create(
        "recipe.yaml", open_storage(launcher.url("mine")).read("recipe.yaml").replace(b"mine", b"theirs")
    )
    launches = open_storage(launcher.url("mine")).children("launches")
    body = open_storage(launcher.url("mine")).read(f"launches/{launches[0]}")
    open_storage(launcher.url("theirs")).create(f"launches/{launches[0]}", body)
    code, said = launcher.muster("stop", launcher.url("theirs"))
    assert (code, "was not made by Muster" in said) == (2, True), said
    assert launcher.uid("theirs") == before


def test_the_same_name_in_another_root_is_another_run(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    code, said = launcher.launch(f"run.root={launcher.root}-2")
    assert (code, f"belongs to the run in {launcher.url()}" in said) == (2, True), said


def test_no_rights_is_one_clear_error(launcher: Launcher) -> None:
    code, said = launcher.launch(f"target.cluster={PLAIN}")
    assert code == 2
    assert f"{PLAIN} may not get jobsets.jobset.x-k8s.io in namespace {launcher.cluster.namespace}" in said
    assert (said.count("error:"), launcher.runs()) == (1, [])


def test_no_right_to_create_leaves_no_run_behind(launcher: Launcher) -> None:
    cluster = launcher.cluster
    rules = [{"apiGroups": [names.GROUP], "resources": ["jobsets"], "verbs": ["get", "list"]}]
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    cluster.api.create(f"{rbac}/roles", {"metadata": {"name": "looker"}, "rules": rules})
    subject = {"kind": "User", "name": PLAIN, "apiGroup": "rbac.authorization.k8s.io"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "looker"}
    cluster.api.create(
        f"{rbac}/rolebindings", {"metadata": {"name": "looker"}, "subjects": [subject], "roleRef": role}
    )

    def refused() -> str:
        code, said = launcher.launch(f"target.cluster={PLAIN}")
        assert code == 2
        return said if "may not patch" in said else ""

    said = wait_until(refused, 10, "the role")
    assert f"{PLAIN} may not patch jobsets.jobset.x-k8s.io" in said
    assert launcher.runs() == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.namespace=nowhere", "there is no namespace nowhere"),
        ("target.cluster=harness-admn", "did you mean harness-admin?"),
        ("run.root=runs", "run.root=gs://BUCKET/PREFIX"),
        ("target.image=repo:tag", "sha256"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    launcher: Launcher, override: str, message: str
) -> None:
    code, said = launcher.launch(override)
    assert (code, message in said) == (2, True), said
    assert launcher.runs() == []


def test_more_than_the_limits_needs_a_yes(launcher: Launcher) -> None:
    big = ("hardware.price_per_chip_hour=600",)
    code, said = launcher.launch_apart(*big)
    assert (code, "no terminal" in said, "USD 4,800.00 an hour" in said) == (2, True, True), said
    assert launcher.runs() == []
    code, said = launcher.launch_apart(*big, "--yes")
    assert (code, "USD 4,800.00 an hour" in said) == (0, True), said


def test_a_dry_run_touches_nothing(launcher: Launcher) -> None:
    code, said = launcher.launch("--dry-run", "target.cluster=none")
    assert (code, '"num_slices": 2' in said) == (0, True)
    assert (launcher.runs(), launcher.uid()) == ([], "")


@pytest.fixture
def old_jobset(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane whose JobSet does not know message patterns, as before 0.10."""
    require(*PROGRAMS)
    with ControlPlane(tmp_path / "old") as plane:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/jobsets.jobset.x-k8s.io"
        crd = plane.api.get(path)
        found: Any = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for key in ("spec", "failurePolicy", "rules"):
            found = found["properties"][key]
        del found["items"]["properties"]["onJobFailureMessagePatterns"]
        plane.api.request("PUT", path, crd)
        yield plane


def test_an_older_jobset_gets_what_it_knows(
    old_jobset: ControlPlane,
    gcs: GcsServer,
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    with Cluster(old_jobset, tmp_path / "kubelet") as cluster:
        launcher = make_launcher(cluster, gcs, tree, monkeypatch, capsys)

        def noted() -> str:
            code, said = launcher.launch()
            assert code == 0, said
            return said

        assert "older than 0.10" in noted()
        assert "nothing was changed" in noted()
        found = cluster.jobset("quickstart")
        assert found is not None
        assert "onJobFailureMessagePatterns" not in str(found)


# Why it is not running


def _seen(launcher: Launcher, run: str = "quickstart") -> Any:
    return observe(client.connect(ADMIN, launcher.cluster.namespace), run)


def _wait_for(launcher: Launcher, state: JobState, word: str, run: str = "quickstart") -> str:
    def found() -> str:
        seen = _seen(launcher, run)
        return seen.why if seen.state is state and word in seen.why else ""

    return wait_until(found, 30, f"{state}: {word}; {_seen(launcher, run)}")


def test_no_nodes_is_the_reason(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    why = _wait_for(launcher, JobState.PENDING, "nodes")
    assert "cannot be placed" in why
    code, said = launcher.muster("status", launcher.url())
    assert code == 0
    for part in ("quickstart: pending", "cannot be placed", "hosts up    0 of 2", "restarts    0 (0 counted"):
        assert part in said, said
    assert launcher.muster("status", launcher.url(), "--json")[1].count('"state": "pending"') == 1


def test_a_quota_is_the_reason(launcher: Launcher) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    launcher.cluster.create("resourcequotas", quota)
    assert launcher.launch()[0] == 0
    assert "exceeded quota: none" in _wait_for(launcher, JobState.PENDING, "quota")


def test_what_no_pod_gets_past_is_refused_before_anything_is_written(launcher: Launcher) -> None:
    code, said = launcher.launch("target.service_account=nobody")
    assert (code, "quickstart cannot start" in said, "nobody" in said, "hint: " in said) == (
        2,
        True,
        True,
        True,
    )
    code, said = launcher.launch("target.service_account=nobody", "target.queue=lq")
    assert (code, "there is no LocalQueue lq" in said, "nobody" in said) == (2, True, True), said
    assert (launcher.runs(), launcher.uid()) == ([], "")


def test_a_full_queue_is_the_reason(
    kueue_cluster: Cluster, gcs: GcsServer, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    launcher = make_launcher(kueue_cluster, gcs, tree, monkeypatch, capsys)
    with monkeypatch.context() as patched:
        # As of a queue that is deleted just after the look.
        patched.setattr(launch_gke, "blockers", lambda *_: ())
        code, said = launcher.launch("run.name=early", "target.queue=lq")
    assert code == 0, said
    _wait_for(launcher, JobState.QUEUED, "queue lq: ", "early")
    make_queue(kueue_cluster, "lq", quota={"cpu": "3", "memory": "4Gi", "pods": "2"})
    _wait_for(launcher, JobState.PENDING, "cannot be placed", "early")
    assert launcher.launch("run.name=late", "target.queue=lq")[0] == 0
    why = _wait_for(launcher, JobState.QUEUED, "quota", "late")
    assert why.startswith("queue lq: couldn't assign flavors to pod set slice: insufficient unused quota")
    code, said = launcher.muster("status", launcher.url("late"))
    assert (code, why in said) == (0, True), said
    code, said = launcher.muster("stop", launcher.url("late"))
    assert (code, launcher.uid("late")) == (0, ""), said


def test_a_cluster_that_is_away_is_said_and_the_run_is_shown(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert launcher.launch()[0] == 0
    config = (
        Path(launcher.cluster.plane.kubeconfig)
        .read_text()
        .replace(launcher.cluster.plane.server, "https://127.0.0.1:1")
    )
    (tmp_path / "away").write_text(config)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "away"))
    code, said = launcher.muster("status", launcher.url())
    assert (code, "does not answer at https://127.0.0.1:1" in said) == (0, True), said
    assert "quickstart: created" in said


# Stop


def _owned(launcher: Launcher) -> list[Json]:
    kinds = ("jobsets", "jobs", "pods")
    return [each for kind in kinds for each in launcher.cluster.api.get(launcher.cluster.path(kind))["items"]]


def test_stop_leaves_nothing_and_says_so(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    wait_until(lambda: launcher.cluster.pods_of("quickstart"), 20, "pods")
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "no checkpoint" in said) == (0, True), said
    assert _owned(launcher) == []
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "is not running" in said) == (0, True), said
    assert launcher.launch()[0] == 0
    assert "stop.json" not in open_storage(launcher.url()).children()


def test_stop_says_what_stays(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    path = launcher.cluster.path("jobsets", "quickstart")
    launcher.cluster.api.patch(path, {"metadata": {"finalizers": ["test.example/hold"]}})
    code, said = launcher.muster("stop", launcher.url(), "--timeout-s", "1")
    assert (code, "still being deleted after 1 s" in said) == (75, True), said
    with contextlib.suppress(ApiError):
        launcher.cluster.api.patch(path, {"metadata": {"finalizers": None}})
    assert launcher.muster("stop", launcher.url())[0] == 0


# Following, and logs of pods that never came to their run directory


def test_hosts_that_fail_before_they_begin_are_heard(launcher: Launcher) -> None:
    """Their code is gone from the bucket, so nothing of them can be in the run directory."""
    assert launcher.launch()[0] == 0
    storage = open_storage(launcher.root)
    for name in storage.children(".bundles"):
        storage.delete(f".bundles/{name}")
    launcher.cluster.kubelet.add_cpu_nodes("pool-0")
    launcher.cluster.kubelet.add_cpu_nodes("pool-1")
    why = _wait_for(launcher, JobState.FAILED, "the code of this run is gone")
    assert why.startswith(("s0-h0 left with 2: ", "s1-h0 left with 2: "))
    code, said = launcher.muster("logs", launcher.url())
    assert (code, "the code of this run is gone" in said) == (0, True), said
    code, said = launcher.muster("status", launcher.url())
    assert (code, "quickstart: failed" in said, why in said) == (0, True, True), said


def test_ctrl_c_lets_the_run_go_on(launcher: Launcher) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *launcher.words("--wait")],
        cwd=launcher.tree,
        env=launcher.env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process, process.stderr as lines:
        said = ""
        while "cannot be placed" not in said:
            line = next(lines)
            said += line
        process.send_signal(signal.SIGINT)
        said += lines.read()
    assert process.returncode == 130
    assert "the run goes on" in said and f"muster stop {launcher.url()}" in said
    assert launcher.uid() != ""


def test_following_ends_when_somebody_stops_the_run(launcher: Launcher) -> None:
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(launcher.launch_apart, "--wait")
        wait_until(lambda: launcher.uid(), 60, "the JobSet")
        assert launcher.muster("stop", launcher.url())[0] == 0
        code, said = following.result()
    assert (code, "its JobSet was deleted" in said) == (42, True), said
