"""Launches in a child that is killed after its Nth request to cluster or bucket, for every N; then again.

After each kill it looks that what came out is one JobSet, the wanted one, without Jobs of another. Prints
``kills=N``. Usage: python -m tests.cluster.submit_killer absent|ended KEY=VALUE...
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google.cloud.storage  # noqa: F401  # loaded once, before the forks
import kubernetes.config.kube_config  # noqa: F401

from launcher.bundle import make_bundle
from launcher.cli.launch_gke import launch
from launcher.cli.sending import Launch
from launcher.compose import compose
from launcher.fork import renamed
from launcher.gke import client, names
from launcher.gke.client import Cluster
from launcher.gke.objects import JOBS, JOBSETS, Object, is_deleting, label, uid
from launcher.gke.observe import JOBSET_UID
from launcher.plan import make_plan
from launcher.rundir import RunDir
from launcher.storage import open_storage
from launcher.storage_gcs import GcsStorage
from recipes.schema import Recipe
from tests.cluster.containers import now

MAX_KILLS = 60


def kill_after(at_request: int) -> None:
    """Makes this process die right after a request has been answered, as if the machine were gone."""
    numbers = itertools.count(1)

    def deadly[**P, R](function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            finally:
                if next(numbers) == at_request:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    def patch(owner: Any, method: str) -> None:
        setattr(owner, method, deadly(getattr(owner, method)))

    patch(client.Cluster, "_request")
    patch(GcsStorage, "_write")
    patch(GcsStorage, "delete")


def in_child(recipe: Recipe, *, at_request: int = 0) -> int:
    """Launches in a child; its wait status."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if at_request:
                kill_after(at_request)
            code = launch(Launch(recipe=recipe, plan=make_plan(recipe), again=""))
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def end(recipe: Recipe) -> str:
    """Has a run's JobSet failed, as its controller would say; gives its uid."""
    cluster = _cluster(recipe)
    condition = {"type": "Failed", "status": "True", "reason": "x", "message": "x"}
    # The present time: an old one would be beyond the JobSet's ttlSecondsAfterFinished.
    condition["lastTransitionTime"] = f"{now()[:19]}Z"
    body = json.dumps({"status": {"terminalState": "Failed", "conditions": [condition]}}).encode()
    path = f"{JOBSETS.path(cluster.namespace)}/{recipe.run_name}/status"
    headers = {"Content-Type": "application/merge-patch+json"}
    call = cluster._call("patch", JOBSETS, recipe.run_name)
    cluster._request(call, "PATCH", path, headers=headers, body=body)
    found = cluster.get(JOBSETS, recipe.run_name)
    assert found is not None
    return uid(found)


def check(recipe: Recipe, old: str) -> str:
    """One JobSet, the wanted one, and nothing of an old one."""
    cluster, run = _cluster(recipe), recipe.run_name
    found = [each for each in cluster.list(JOBSETS).items if label(each, names.RUN) == run]
    assert len(found) == 1, found
    assert uid(found[0]) != old and not is_deleting(found[0])
    owners = {label(job, JOBSET_UID) for job in _jobs(cluster, run)}
    assert owners <= {uid(found[0])}, owners
    directory = RunDir(open_storage(recipe.run_dir))
    assert directory.recipe().run_name == run
    assert directory.lock()["manifest_sha256"]
    bundles = open_storage(f"{recipe.run.root}/.bundles").children()
    assert bundles == [f"{make_bundle(Path.cwd()).sha256}.tar.gz"]
    return uid(found[0])


def _jobs(cluster: Cluster, run: str) -> list[Object]:
    prefix = f"{run}-{names.SLICE_JOB}-"
    return [job for job in cluster.list(JOBS).items if job["metadata"]["name"].startswith(prefix)]


def main() -> None:
    scenario, overrides = sys.argv[1], sys.argv[2:]
    base = compose("quickstart", overrides).recipe
    kills = 0
    while kills < MAX_KILLS:
        recipe, old = renamed(base, f"{scenario}-{kills + 1}"), ""
        if scenario == "ended":
            assert in_child(recipe) == 0
            old = _in_process(functools.partial(end, recipe))
        status = in_child(recipe, at_request=kills + 1)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert in_child(recipe) == 0
        _in_process(functools.partial(check, recipe, old))
        kills += 1
    print(f"kills={kills}")


def _cluster(recipe: Recipe) -> Cluster:
    return client.connect(recipe.target.cluster, recipe.target.namespace)


def _in_process(function: Callable[[], str]) -> str:
    """In a child of its own: this process must have no connection when it forks."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, function().encode())
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return text


if __name__ == "__main__":
    main()
