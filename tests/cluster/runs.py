"""A run that the command line launches onto a cluster of the tests, and what became of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.ledger import AttemptEnd, AttemptStart
from launcher.rundir import RunDir, committed_step
from launcher.storage import open_storage
from recipes.contract import BUNDLES, RunPath
from tests.chaos.training import digests, read_arrays
from tests.cluster.api import Json
from tests.cluster.cluster import IMAGE, Cluster
from tests.cluster.control_plane import ADMIN
from tests.local.gcs_server import GcsServer
from tests.local.launching import COMMAND, REPO, STAND_IN

PATIENCE_S = 300.0
NUM_STEPS, SAVE_INTERVAL = 150, 50
SHORT: Mapping[str, Any] = {
    "hardware.topology": "1x2",
    "train.num_steps": NUM_STEPS,
    "train.global_batch_size": 8,
    "train.eval_interval_steps": NUM_STEPS,
    "train.eval_num_batches": 1,
    "model.dropout_rate": 0.1,
    "checkpoint.save_interval_steps": SAVE_INTERVAL,
    "target.grace_period_s": 30,
    "run.peer_timeout_s": 10,
}
"""Changes to quickstart: 2 slices x 1 host x 2 devices, a step of less than a tenth of a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What one command answered."""

    code: int
    out: str
    err: str


class Run:
    """One run of quickstart on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        gcs: GcsServer,
        *,
        name: str = "quickstart",
        overrides: Mapping[str, Any] | None = None,
        cwd: Path = REPO,
    ) -> None:
        self.cluster, self.gcs, self.name, self.cwd = cluster, gcs, name, cwd
        self.root = gcs.make_bucket(f"{cluster.namespace}-{name}") + "/runs"
        self.keys: dict[str, Any] = {
            "target.kind": "gke",
            "target.cluster": ADMIN,
            "target.namespace": cluster.namespace,
            "target.image": IMAGE,
            "run.name": name,
            "run.root": self.root,
            **(overrides or {}),
        }
        os.environ.update(gcs.env)
        self.dir = RunDir(open_storage(f"{self.root}/{name}"))

    def env(self) -> dict[str, str]:
        return {**os.environ, **self.gcs.env, **self.cluster.plane.env, "PYTHONPATH": str(REPO)}

    def muster(self, *words: str, stdin: str | None = None, timeout_s: float = PATIENCE_S) -> Said:
        """One command line, in the working tree that is launched."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, *words],
            cwd=self.cwd,
            env=self.env(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Said(code=done.returncode, out=done.stdout, err=done.stderr)

    def launch(self, *more: str) -> Said:
        return self.muster("launch", "quickstart", *self.overrides(), *more)

    def overrides(self) -> Sequence[str]:
        return [f"{key}={value}" for key, value in self.keys.items()]

    def status(self) -> dict[str, Any]:
        said = self.muster("status", self.dir.url, "--json")
        assert said.code == 0, said.err
        found: dict[str, Any] = json.loads(said.out)
        return found

    def attempt(self) -> int:
        """Number of the newest attempt; 0 before there is one."""
        return max(self.dir.attempts(), default=0)

    def start(self, attempt: int) -> AttemptStart:
        start = self.dir.attempt_start(attempt)
        assert start is not None, self.evidence()
        return start

    def end(self, attempt: int) -> AttemptEnd:
        end = self.dir.attempt_end(attempt)
        assert end is not None, self.evidence()
        return end

    def step(self, attempt: int | None = None) -> int:
        """The step that every host of an attempt (the newest by default) has reported; -1 before that."""
        newest = attempt or self.attempt()
        beats = [beat for beat in self.dir.heartbeats() if beat.attempt == newest]
        return min((beat.progress.step for beat in beats), default=-1) if len(beats) == 2 else -1

    def committed(self) -> int:
        """The newest committed step."""
        return committed_step(self.dir.storage)

    def restarts(self) -> tuple[int, int]:
        """Of the JobSet: all of them, and those that were counted."""
        status = (self.cluster.jobset(self.name) or {}).get("status", {})
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    def pod(self, slice_id: int) -> Json:
        """The present pod of a slice of one host."""
        prefix = f"{self.name}-slice-{slice_id}-0-"
        return next(
            pod for pod in self.cluster.pods_of(self.name) if pod["metadata"]["name"].startswith(prefix)
        )

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:.0f} s: {self.evidence()}"
            time.sleep(0.25)
            failed = what != "Failed" and self.cluster.jobset_condition(self.name) == "Failed"
            assert not failed, f"the JobSet failed before {what}: {self.evidence()}"

    def wait_until_ended(self, condition: str) -> None:
        """Until the JobSet is ``Completed`` or ``Failed``, whichever is given; the other one is an error."""

        def ended() -> bool:
            found = self.cluster.jobset_condition(self.name)
            assert found in ("", "Suspended", "StartupPolicyCompleted", condition), (
                found,
                self.cluster.jobset(self.name),
                self.evidence(),
            )
            return found == condition

        self.wait_for(ended, condition)

    def evidence(self) -> str:
        """What to read when a test fails."""
        pods = {pod["metadata"]["name"]: pod["status"] for pod in self.cluster.pods_of(self.name)}
        logs = "".join(
            f"\n--- {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.cluster.kubelet.folder.rglob("*.log"))
        )
        return f"{json.dumps(pods, indent=1)[:4000]}\n{logs[-12000:]}"

    def download(self, folder: Path) -> Path:
        """A copy of the run directory."""
        return download(self.dir, folder)

    def objects(self, prefix: str = "") -> list[str]:
        """Everything below the run directory."""
        return objects(self.dir, prefix)

    def bundled_files(self) -> dict[str, bytes]:
        """The files of all code that was sent, by name."""
        found: dict[str, bytes] = {}
        storage = open_storage(self.root)
        for name in storage.children(BUNDLES):
            with tarfile.open(fileobj=io.BytesIO(storage.read(f"{BUNDLES}/{name}"))) as archive:
                for member in archive.getmembers():
                    body = archive.extractfile(member)
                    found[member.name] = body.read() if body else b""
        return found


def download(run: RunDir, folder: Path) -> Path:
    """A copy of a run directory, as far as :func:`bits` reads it."""
    target = folder / run.url.rpartition("/")[2]
    for path in objects(run):
        if path.startswith((RunPath.CHECKPOINTS, RunPath.METRICS)):
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(run.storage.read(path))
    return target


def objects(run: RunDir, prefix: str = "") -> list[str]:
    """Everything below a run directory."""
    found: list[str] = []
    for name in run.storage.children(prefix):
        path = f"{prefix}/{name}".lstrip("/")
        found += objects(run, path) or [path]
    return found


def bits(run_dir: Path) -> dict[str, str]:
    """What every array of a finished run of SHORT is, by SHA-256."""
    return digests(read_arrays(run_dir / "checkpoints" / str(NUM_STEPS)))


def stand_in_tree(folder: Path) -> Path:
    """A working tree whose trainer is the stand-in: small code of a user's own."""
    tree = folder / "tree"
    shutil.copytree(STAND_IN, tree, ignore=shutil.ignore_patterns("__pycache__"))
    return tree
