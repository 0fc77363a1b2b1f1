"""The largest job there is: 199 slices of v5e-256, which are 12,736 pods and 50,944 chips.

pytest tests/cluster/test_scale.py           # plan, manifest, launch, status: seconds
pytest -m long -s tests/cluster/test_scale.py    # with all of its pods: minutes
"""

from __future__ import annotations

import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.gke.names import CONTAINER
from launcher.gke.observe import JOB_INDEX, POD_INDEX
from launcher.gke.pod_logs import MAX_HOSTS
from launcher.ledger import Heartbeat, HostRecord
from launcher.log_lines import stamp
from recipes.contract import Phase, Progress, host_name
from tests.cluster.api import Json
from tests.cluster.build import PROGRAMS
from tests.cluster.bulk import bulk_create, bulk_run
from tests.cluster.cluster import JOBSET_NAME, Cluster
from tests.cluster.conftest import require
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kueue import make_queue, workloads
from tests.cluster.runs import SHORT, Run, stand_in_tree
from tests.cluster.waiting import wait_until
from tests.local.gcs_server import GcsServer

RECIPE = "llama3-8b-v5e-16x16"
SLICES, HOSTS, CHIPS = 199, 64, 50_944
PODS = SLICES * HOSTS
LARGE = {"multislice.num_slices": SLICES, "multislice.data": -1, "train.global_batch_size": CHIPS}
BUSY_STATUS_S = 60.0
"""While the API server and the controllers create pods as fast as they can."""
LIMITS_S = {"status": 30.0, "logs": 120.0, "one": 30.0, "before": 30.0}
"""Of commands with all pods there, on two cores that have much else to do."""
PLAN_S, LAUNCH_S, STATUS_S = 1.0, 3.0, 3.0
"""Of processor time, which other tests on the machine do not stretch as they do the clock's."""


def test_launched_and_queued(kueue_cluster: Cluster, gcs: GcsServer, tmp_path: Path) -> None:
    """Kueue keeps it without pods: its quota is less than a slice."""
    cluster, tree = kueue_cluster, stand_in_tree(tmp_path)
    make_queue(cluster, "team", quota={"google.com/tpu": "8"})
    run = Run(cluster, gcs, name="large", overrides={**LARGE, "target.queue": "team"}, cwd=tree)

    began_s = _used_s()
    planned = run.muster("plan", RECIPE, *run.overrides(), "--manifest")
    plan_s = _used_s() - began_s
    assert planned.code == 0, planned.err
    refused = run.muster("launch", RECIPE, *run.overrides())
    assert (refused.code, "50,944 chips" in refused.err, run.dir.exists()) == (2, True, False), refused.err

    began_s = _used_s()
    launched = run.muster("launch", RECIPE, *run.overrides(), "--yes", "--json")
    launch_s = _used_s() - began_s
    assert launched.code == 0, launched.err
    wait_until(lambda: workloads(cluster))

    began_s = _used_s()
    seen = run.status()["cluster"]
    status_s = _used_s() - began_s
    took = f"{json.loads(launched.out)['took_s']:.2f} s from command to accepted"
    print(f"\nprocessor time: plan {plan_s:.2f} s, launch {launch_s:.2f} s, status {status_s:.2f} s; {took}")
    assert (seen["state"], seen["ready"], seen["total"]) == ("queued", 0, PODS)
    assert plan_s < PLAN_S
    assert launch_s < LAUNCH_S
    assert status_s < STATUS_S


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_pods_run(gcs: GcsServer, tmp_path: Path) -> None:
    """Minutes, on two cores, most of them for the API server and the controllers."""
    require(*PROGRAMS)
    with (
        ControlPlane(tmp_path / "plane") as plane,
        Cluster(plane, tmp_path / "kubelet", env=gcs.env) as cluster,
    ):
        # Without nodes, so that nothing but the JobSet has to be created.
        overrides = {**LARGE, "target.placement": "any"}
        run = Run(cluster, gcs, name="large", overrides=overrides, cwd=stand_in_tree(tmp_path))
        launched = run.muster("launch", RECIPE, *run.overrides(), "--yes", "--json")
        assert launched.code == 0, launched.err
        print(f"\nlaunch: {json.loads(launched.out)['took_s']:.2f} s")

        began_s, slowest_s = time.monotonic(), 0.0
        while _jobs(cluster, "active") < PODS:
            status_s, said = _timed(run, "status", run.dir.url)
            assert f"of {PODS}" in said, said
            slowest_s = max(slowest_s, status_s)
            time.sleep(5)
        print(f"{PODS} pods: {time.monotonic() - began_s:.0f} s; slowest status meanwhile {slowest_s:.1f} s")
        assert slowest_s < BUSY_STATUS_S

        # No kubelet, and nothing in the run directory yet.
        bulk_run(cluster.api, cluster.namespace, f"{JOBSET_NAME}=large")
        wait_until(lambda: _jobs(cluster, "ready") == PODS, 300)
        before_s, said = _timed(run, "logs", run.dir.url, "--tail", "1")
        assert said == ""
        _live(run)

        status_s, said = _timed(run, "status", run.dir.url)
        assert f"hosts up    {PODS} of {PODS}" in said, said
        logs_s, said = _timed(run, "logs", run.dir.url, "--tail", "1")
        assert len(said.splitlines()) == PODS
        assert "s198-h63: step 7" in said
        one_s, said = _timed(run, "logs", run.dir.url, "--slice", "7", "--host", "3", "--tail", "1")
        assert said == "step 7\n"
        print(f"{PODS} hosts run: status {status_s:.1f} s")
        print(
            f"logs --tail 1: {logs_s:.1f} s, of one host {one_s:.1f} s, before any is stored {before_s:.1f} s"
        )
        took_s = {"status": status_s, "logs": logs_s, "one": one_s, "before": before_s}
        assert all(took_s[what] < limit_s for what, limit_s in LIMITS_S.items()), took_s


def _jobs(cluster: Cluster, count: str) -> int:
    """Pods that the Jobs say are active or ready."""
    jobs = cluster.api.get(cluster.path("jobs"))["items"]
    return sum(job["status"].get(count, 0) for job in jobs)


def _timed(run: Run, *words: str) -> tuple[float, str]:
    """How long a command took, and what it printed."""
    began_s = time.monotonic()
    said = run.muster(*words)
    assert said.code == 0, said.err
    return time.monotonic() - began_s, said.out


def _live(run: Run) -> None:
    """Everything that all hosts of a first attempt have written to the run directory after 7 steps."""
    hosts, now = [host_name(*divmod(number, HOSTS)) for number in range(PODS)], time.time()
    attempt = run.dir.next_attempt(now, recipe=run.dir.recipe(), hosts=hosts)
    log = b"".join(b"%sstep %d\n" % (stamp(now + step), step) for step in range(8))

    def write(host: str) -> None:
        progress = Progress(
            phase=Phase.TRAINING, step=7, num_steps=9, committed_step=-1, time_s=now, metrics={}
        )
        run.dir.write_heartbeat(Heartbeat(host=host, attempt=attempt, progress=progress))
        run.dir.write_host(attempt, HostRecord(host=host, hostname=host, pid=1, start_s=now))
        run.dir.storage.write_log(run.dir.log_path(attempt, host), 0, log)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, hosts))


def test_only_so_many_pods_are_asked_for_logs(cluster: Cluster, gcs: GcsServer, tmp_path: Path) -> None:
    """Pods of hosts that have nothing in the run directory, past the JobSet's own: they cost less."""
    run = Run(cluster, gcs, overrides=SHORT, cwd=stand_in_tree(tmp_path))
    assert run.launch().code == 0
    indices = [divmod(number, 50) for number in range(MAX_HOSTS + 36)]
    bulk_create(cluster.api, cluster.namespace, (_pod(run, *each) for each in indices))
    bulk_run(cluster.api, cluster.namespace, "test=bulk")

    said = run.muster("logs", run.dir.url, "--tail", "1")
    assert (said.code, said.out) == (0, "")
    assert said.err.count("hosts that have nothing in the run directory yet only 64 are shown") == 1
    for chosen in (["--slice", "1"], ["--host", "s1-h49"], ["--host", "3"]):
        said = run.muster("logs", run.dir.url, *chosen)
        assert (said.code, said.out, said.err) == (0, "", "")


def _pod(run: Run, slice_id: int, host_id: int) -> Json:
    labels = {"test": "bulk", JOBSET_NAME: run.name, JOB_INDEX: str(slice_id), POD_INDEX: str(host_id)}
    spec = {"containers": [{"name": CONTAINER, "image": "none"}]}
    return {"metadata": {"name": f"pod-{slice_id}-{host_id}", "labels": labels}, "spec": spec}


def _used_s() -> float:
    """Processor time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
