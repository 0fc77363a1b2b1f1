"""A user's own code on a cluster, and what disturbs it: the trainer is the stand-in, all else is real."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.contract import ExitCode, host_name
from tests.cluster.cluster import Cluster
from tests.cluster.runs import Run, stand_in_tree
from tests.local.gcs_server import GcsServer

pytestmark = pytest.mark.timeout(300)

QUICK = {
    "train.num_steps": 60,
    "checkpoint.save_interval_steps": 10,
    "target.grace_period_s": 10,
    "run.peer_timeout_s": 5,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return stand_in_tree(tmp_path)


def launched(
    cluster: Cluster, gcs: GcsServer, tree: Path, *faults: dict[str, Any], step_s: float = 0.02, **more: Any
) -> Run:
    """A run whose trainers do as they are told, on two nodes."""
    for index in range(2):
        cluster.kubelet.add_cpu_nodes(f"pool-{index}")
    script = json.dumps({"faults": faults, "step_s": step_s})
    run = Run(cluster, gcs, overrides={**QUICK, "target.env.STAND_IN": json.dumps(script), **more}, cwd=tree)
    said = run.launch()
    assert said.code == 0, said.err
    return run


def test_the_launched_code_runs_and_a_crash_loop_is_stopped(
    cluster: Cluster, gcs: GcsServer, tree: Path
) -> None:
    fault = {"step": 3, "do": "exit 75"}
    limits = {"run.max_restarts": 50, "run.max_attempts_without_progress": 3}
    run = launched(cluster, gcs, tree, fault, **limits)
    run.wait_until_ended("Failed")
    assert run.dir.attempts() == [1, 2, 3]
    assert {run.end(attempt).exit_code for attempt in (1, 2, 3)} == {ExitCode.INFRASTRUCTURE}
    status = run.muster("status", run.dir.url)
    assert "3 attempts in a row committed no new step" in status.out
    assert run.restarts() == (3, 3)


def test_a_user_error_on_one_host_ends_the_run_with_its_message(
    cluster: Cluster, gcs: GcsServer, tree: Path
) -> None:
    run = launched(cluster, gcs, tree, {"step": 0, "host": "s1-h0", "do": "exit 2"})
    run.wait_until_ended("Failed")
    assert run.restarts() == (0, 0)
    found = run.status()
    assert found["state"] == "failed"
    assert (found["failure"]["host"], found["failure"]["message"]) == ("s1-h0", "the loss is NaN")
    assert run.launch("--wait").code == ExitCode.BAD_INPUT


def test_an_api_server_that_goes_away_disturbs_nobody(cluster: Cluster, gcs: GcsServer, tree: Path) -> None:
    run = launched(cluster, gcs, tree, step_s=0.2)
    run.wait_for(lambda: run.step() >= 5, "step 5")
    cluster.plane.kill_apiserver()
    try:
        away = run.muster("status", run.dir.url)
        assert away.code == 0
        assert "running" in away.out
        time.sleep(3)
    finally:
        cluster.plane.start_apiserver()
    run.wait_until_ended("Completed")
    assert run.dir.attempts() == [1]
    assert run.restarts() == (0, 0)


def test_a_node_that_dies_without_notice_is_not_counted(cluster: Cluster, gcs: GcsServer, tree: Path) -> None:
    run = launched(cluster, gcs, tree, step_s=0.1)
    run.wait_for(lambda: run.committed() >= 10, "a checkpoint")
    node = run.pod(1)["spec"]["nodeName"]
    # Nodes without chips may hold both pods.
    killed = [host_name(index, 0) for index in range(2) if run.pod(index)["spec"]["nodeName"] == node]
    cluster.kubelet.kill_node(node)
    run.wait_until_ended("Completed")
    assert run.restarts() == (1, 0)
    assert run.end(1).first_failing_host == killed[0]
    assert run.start(2).from_step >= 10


USERS_TRAINER = """
import json, os, sys
print("ENVIRONMENT " + json.dumps(dict(os.environ)), flush=True)
"""
HOSTILE = {
    "PLAIN": "3e-4",
    "QUOTES": """it's "quoted" `twice` \\ back""",
    "LINES": "one\ntwo\r\n\tthree\n",
    "DOLLARS": "$HOME $(HOME) $$ $$(HOME) a$b $",
    "YAML": "{a: [1, &x *x]} !!python/object:os.system # no",
    "WORD": "null",
    "BOOL": "on",
    "NUMBER": "0x1f",
    "SHELL": "; rm -rf / && true | cat > x",
    "PATHS": "../../etc/passwd",
    "TEMPLATE": "{{ .Values.x }} %s {0}",
    "LOOKALIKE": "\u0430dmin \u202etxt \u00e9",
    "SPACES": "  both ends  ",
    "EMPTY": "",
}
CANARY = "canary-5a1fd1c0b7"


def test_values_are_carried_exactly_and_nothing_else_is(
    cluster: Cluster, gcs: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment values of every kind arrive as they are; a secret of the launcher's own goes nowhere."""
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    tree = tmp_path / "tree"
    (tree / "trainer").mkdir(parents=True)
    (tree / "trainer" / "__init__.py").touch()
    (tree / "trainer" / "__main__.py").write_text(USERS_TRAINER)
    (tree / ".env").write_text(f"TOKEN={CANARY}\n")
    (tree / "recipes").mkdir()
    target = json.dumps({"target": {"env": HOSTILE}})
    (tree / "recipes" / "hostile.yaml").write_text(f"defaults: [quickstart, _self_]\n{target[1:-1]}\n")
    cluster.create(
        "secrets", {"metadata": {"name": "wandb"}, "stringData": {"key": "from the cluster's secret"}}
    )
    for index in range(2):
        cluster.kubelet.add_cpu_nodes(f"pool-{index}")
    run = Run(cluster, gcs, overrides={**QUICK, "target.secrets.WANDB_API_KEY": "wandb/key"}, cwd=tree)
    planned = run.muster("plan", "hostile", *run.overrides(), "--manifest")
    dry = run.muster("launch", "hostile", *run.overrides(), "--dry-run")
    said = run.muster("launch", "hostile", *run.overrides(), "--wait")
    assert said.code == 0, said.err
    (line,) = [
        line
        for line in run.muster("logs", run.dir.url, "--slice", "0").out.splitlines()
        if line.startswith("ENVIRONMENT ")
    ]
    arrived = json.loads(line.removeprefix("ENVIRONMENT "))
    assert {name: arrived[name] for name in HOSTILE} == HOSTILE
    assert arrived["WANDB_API_KEY"] == "from the cluster's secret"

    shown = [
        planned.out,
        planned.err,
        dry.out,
        dry.err,
        said.out,
        said.err,
        json.dumps(run.cluster.jobset("quickstart")),
    ]
    shown += [json.dumps(pod) for pod in cluster.pods_of("quickstart")]
    bucket = [run.dir.storage.read(path) for path in run.objects()]
    bundles = run.bundled_files()
    assert not any(CANARY in text for text in shown)
    assert not any(CANARY.encode() in body for body in [*bucket, *bundles.values()])
    assert "trainer/__main__.py" in bundles
    assert ".env" not in bundles
