"""``muster replay``: a run again from its lock, on a real cluster, after its working tree is gone.

pytest tests/cluster/test_replay.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.fork import renamed
from launcher.rundir import RunDir, encode_recipe
from launcher.storage import open_storage
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ADMIN
from tests.local.gcs_server import GcsServer

IMAGE = f"repo/trainer@sha256:{'0' * 64}"


def test_a_run_again_without_its_working_tree(
    cluster: Cluster,
    gcs: GcsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**gcs.env, **cluster.plane.env}.items():
        monkeypatch.setenv(name, value)
    root = gcs.make_bucket(cluster.namespace) + "/runs"
    keys = {
        "target.kind": "gke",
        "target.cluster": ADMIN,
        "target.namespace": cluster.namespace,
        "target.image": IMAGE,
        "run.root": root,
        "run.name": "first",
        "train.num_steps": "77",
    }
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "code.py").write_text("print('as it was')\n")
    monkeypatch.chdir(tree)
    assert cli.main(["launch", "quickstart", *(f"{key}={value}" for key, value in keys.items())]) == 0

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "code.py").write_text("print('another one')\n")
    monkeypatch.chdir(elsewhere)
    shutil.rmtree(tree)
    # Of a run and of its replay, by address and by name.
    assert cli.main(["replay", f"{root}/first", "--name", "second"]) == 0, capsys.readouterr().err
    assert cli.main(["replay", "second", "--root", root, "--name", "third"]) == 0, capsys.readouterr().err

    first, second, third = (_facts(cluster, root, name) for name in ("first", "second", "third"))
    assert first["code"]["num_files"] == 1
    assert first == second == third
    assert len(open_storage(root).children(".bundles")) == 1

    capsys.readouterr()
    assert cli.main(["replay", f"{root}/first", "--name", "second"]) == 0
    assert "second: there already, the same" in capsys.readouterr().err
    assert cli.main(["replay", f"{root}/second", "--name", "second"]) == 2
    assert "second exists already, and it is no replay of" in capsys.readouterr().err
    # As one leaves it that is killed before it submits.
    killed = renamed(RunDir(open_storage(f"{root}/first")).recipe(), "killed")
    open_storage(killed.run_dir).create("recipe.yaml", encode_recipe(killed))
    assert cli.main(["replay", f"{root}/first", "--name", "killed"]) == 0, capsys.readouterr().err
    assert _facts(cluster, root, "killed") == first
    capsys.readouterr()
    assert cli.main(["replay", f"{root}/first", "--name", "fourth", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["run_name"] == "fourth"
    assert cluster.jobset("fourth") is None


def _facts(cluster: Cluster, root: str, run: str) -> Mapping[str, Any]:
    """What has to be the same: code and image, as they are recorded and as the pods are given them."""
    jobset = cluster.jobset(run)
    assert jobset is not None, run
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    storage = open_storage(f"{root}/{run}")
    lock = json.loads(storage.read("lock.json"))
    assert env["MUSTER_RUN_DIR"] == f"{root}/{run}"
    assert env["MUSTER_BUNDLE"] == lock["code"]["bundle"]
    assert "num_steps: 77" in storage.read("recipe.yaml").decode()
    return {"image": container["image"], "bundle": env["MUSTER_BUNDLE"], "code": lock["code"]}
