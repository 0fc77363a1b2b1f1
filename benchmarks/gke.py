"""From the command line to a JobSet that the API server has: ``muster launch target=gke``, whole processes.

Against the control plane and the bucket server of the tests, both on this machine. Beside it two commands
that ask no cluster: xpk's dry run (a pinned release in an environment of its own), and ``muster plan
--manifest``, which is what that one can fairly be compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import Figure, best, ratio_of_bests
from benchmarks.machine import MUSTER, REPO, environment
from recipes.contract import cache_dir
from tests.cluster.api import Api
from tests.cluster.build import PROGRAMS, lacking
from tests.cluster.cluster import IMAGE, JOBSET_NAME, JOBSETS
from tests.cluster.control_plane import ADMIN, ControlPlane
from tests.cluster.waiting import wait_until
from tests.local.gcs_server import GcsServer, running_gcs_server

NUM_RUNS = 5
AIM_S = 1.0
XPK = "1.16.0"
NUM_SLICES = 199
SLICES = f"{NUM_SLICES} x v5e-256"
LARGE = (
    "llama3-8b-v5e-16x16",
    f"multislice.num_slices={NUM_SLICES}",
    "multislice.data=-1",
    f"train.global_batch_size={NUM_SLICES * 256}",
)
LAUNCHES: Mapping[str, Sequence[str]] = {"quickstart": ("quickstart",), SLICES: LARGE}
"""What is launched, by the name of its figures."""
DRY_RUN = (
    *("workload", "create", "--dry-run", "--cluster", "c", "--project", "p", "--zone", "us-central1-a"),
    *("--workload", "w", "--tpu-type", "v5litepod-256", "--num-slices", str(NUM_SLICES)),
    *("--command", "echo", "--docker-image", "python:3.12"),
)
WATCHED = f"{JOBSETS}/namespaces/default/jobsets"
PATIENCE_S = 300.0


def _by_launch() -> dict[str, list[float]]:
    return {name: [] for name in LAUNCHES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of each round."""

    there: Mapping[str, list[float]] = field(default_factory=_by_launch)
    """From the start of each launch until the API server announced the JobSet."""
    returned: Mapping[str, list[float]] = field(default_factory=_by_launch)
    """Until its command had ended."""
    manifest: list[float] = field(default_factory=list)
    dry_run: list[float] = field(default_factory=list)
    """Of the peer; empty where it was not to be had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bench:
    """What commands are measured against."""

    plane: ControlPlane
    gcs: GcsServer
    env: Mapping[str, str]


def submissions(work: Path) -> Sequence[Figure]:
    """Everything by turns; nothing, and why, where there is no control plane."""
    if problem := lacking(*PROGRAMS):
        print(f"skipped: {problem}", file=sys.stderr)
        return []
    xpk = _find_xpk()
    times = Times()
    with running_gcs_server(work / "gke-bucket") as gcs, ControlPlane(work / "plane") as plane:
        # Else the Jobs of 199 slices would become 12,736 pods, which is not what is measured.
        plane.kill("controller-manager")
        bench = _Bench(plane=plane, gcs=gcs, env={**environment(work / "cache"), **gcs.env, **plane.env})
        # The first round is for file caches and compiled modules.
        for number in range(NUM_RUNS + 1):
            _round(bench, xpk, times if number else Times(), number)
    return figures(times)


def figures(times: Times) -> list[Figure]:
    """Best of the rounds, and the ratios to the peer."""
    found = []
    for name in LAUNCHES:
        launch = f"`muster launch`, {name}"
        found.append(best(f"{launch}: until the JobSet is there", "s", times.there[name], aim=AIM_S))
        found.append(best(f"{launch}: until the command ends", "s", times.returned[name]))
    found.append(best(f"`muster plan --manifest`, {SLICES}", "s", times.manifest))
    if times.dry_run:
        found.append(best(f"xpk {XPK} `workload create --dry-run`, {SLICES}", "s", times.dry_run))
        compared = {f"JobSet of {name} there": times.there[name] for name in LAUNCHES}
        compared["`muster plan --manifest`"] = times.manifest
        found += [
            ratio_of_bests(f"{what}, over xpk's dry run", values, times.dry_run)
            for what, values in compared.items()
        ]
    return found


def _find_xpk() -> Path | None:
    """The peer's program, installed at the first time; None, and why, where it cannot be had."""
    folder = cache_dir(os.environ) / "benchmarks" / f"xpk-{XPK}"
    program = folder / "bin" / "xpk"
    # pip installs it after all that it needs, so it stands for the whole.
    if not program.exists():
        print(f"installing xpk {XPK} into {folder}", file=sys.stderr)
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"xpk=={XPK}"]
        try:
            for argv in (make, install):
                subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"without the peer: {error}", file=sys.stderr)
            return None
    return program


def _round(bench: _Bench, xpk: Path | None, times: Times, number: int) -> None:
    # A bucket of its own, so that each round sends the code.
    root = bench.gcs.make_bucket(f"round-{number}")
    for place, (name, recipe) in enumerate(LAUNCHES.items()):
        there_s, returned_s = _launch(bench, f"r{number}-{place}", f"{root}/{place}", recipe)
        times.there[name].append(there_s)
        times.returned[name].append(returned_s)
    plan = [*MUSTER, "plan", *LARGE, *target("plan", root), "--manifest"]
    times.manifest.append(_seconds(plan, bench.env))
    if xpk is not None:
        home = bench.plane.folder / "xpk-home"
        home.mkdir(exist_ok=True)
        times.dry_run.append(_seconds([str(xpk), *DRY_RUN], {**bench.env, "HOME": str(home)}))


def target(run: str, root: str) -> Sequence[str]:
    """Overrides that send a recipe to this cluster."""
    return (
        *("target=gke", f"target.cluster={ADMIN}", f"target.image={IMAGE}"),
        *(f"run.name={run}", f"run.root={root}"),
    )


def _launch(bench: _Bench, run: str, root: str, recipe: Sequence[str]) -> tuple[float, float]:
    """Seconds until the API server announces the JobSet, and until the command has ended."""
    api = bench.plane.user()
    with ThreadPoolExecutor(1) as pool:
        announced = pool.submit(_announced_s, api, run)
        try:
            start_s = time.perf_counter()
            took_s = _seconds([*MUSTER, "launch", *recipe, *target(run, root), "--yes"], bench.env)
            there_s = announced.result(PATIENCE_S) - start_s
        finally:
            api.close()
    _settle(bench, run)
    return there_s, took_s


def _announced_s(api: Api, run: str) -> float:
    """When a watcher hears of the JobSet."""
    for event in api.watch(WATCHED):
        if event["type"] == "ADDED" and event["object"]["metadata"]["name"] == run:
            return time.perf_counter()
    raise RuntimeError(f"the watch ended before there was a JobSet {run}")


def _settle(bench: _Bench, run: str) -> None:
    """Until the JobSet controller has done its part, so that the next command does not wait for it."""
    jobset = bench.plane.api.get(f"{WATCHED}/{run}")
    num_jobs = sum(job["replicas"] for job in jobset["spec"]["replicatedJobs"])
    path, labels = "/apis/batch/v1/namespaces/default/jobs", f"{JOBSET_NAME}={run}"
    wait_until(
        lambda: len(bench.plane.api.get(path, labelSelector=labels)["items"]) == num_jobs,
        PATIENCE_S,
        f"{num_jobs} Jobs of {run}",
    )


def _seconds(argv: Sequence[str], env: Mapping[str, str]) -> float:
    """Of the whole process, in this repository as the working tree.

    Raises:
      RuntimeError: it failed; with its stderr.
    """
    start_s = time.perf_counter()
    done = subprocess.run(
        argv, cwd=REPO, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S
    )
    took_s = time.perf_counter() - start_s
    if done.returncode:
        raise RuntimeError(f"{argv[-1]} ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    return took_s
