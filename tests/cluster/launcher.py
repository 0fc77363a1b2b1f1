"""``muster launch target=gke`` and other verbs as a user has them, from a small working tree of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli
from launcher.storage import open_storage
from tests.cluster.cluster import IMAGE, Cluster
from tests.cluster.containers import now
from tests.cluster.control_plane import ADMIN
from tests.local.gcs_server import GcsServer
from tests.local.launching import COMMAND, REPO

Capture = pytest.CaptureFixture[str]


class Launcher:
    """Launches quickstart from a small working tree of its own, in this process or in others."""

    def __init__(self, cluster: Cluster, gcs: GcsServer, tree: Path, capture: Capture) -> None:
        self.cluster, self.tree, self._capture = cluster, tree, capture
        self.root = gcs.make_bucket(cluster.namespace) + "/runs"
        self.env = {**os.environ, **gcs.env, **cluster.plane.env, "PYTHONPATH": str(REPO)}
        self.keys = [
            "target=gke",
            f"target.cluster={ADMIN}",
            f"target.namespace={cluster.namespace}",
            f"target.image={IMAGE}",
            f"run.root={self.root}",
        ]

    def words(self, *more: str) -> list[str]:
        """The command line; a key that is given here replaces the usual one."""
        given = {word.split("=")[0] for word in more}
        return ["launch", "quickstart", *(key for key in self.keys if key.split("=")[0] not in given), *more]

    def muster(self, *words: str) -> tuple[int, str]:
        """One command in this process; its exit code, and what it printed."""
        code = cli.main(words)
        out, err = self._capture.readouterr()
        assert "Traceback" not in err
        return code, out + err

    def launch(self, *more: str) -> tuple[int, str]:
        return self.muster(*self.words(*more))

    def launch_apart(self, *more: str) -> tuple[int, str]:
        """The same in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, *self.words(*more)],
            cwd=self.tree,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stderr

    def url(self, run: str = "quickstart") -> str:
        return f"{self.root}/{run}"

    def runs(self) -> list[str]:
        """Run directories that there are."""
        return [name for name in open_storage(self.root).children() if not name.startswith(".")]

    def uid(self, run: str = "quickstart") -> str:
        found = self.cluster.jobset(run)
        return found["metadata"]["uid"] if found else ""

    def end(self, run: str = "quickstart") -> None:
        """Has the JobSet failed, as its controller would say."""
        condition = {"type": "Failed", "status": "True", "reason": "x", "message": "x"}
        status = {"conditions": [condition | {"lastTransitionTime": f"{now()[:19]}Z"}]}
        path = self.cluster.path("jobsets", f"{run}/status")
        self.cluster.api.patch(path, {"status": status | {"terminalState": "Failed"}})


def make_launcher(
    cluster: Cluster, gcs: GcsServer, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Launcher:
    """With the environment and the working folder of this process."""
    for name, value in {**gcs.env, **cluster.plane.env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tree)
    return Launcher(cluster, gcs, tree, capsys)
