"""``muster gc`` and ``muster ls`` against a real API server: what is ours goes, look-alikes stay.

pytest tests/cluster/test_gc.py
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from launcher import cli
from launcher.compose import compose
from launcher.gke import names
from launcher.gke.client import connect
from launcher.gke.manifest import manifest, manifest_bytes
from launcher.gke.objects import JOBSETS
from launcher.plan import make_plan
from launcher.storage import Storage, open_storage
from tests.cluster.api import Json
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ADMIN, PLAIN, ControlPlane
from tests.cluster.waiting import wait_until
from tests.local.gcs_server import GcsServer

IMAGE = f"repo/trainer@sha256:{'0' * 64}"
DONE = {"type": "Completed", "status": "True", "reason": "AllJobsCompleted", "message": "all are done"}
LONG_AGO = "2026-01-01T00:00:00Z"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one command said."""

    code: int
    out: str
    err: str


class Runs:
    """JobSets of a namespace without nodes: nothing of them ever starts."""

    def __init__(self, cluster: Cluster, root: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster, self.root, self._capsys = cluster, root, capsys

    def muster(self, *words: str) -> Answer:
        return self.muster_in(self.cluster.namespace, *words)

    def muster_in(self, namespace: str, *words: str) -> Answer:
        self._capsys.readouterr()
        code = cli.main([*words, "--cluster", ADMIN, "-n", namespace])
        captured = self._capsys.readouterr()
        return Answer(code=code, out=captured.out, err=captured.err)

    def gc(self, *words: str) -> dict[str, str]:
        """Names and reasons of what a dry run would delete."""
        answer = self.muster("gc", *words, "--dry-run", "--json")
        assert answer.code == 0, answer.err
        return {each["name"]: each["why"] for each in json.loads(answer.out)["jobsets"]}

    def body(self, name: str) -> Json:
        """As `muster launch` would send it."""
        words = (
            "llama3-8b-v6e-16x16-x2",
            "target=gke",
            f"target.namespace={self.cluster.namespace}",
            f"target.image={IMAGE}",
            "target.ttl_s=2000000000",
            f"run.name={name}",
            f"run.root={self.root}",
        )
        recipe = compose(words[0], words[1:]).recipe
        return manifest(recipe, make_plan(recipe), bundle=None)

    def submit(self, name: str, *, ended: bool = False, directory: bool = True) -> None:
        """As Muster does."""
        connect(ADMIN, self.cluster.namespace).apply(JOBSETS, name, manifest_bytes(self.body(name)))
        if directory:
            open_storage(f"{self.root}/{name}").replace("recipe.yaml", b"")
        if ended:
            self.end(name)

    def imitate(self, name: str, change: Callable[[Json], object] | None = None) -> None:
        """The same object, made by somebody else with the same labels."""
        body = copy.deepcopy(self.body(name))
        if change:
            change(body)
        self.cluster.create("jobsets", body)
        self.end(name)

    def end(self, name: str) -> None:
        path = self.cluster.path("jobsets", name)
        status = {"conditions": [{**DONE, "lastTransitionTime": LONG_AGO}], "terminalState": "Completed"}
        # Its controller writes the status too, until it sees that the JobSet has ended.
        self.cluster.api.patch(f"{path}/status", {"status": status})
        wait_until(lambda: self.cluster.jobset_condition(name) == "Completed", 30)

    def there(self) -> set[str]:
        found = self.cluster.api.get(self.cluster.path("jobsets"))["items"]
        return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}


@pytest.fixture
def runs(
    cluster: Cluster, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Runs]:
    for name, value in {**gcs.env, **cluster.plane.env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MUSTER_ROOT", raising=False)
    yield Runs(cluster, gcs.make_bucket(cluster.namespace) + "/runs", capsys)


class Terminal(io.StringIO):
    """Standard input with somebody at it."""

    def isatty(self) -> bool:
        return True


def test_ended_ones_go_and_look_alikes_stay(runs: Runs) -> None:
    runs.submit("done", ended=True)
    runs.submit("live")
    runs.imitate("by-hand")
    runs.imitate("without-annotation", lambda body: body["metadata"]["annotations"].pop(names.RUN_DIR))
    runs.imitate("another-run", lambda body: body["metadata"]["labels"].update({names.RUN: "done"}))
    runs.imitate("not-managed", lambda body: body["metadata"]["labels"].pop(names.MANAGED_BY))
    everything = runs.there()
    assert runs.gc() == {"done": "it has ended"}

    answer = runs.muster("gc")
    assert (answer.code, runs.there()) == (2, everything)
    assert "there is no terminal to ask on" in answer.err
    assert answer.out.splitlines()[1].split()[:2] == ["done", "completed"]

    answer = runs.muster("gc", "--yes", "--json")
    assert answer.code == 0, answer.err
    [found] = json.loads(answer.out)["jobsets"]
    assert (found["name"], found["deleted"], found["chips"]) == ("done", True, 512)
    assert found["run_dir"] == f"{runs.root}/done"
    assert runs.cluster.jobset("done") is None
    assert runs.there() == everything - {"done"}
    # Its run directory is not gc's to touch.
    assert open_storage(runs.root).exists("done/recipe.yaml")
    assert runs.gc() == {}


def test_one_that_is_younger_stays(runs: Runs) -> None:
    runs.submit("done", ended=True)
    assert runs.gc("--older-than", "90000d") == {}
    assert runs.gc("--older-than", "1s") == {"done": "it has ended"}


def test_run_directories(runs: Runs) -> None:
    runs.submit("done", ended=True)
    runs.submit("gone", ended=True, directory=False)
    runs.submit("pending-gone", directory=False)
    runs.submit("pending")
    age = ("--older-than", "90000d")
    assert runs.gc(*age) == {}
    assert runs.gc(*age, "--root", runs.root) == {"gone": "it has ended, and its run directory is gone"}
    # As for a live one: never before it is old enough.
    assert runs.gc("--older-than", "0s", "--root", runs.root) == {
        "done": "it has ended",
        "gone": "it has ended, and its run directory is gone",
        "pending-gone": "no slice is up, and its run directory is gone",
    }
    answer = runs.muster("gc", *age, "--root", "gs://no-such-bucket/runs", "--dry-run")
    assert answer.code == 0
    assert "run directories are not looked at: bucket no-such-bucket does not exist" in answer.err


def test_one_is_asked_and_says(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.submit("done", ended=True)
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    answer = runs.muster("gc")
    assert (answer.code, runs.there()) == (130, {"done"})
    assert "Delete this?" in answer.err
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    answer = runs.muster("gc")
    assert (answer.code, runs.there()) == (0, set())
    assert "done: gone" in answer.err


def test_one_that_was_launched_again_meanwhile_stays(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.submit("done", ended=True)

    class Slow(Terminal):
        """Thinks about it while another launcher is at work."""

        def readline(self, *_limit: Any) -> str:  # type: ignore[override]
            runs.cluster.api.delete(runs.cluster.path("jobsets", "done"))
            wait_until(lambda: runs.cluster.jobset("done") is None, 30)
            runs.submit("done", ended=True)
            return "y\n"

    monkeypatch.setattr("sys.stdin", Slow())
    answer = runs.muster("gc")
    assert (answer.code, runs.there()) == (0, {"done"})
    assert "done: stays, it changed meanwhile" in answer.err


def test_one_who_may_not(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", plane.env["KUBECONFIG"])
    monkeypatch.delenv("MUSTER_ROOT", raising=False)
    assert cli.main(["gc", "--cluster", PLAIN]) == 2
    assert f"{PLAIN} may not list jobsets.jobset.x-k8s.io" in capsys.readouterr().err


def bundles(root: Storage) -> set[str]:
    return {name[0] for name in root.children(".bundles")}


def test_bundles(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    root = open_storage(runs.root)
    for letter in "abc":
        root.replace(f".bundles/{letter * 64}.tar.gz", b"")
    root.replace("first/recipe.yaml", b"")
    root.replace("first/lock.json", json.dumps({"code": {"bundle": f"sha256:{'a' * 64}"}}).encode())
    body = runs.body("waiting")
    [job] = body["spec"]["replicatedJobs"]
    environment: list[Mapping[str, str]] = job["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    environment.append({"name": "MUSTER_BUNDLE", "value": f"sha256:{'b' * 64}"})
    connect(ADMIN, runs.cluster.namespace).apply(JOBSETS, "waiting", manifest_bytes(body))

    answer = runs.muster("gc", "--root", runs.root, "--bundles", "--yes")
    assert (answer.code, bundles(root)) == (0, {"a", "b", "c"})
    monkeypatch.setattr("launcher.gke.gc.BUNDLE_AGE_S", 0.0)
    answer = runs.muster("gc", "--root", runs.root, "--yes")
    assert (answer.code, bundles(root)) == (0, {"a", "b", "c"})
    answer = runs.muster("gc", "--root", runs.root, "--bundles", "--yes", "--json")
    assert (answer.code, bundles(root)) == (0, {"a", "b"}), answer.err
    assert json.loads(answer.out)["bundles"] == [{"path": f".bundles/{'c' * 64}.tar.gz", "deleted": True}]
    assert root.exists("first/lock.json")


def test_ls(runs: Runs) -> None:
    assert "no runs in namespace" in runs.muster("ls").err
    runs.submit("done", ended=True)
    runs.submit("live")
    runs.imitate("not-managed", lambda body: body["metadata"]["labels"].pop(names.MANAGED_BY))
    answer = runs.muster("ls")
    assert answer.code == 0
    header, done, live = answer.out.splitlines()
    assert header.split() == [
        "RUN",
        "STATE",
        "RESTARTS",
        "SLICES",
        "CHIPS",
        "AGE",
        "QUEUE",
        "RUN",
        "DIRECTORY",
    ]
    assert done.split()[:5] == ["done", "completed", "0", "2", "512"]
    assert live.split()[:5] == ["live", "starting", "0", "2", "512"]
    assert live.split()[-2:] == ["-", f"{runs.root}/live"]
    found = json.loads(runs.muster("ls", "--json").out)
    assert (found["cluster"], found["namespace"]) == (ADMIN, runs.cluster.namespace)
    assert [each["name"] for each in found["runs"]] == ["done", "live"]


def test_ls_everywhere(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.submit("live")
    capsys.readouterr()
    assert cli.main(["ls", "--cluster", ADMIN, "-A"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["NAMESPACE", "RUN"]
    assert any(line.split()[:2] == [runs.cluster.namespace, "live"] for line in lines)


def test_gc_everywhere(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.submit("done", ended=True)
    capsys.readouterr()
    assert cli.main(["gc", "--cluster", ADMIN, "-A", "--yes", "--older-than", "30d"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split()[:2] == ["NAMESPACE", "RUN"]
    assert f"{runs.cluster.namespace}  done" in captured.out
    assert runs.cluster.jobset("done") is None


def test_a_namespace_that_does_not_exist_is_no_empty_one(runs: Runs) -> None:
    for verb in ("ls", "gc"):
        answer = runs.muster(verb)
        assert answer.code == 0 and "there is no namespace" not in answer.err
        answer = runs.muster_in("no-such-namespace", verb)
        assert (answer.code, answer.out) == (2, "")
        assert f"error: there is no namespace no-such-namespace in cluster {ADMIN}\nhint: " in answer.err
