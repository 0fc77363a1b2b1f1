"""Runs under the real Kueue: who waits is told why, and who is evicted comes back as the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.kueue import make_priority, make_queue
from tests.cluster.runs import NUM_STEPS, SHORT, Run, bits, stand_in_tree
from tests.local.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(600)


def test_an_evicted_run_comes_back_as_the_same_run(
    kueue_cluster: Cluster, gcs: GcsServer, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """A second run waits behind the first and is told why; a third takes the place of the first."""
    cluster = kueue_cluster
    for index in range(2):
        cluster.kubelet.add_cpu_nodes(f"pool-{index}")
    make_queue(cluster, "team", quota={"pods": "2"}, preempt_lower=True)
    high = make_priority(cluster, 1000)
    queued = {"target.queue": "team"}
    first = Run(cluster, gcs, name="first", overrides={**SHORT, **queued})
    assert first.launch().code == 0
    first.wait_for(lambda: first.step() >= 10, "step 10")

    tree = stand_in_tree(tmp_path)
    script = json.dumps({"step_s": 0.1})
    short = {"train.num_steps": 30, "target.env.STAND_IN": script, **queued}
    second = Run(cluster, gcs, name="second", overrides=short, cwd=tree)
    assert second.launch().code == 0
    second.wait_for(
        lambda: "insufficient unused quota for pods" in second.muster("status", second.dir.url).out, "reason"
    )
    assert second.status()["cluster"]["state"] == "queued"
    assert second.attempt() == 0

    urgent = Run(cluster, gcs, name="urgent", overrides={**short, "target.priority_class": high}, cwd=tree)
    assert urgent.launch().code == 0
    urgent.wait_until_ended("Completed")
    first.wait_until_ended("Completed")
    second.wait_until_ended("Completed")

    assert first.restarts()[1] == 0, "an eviction was counted"
    ends = [first.end(attempt) for attempt in first.dir.attempts()]
    assert [end.exit_code for end in ends] == [42, 0]
    assert first.start(2).from_step == ends[0].to_step >= 10
    assert ends[0].to_step < NUM_STEPS
    assert bits(first.download(tmp_path / "copy")) == undisturbed
