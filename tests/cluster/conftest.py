"""Control planes, started once a session, and a namespace with nodes for each test.

    def test_something(cluster: Cluster) -> None:         # without Kueue; kueue_cluster: with it
        [node] = cluster.kubelet.add_cpu_nodes("pool")
        cluster.create("pods", ...)

Skipped with the reason where there is no control plane; MUSTER_REQUIRE_CLUSTER=1 makes that a failure.
`make control-plane` builds it: nothing here ever does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.build import PROGRAMS, REQUIRE, lacking
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.launcher import Capture, Launcher, make_launcher
from tests.cluster.runs import SHORT, bits
from tests.local.gcs_server import GcsServer, close_clients, running_gcs_server
from tests.local.launching import REPO, Launch


def require(*programs: str) -> None:
    """Skips the test, or fails it where it is demanded, when a control plane cannot be had."""
    problem = lacking(*programs)
    if problem and os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {problem}")
    if problem:
        pytest.skip(problem)


@pytest.fixture(autouse=True)
def _no_traces() -> Iterator[None]:
    """Closes what the storage client of the test has open, and unsets what it was pointed with."""
    before = dict(os.environ)
    yield
    close_clients()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster without Kueue and without nodes."""
    require(*PROGRAMS)
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


@pytest.fixture(scope="session")
def kueue_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster with Kueue and without nodes."""
    require(*PROGRAMS, "kueue")
    with ControlPlane(tmp_path_factory.mktemp("kueue-plane"), kueue=True) as plane:
        yield plane


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A bucket server for whole runs."""
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def cluster(plane: ControlPlane, gcs: GcsServer, tmp_path: Path) -> Iterator[Cluster]:
    """A namespace and a kubelet without nodes; its pods know the bucket server."""
    with Cluster(plane, tmp_path / "kubelet", env=gcs.env) as cluster:
        yield cluster


@pytest.fixture
def kueue_cluster(kueue_plane: ControlPlane, gcs: GcsServer, tmp_path: Path) -> Iterator[Cluster]:
    """The same, under Kueue."""
    with Cluster(kueue_plane, tmp_path / "kubelet", env=gcs.env) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every array is at the end of a run of SHORT on this machine, where nobody disturbed it."""
    root = tmp_path_factory.mktemp("undisturbed")
    overrides = [f"{key}={value}" for key, value in SHORT.items()]
    # Other tests of this process may have set flags of the compiler, with which sums round differently.
    env = {"PYTHONPATH": str(REPO), "XLA_FLAGS": ""}
    with Launch(root, overrides=[*overrides, f"run.root={root}"], env=env) as launch:
        code, _, err = launch.finish(300)
    assert code == 0, err
    return bits(root / "quickstart")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A user's working tree."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "mine.py").write_text("VALUE = 1\n")
    return folder


@pytest.fixture
def launcher(
    cluster: Cluster, gcs: GcsServer, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Launcher:
    """In a namespace without nodes: pods stay pending, which is all that submission needs."""
    return make_launcher(cluster, gcs, tree, monkeypatch, capsys)
