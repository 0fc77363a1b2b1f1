"""Runs on a cluster that a supervisor looks after: fewer slices, more slices, and a deadline.

The trainer is the stand-in, all else is real; only the supervisor's periods are shorter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.gke.place import GkePlace
from launcher.rundir import RunDir, read_recipe
from launcher.supervise.actions import Finish
from launcher.supervise.fleet import RunFacts
from launcher.supervise.loop import Supervisor
from launcher.supervise.one import supervised
from launcher.supervise.place import Place
from launcher.supervise.records import Trouble
from recipes.contract import ExitCode
from recipes.schema import Recipe
from tests.cluster.cluster import Cluster
from tests.cluster.runs import SHORT, Run, stand_in_tree
from tests.local.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(240)

PATIENCE_S = 200.0
ROOM_SPEEDUP = 30.0
"""Nodes are counted each second."""
KEYS = {
    "train.num_steps": 240,
    "train.global_batch_size": 8,
    "checkpoint.save_interval_steps": 10,
    "target.grace_period_s": 10,
    "run.peer_timeout_s": 5,
}
ELASTIC = {
    "multislice.min_slices": 1,
    "multislice.grow_after_s": 3,
    "target.fallback_after_s": 3,
}


def add_node(cluster: Cluster, pool: str) -> str:
    """A slice of one host: it takes one pod."""
    [node] = cluster.kubelet.add_cpu_nodes(pool, pods=1)
    return node


def launched(cluster: Cluster, gcs: GcsServer, tmp_path: Path, more: Mapping[str, Any]) -> Run:
    script = json.dumps({"faults": [], "step_s": 0.1})
    keys = {**KEYS, "target.env.STAND_IN": json.dumps(script), **more}
    run = Run(cluster, gcs, overrides=keys, cwd=stand_in_tree(tmp_path))
    said = run.launch()
    assert said.code == 0, said.err
    return run


class Watched:
    """A run with a supervisor that this test turns by hand."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in run.env().items():
            monkeypatch.setenv(name, value)
        self.run, self.said = run, list[str]()
        self.supervisor = self._supervisor()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Supervises until then."""
        finish = self._turn(condition, what)
        assert finish is None, (finish, self.said, self.run.evidence())

    def to_the_end(self) -> Finish:
        finish = self._turn(lambda: False, "end")
        assert finish is not None
        return finish

    def num_slices(self) -> int:
        """Of the JobSet that is there; 0 when there is none."""
        found = self.run.cluster.jobset(self.run.name)
        return int(found["spec"]["replicatedJobs"][0]["replicas"]) if found else 0

    def _turn(self, condition: Callable[[], object], what: str) -> Finish | None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            result = self.supervisor.step()
            if isinstance(result, Finish):
                return result
            assert time.monotonic() < deadline_s, (what, self.said, self.run.evidence())
            time.sleep(0.3)
        return None

    def _supervisor(self) -> Supervisor:
        def place(run: RunDir, facts: RunFacts, recipe: Recipe) -> Place:
            assert facts.order is not None
            return GkePlace(
                run=run, recipe=recipe, order=facts.order, monotonic=lambda: ROOM_SPEEDUP * time.monotonic()
            )

        one = supervised(self.run.dir, place)
        return one.supervisor(say=self.said.append, may_act=lambda: None)


def test_a_run_goes_on_with_fewer_slices_and_grows_back(
    cluster: Cluster, gcs: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [add_node(cluster, f"pool-{index}") for index in range(2)]
    run = launched(cluster, gcs, tmp_path, ELASTIC)
    fewer_and_more(Watched(run, monkeypatch), cluster, nodes[1])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_real_training_goes_on_with_fewer_slices_and_grows_back(
    cluster: Cluster, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [add_node(cluster, f"pool-{index}") for index in range(2)]
    run = Run(cluster, gcs, overrides={**SHORT, **ELASTIC, "train.num_steps": 800})
    assert run.launch().code == 0
    fewer_and_more(Watched(run, monkeypatch), cluster, nodes[1])
    status = run.status()
    assert status["state"] == "complete"


def fewer_and_more(watched: Watched, cluster: Cluster, node: str) -> None:
    """A node goes away for good, later another one comes, and no step beyond the checkpoint is lost."""
    run = watched.run
    watched.until(lambda: run.committed() >= 10, "a checkpoint")
    assert watched.num_slices() == 2

    cluster.kubelet.kill_node(node, replace=False)
    watched.until(lambda: watched.num_slices() == 1, "one slice")
    said = run.launch()
    assert (said.code, "there already, the same" in said.err) == (0, True), said.err
    lost_at = run.committed()
    watched.until(lambda: run.committed() > lost_at, "a checkpoint of one slice")
    fewer = run.attempt()
    full, less = (read_recipe(run.dir.storage, run.dir.attempt_recipe_path(each)) for each in (1, fewer))
    assert (full.multislice.num_slices, less.multislice.num_slices) == (2, 1)
    assert less.train.global_batch_size == full.train.global_batch_size
    assert less.train.grad_accum_steps == 2 * full.train.grad_accum_steps

    add_node(cluster, "pool-2")
    watched.until(lambda: watched.num_slices() == 2, "two slices")
    finish = watched.to_the_end()
    assert finish.exit_code == ExitCode.COMPLETE
    attempts = run.dir.attempts()
    assert len(run.start(attempts[-1]).hosts) == 2
    assert run.start(fewer).from_step == lost_at >= 10
    assert run.end(fewer).exit_code == ExitCode.PREEMPTED
    # What was saved on being asked is where it goes on.
    assert run.start(attempts[-1]).from_step == run.end(attempts[-2]).to_step > lost_at
    troubles = [each.trouble for each in run.dir.provisions()]
    assert troubles == [Trouble.NO_CAPACITY, Trouble.REPLACED, Trouble.REPLACED]


def test_the_deadline_saves_and_removes_the_jobset(
    cluster: Cluster, gcs: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(2):
        add_node(cluster, f"pool-{index}")
    until_s = time.time() + 12
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(until_s))
    run = launched(cluster, gcs, tmp_path, {"run.deadline": f"'{text}'", "train.num_steps": 4000})
    watched = Watched(run, monkeypatch)
    finish = watched.to_the_end()
    assert (finish.exit_code, finish.reason) == (
        ExitCode.PREEMPTED,
        f"stopped: run.deadline={text} is reached",
    )
    assert (watched.num_slices(), cluster.pods_of(run.name)) == (0, [])
    assert run.committed() == run.end(run.attempt()).to_step > 0
    said = run.launch()
    assert (said.code, "has passed" in said.err) == (2, True), said.err
