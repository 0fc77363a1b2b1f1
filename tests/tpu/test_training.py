"""quickstart on TPU VMs of the stand-in: 2 slices train on CPU devices for real, and are disturbed.

Nothing is played but the cloud: launcher, client, startup script, worker and trainer are the real ones.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.ledger import AttemptEnd, AttemptStart
from launcher.rundir import RunDir
from launcher.storage import open_storage
from launcher.supervise.records import Trouble
from launcher.tpu import names
from recipes.contract import ExitCode
from tests.cluster.conftest import _no_traces, gcs, undisturbed  # noqa: F401 - fixtures
from tests.cluster.runs import NUM_STEPS, SAVE_INTERVAL, SHORT, bits, download
from tests.local.gcs_server import GcsServer
from tests.local.launching import COMMAND, REPO
from tests.tpu.cloud import QUICK, TpuCloud

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 300.0


class Run:
    """One run of quickstart, launched with ``--wait`` from the working tree."""

    def __init__(self, cloud: TpuCloud, bucket: GcsServer, folder: Path) -> None:
        self.cloud, self.bucket, self.folder = cloud, bucket, folder
        self.keys: Mapping[str, Any] = {
            **SHORT,
            "target": "tpu",
            "target.project": "muster-test",
            "target.zone": "us-east5-a",
            "target.capacity": "spot",
            "target.python": sys.executable,
            "run.root": bucket.make_bucket(folder.name.replace("_", "-").lower()) + "/runs",
        }
        self.dir = RunDir(open_storage(f"{self.keys['run.root']}/quickstart"))
        self.id = names.resource_id(self.dir.url, is_probe=False)
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *more: str) -> None:
        with (self.folder / "launch.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, "launch", "quickstart", *self.overrides(), *more],
                cwd=REPO,
                env={
                    **os.environ,
                    **self.bucket.env,
                    "MUSTER_TPU_ENDPOINT": self.cloud.endpoint,
                    "PYTHONPATH": str(REPO),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def overrides(self) -> Sequence[str]:
        return [f"{key}={value}" for key, value in self.keys.items()]

    def finish(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.evidence()) from None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what}: {self.evidence()}"
            assert self.process is None or self.process.poll() is None, f"ended: {self.evidence()}"
            time.sleep(0.25)

    def step(self, attempt: int) -> int:
        """The step that both hosts have reported in an attempt; -1 before that."""
        beats = [beat for beat in self.dir.heartbeats() if beat.attempt == attempt]
        return min((beat.progress.step for beat in beats), default=-1) if len(beats) == 2 else -1

    def start(self, attempt: int) -> AttemptStart:
        start = self.dir.attempt_start(attempt)
        assert start is not None, self.evidence()
        return start

    def end(self, attempt: int) -> AttemptEnd:
        end = self.dir.attempt_end(attempt)
        assert end is not None, self.evidence()
        return end

    def evidence(self) -> str:
        """What to read when a test fails."""
        consoles = "".join(
            f"\n--- {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.cloud.folder.rglob("serial.log"))
        )
        return f"{(self.folder / 'launch.log').read_text()[-3000:]}{consoles}"


@pytest.fixture
def run(gcs: GcsServer, tmp_path: Path) -> Iterator[Run]:  # noqa: F811
    os.environ.update(gcs.env)
    # Long enough to save in; a third of what a Spot VM really gets.
    timing = dataclasses.replace(QUICK, notice_s=10.0)
    with TpuCloud(tmp_path / "cloud", environ=gcs.env, timing=timing) as cloud:
        made = Run(cloud, gcs, tmp_path)
        yield made
        made.close()


def test_a_preempted_run_ends_with_the_same_bits(
    run: Run,
    tmp_path: Path,
    undisturbed: dict[str, str],  # noqa: F811
) -> None:
    run.launch("--wait", "--yes")
    run.wait_for(lambda: run.step(1) >= 10, "step 10")
    noticed_s = time.time()
    run.cloud.preempt(f"{run.id}-1")
    run.wait_for(lambda: run.dir.attempt_start(2), "second attempt")
    assert run.finish() == 0, run.evidence()

    first, second = run.end(1), run.start(2)
    assert first.exit_code == ExitCode.PREEMPTED
    assert second.from_step == first.to_step >= 10, "steps were lost after a notice"
    assert run.end(2).exit_code == 0
    states = run.cloud.states_of(run.id)
    for expected in ("SUSPENDING", "SUSPENDED", "DELETING", "ACCEPTED", "ACTIVE"):
        assert expected in states[states.index("ACTIVE") + 1 :], states
    provisions = run.dir.provisions()
    assert [each.trouble for each in provisions] == [Trouble.PREEMPTED, Trouble.REPLACED]
    assert run.cloud.queued_ids() == []
    assert run.cloud.doubles == []
    assert bits(download(run.dir, tmp_path / "copy")) == undisturbed
    print(f"\nnotice -> attempt 2 opened {second.started_s - noticed_s:.1f} s")


def test_a_killed_worker_is_a_counted_failure_in_the_same_vms(
    run: Run,
    tmp_path: Path,
    undisturbed: dict[str, str],  # noqa: F811
) -> None:
    run.launch("--wait", "--yes")
    run.wait_for(lambda: run.step(1) >= SAVE_INTERVAL + 5, "a checkpoint")
    (worker,) = run.cloud.workers(f"{run.id}-1")
    pid = next(process.pid for process in worker.processes() if "launcher.tpu.worker" in process.cmdline())
    os.kill(pid, signal.SIGKILL)
    assert run.finish() == 0, run.evidence()

    assert run.end(1).exit_code == ExitCode.INFRASTRUCTURE
    assert run.end(1).first_failing_host == "s1-h0"
    assert run.start(2).from_step in range(SAVE_INTERVAL, NUM_STEPS, SAVE_INTERVAL)
    assert [each.trouble for each in run.dir.provisions()] == [Trouble.REPLACED]
    assert run.cloud.states_of(run.id).count("ACTIVE") == 1
    assert worker.boots == 1
    assert bits(download(run.dir, tmp_path / "copy")) == undisturbed
