"""What a Spot preemption on a cluster costs: quickstart as a JobSet, one of its nodes taken away with notice.

The control plane, the JobSet controller and the trainer are the real ones; pods are processes of this
machine, so pulling images and waiting for a machine are not in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, summary
from launcher.rundir import RunDir
from recipes.contract import RunPath
from tests.cluster.build import PROGRAMS, lacking
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.runs import SHORT, Run
from tests.local.gcs_server import running_gcs_server

LONG = {**SHORT, "train.num_steps": 1_000_000, "train.eval_num_batches": 0}
FIRST_STEP = 10
"""The notice comes once this step was made."""


def preemptions(*, num_rounds: int, work: Path) -> Sequence[Figure]:
    """``num_rounds`` preemptions of one run; nothing, and why, where there is no control plane."""
    if problem := lacking(*PROGRAMS):
        print(f"skipped: {problem}", file=sys.stderr)
        return []
    rounds: list[Sequence[float]] = []
    with (
        running_gcs_server(work / "preemption-bucket") as gcs,
        ControlPlane(work / "preemption-plane") as plane,
        Cluster(plane, work / "kubelet", env=gcs.env) as cluster,
    ):
        for index in range(2):
            cluster.kubelet.add_cpu_nodes(f"pool-{index}")
        run = Run(cluster, gcs, overrides=LONG)
        said = run.launch()
        if said.code:
            raise RuntimeError(said.err)
        for number in range(num_rounds):
            rounds.append(_round(run, attempt=number + 1))
    saved, reopened, stepped = zip(*rounds, strict=True)
    notice = "Spot notice to one of two slices"
    return [
        summary(f"{notice}: until both have saved and left", "s", saved),
        summary("of it until the next attempt begins", "s", reopened, note="JobSet restarted, pods met"),
        summary("of it until the next attempt's first step", "s", stepped, note="start, restore, compile"),
    ]


def _round(run: Run, *, attempt: int) -> Sequence[float]:
    """Seconds from the notice to the end of the attempt, the begin of the next one, and its first step."""
    run.wait_for(lambda: _first_step_s(run.dir, attempt, FIRST_STEP), f"step {FIRST_STEP}")
    node = run.pod(1)["spec"]["nodeName"]
    noticed_s = time.time()
    run.cluster.kubelet.preempt(node)
    run.wait_for(lambda: _first_step_s(run.dir, attempt + 1, 1), "first step after it")
    ended_s, began_s = run.end(attempt).end_s, run.start(attempt + 1).started_s
    stepped_s = _first_step_s(run.dir, attempt + 1, 1)
    return [ended_s - noticed_s, began_s - noticed_s, stepped_s - noticed_s]


def _first_step_s(run: RunDir, attempt: int, count: int) -> float:
    """Unix time at which an attempt had made ``count`` steps; 0 before that is known."""
    name = f"{attempt:04d}.jsonl"
    if name not in run.storage.children(RunPath.METRICS):
        return 0.0
    lines = run.storage.read(f"{RunPath.METRICS}/{name}").decode().splitlines()
    steps = [record for line in lines if "train/loss" in (record := json.loads(line))]
    return float(steps[count - 1]["time_s"]) if len(steps) >= count else 0.0
