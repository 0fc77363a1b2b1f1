"""quickstart on a cluster: 2 slices train on CPU devices for real, and are disturbed.

Nothing is played: the API server, the JobSet controller and the trainer are the real ones; only the
kubelet runs processes instead of containers.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from recipes.contract import ExitCode, Phase
from tests.cluster.cluster import Cluster
from tests.cluster.runs import NUM_STEPS, SAVE_INTERVAL, SHORT, Run, bits
from tests.local.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(600)


def two_slices(cluster: Cluster) -> list[str]:
    return [cluster.kubelet.add_cpu_nodes(f"pool-{index}")[0] for index in range(2)]


def test_a_preempted_run_ends_with_the_same_bits(
    cluster: Cluster, gcs: GcsServer, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    nodes = two_slices(cluster)
    run = Run(cluster, gcs, overrides=SHORT)
    said = run.launch()
    assert said.code == 0, said.err
    run.wait_for(lambda: run.step() >= 10, "step 10")
    node = run.pod(1)["spec"]["nodeName"]
    assert node in nodes
    noticed_s = time.time()
    cluster.kubelet.preempt(node)
    gone_s = time.time()
    run.wait_for(lambda: run.attempt() == 2, "second attempt")
    run.wait_for(lambda: run.step() > run.start(2).from_step, "step of the second attempt")
    stepped_s = time.time()
    run.wait_until_ended("Completed")

    first, second = run.end(1), run.start(2)
    assert first.exit_code == ExitCode.PREEMPTED
    assert second.from_step == first.to_step >= 10, "steps were lost after a notice"
    assert run.restarts() == (1, 0), "a preemption was counted"
    assert run.end(2).exit_code == 0
    assert bits(run.download(tmp_path / "copy")) == undisturbed
    status = run.status()
    assert status["state"] == "complete"
    print(
        f"\nnotice -> node gone {gone_s - noticed_s:.1f} s"
        f" -> attempt 2 opened {second.started_s - noticed_s:.1f} s"
        f" -> first new step {stepped_s - noticed_s:.1f} s"
    )
    logs = run.muster("logs", run.dir.url, "--previous", "--slice", "1")
    assert "stopped cleanly after a notice" in logs.out + logs.err
    assert run.launch().code == 0, "launching a complete run again is no error"


def test_a_killed_host_is_a_counted_restart_and_the_same_run(
    cluster: Cluster, gcs: GcsServer, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    two_slices(cluster)
    run = Run(cluster, gcs, overrides=SHORT)
    assert run.launch().code == 0
    run.wait_for(lambda: run.committed() >= SAVE_INTERVAL, "a checkpoint")
    codes: dict[str, int] = {}
    cluster.kubelet.kill_container(run.pod(1)["metadata"]["name"])

    def survivor_ended() -> bool:
        for record in run.dir.hosts(1):
            if record.exit_code is not None:
                codes[record.host] = record.exit_code
        return "s0-h0" in codes

    run.wait_for(survivor_ended, "end of the survivor")
    run.wait_until_ended("Completed")
    assert codes["s0-h0"] == ExitCode.INFRASTRUCTURE, run.dir.hosts(1)
    assert run.restarts() == (1, 1)
    assert run.end(1).first_failing_host == "s1-h0"
    assert run.start(2).from_step in range(SAVE_INTERVAL, NUM_STEPS, SAVE_INTERVAL)
    assert bits(run.download(tmp_path / "copy")) == undisturbed


def test_a_loss_that_is_not_finite_fails_at_once(cluster: Cluster, gcs: GcsServer) -> None:
    two_slices(cluster)
    run = Run(cluster, gcs, overrides={**SHORT, "optimizer.learning_rate": 1e30, "optimizer.warmup_steps": 0})
    assert run.launch().code == 0
    run.wait_until_ended("Failed")
    assert run.restarts() == (0, 0)
    status = run.muster("status", run.dir.url)
    assert "failed" in status.out
    assert "s0-h0: " in status.out or "s1-h0: " in status.out
    assert "is nan" in status.out
    found = run.status()
    assert found["state"] == "failed"
    assert found["failure"]["message"]
    waited = run.launch("--wait")
    assert waited.code == ExitCode.EXPERIMENT_FAILED
    assert "is nan" in waited.err


def test_phases_are_seen_from_outside(cluster: Cluster, gcs: GcsServer) -> None:
    """Between submission and the end: pending with its reason, then running, then stopped on demand."""
    run = Run(cluster, gcs, overrides=SHORT)
    assert run.launch().code == 0
    run.wait_for(lambda: len(run.cluster.pods_of("quickstart")) == 2, "pods")
    run.wait_for(lambda: "no nodes available" in run.muster("status", run.dir.url).out, "reason")
    two_slices(cluster)
    run.wait_for(lambda: run.step() >= 5, "step 5")
    assert run.status()["hosts"][0]["phase"] in (Phase.TRAINING, Phase.SAVING)
    stopped = run.muster("stop", run.dir.url)
    assert stopped.code == 0, stopped.err
    assert "checkpoint at step" in stopped.err + stopped.out
    assert cluster.jobset("quickstart") is None
    assert cluster.pods_of("quickstart") == []
    assert run.status()["state"] == "stopped"
    saved = run.committed()
    assert run.launch().code == 0
    run.wait_for(lambda: run.attempt() == 2, "second attempt")
    assert run.start(2).from_step == saved
