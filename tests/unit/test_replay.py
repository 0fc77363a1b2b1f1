"""What a run is launched again from, and why it sometimes cannot be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.bundle import bundle_path, make_bundle, upload
from launcher.provenance import lock_info
from launcher.replay import replayable
from launcher.rundir import RunDir, create_or_open
from launcher.storage import open_storage
from recipes.errors import UserError
from recipes.fingerprint import fingerprint
from recipes.schema import Recipe
from tests.unit.bundle_support import write
from tests.unit.rundir_support import make_recipe

IMAGE = "gcr.io/project/muster@sha256:" + "1" * 64


def recipe_at(root: Path) -> Recipe:
    recipe = make_recipe()
    return dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, root=str(root), name="tiny"))


def run_with(root: Path, lock: dict[str, Any]) -> RunDir:
    recipe = recipe_at(root)
    return create_or_open(open_storage(recipe.run_dir), recipe, lock).run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Its code is in the bucket."""
    write(tmp_path / "code", {"a.py": ""})
    bundle = make_bundle(tmp_path / "code")
    upload(open_storage(str(tmp_path / "root")), bundle)
    lock = lock_info(plan_sha256="0" * 64, folder=tmp_path, bundle=bundle, image=IMAGE)
    return run_with(tmp_path / "root", lock)


def digest_of(run: RunDir) -> str:
    return str(run.lock()["code"]["bundle"])


def test_the_same_experiment_code_and_image_under_another_name(run: RunDir) -> None:
    replay = replayable(run, "again")
    assert (replay.recipe.run_name, replay.bundle, replay.image) == ("again", digest_of(run), IMAGE)
    assert fingerprint(replay.recipe) == fingerprint(run.recipe())
    assert replay.lock == run.lock()


def test_an_image_that_has_the_code_is_enough(tmp_path: Path) -> None:
    run = run_with(tmp_path, lock_info(plan_sha256="0" * 64, folder=tmp_path, image=IMAGE))
    replay = replayable(run, "again")
    assert (replay.bundle, replay.image) == (None, IMAGE)


@pytest.mark.parametrize("lock", [{}, {"code": None}, {"plan_sha256": "0" * 64, "git": {"commit": "1"}}])
def test_a_local_run_has_no_code_to_send(tmp_path: Path, lock: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="neither code nor image") as caught:
        replayable(run_with(tmp_path, lock), "again")
    assert "check out the commit" in caught.value.hint


def test_code_that_is_gone(run: RunDir, tmp_path: Path) -> None:
    path = bundle_path(digest_of(run))
    open_storage(str(tmp_path / "root")).delete(path)
    with pytest.raises(UserError, match="is gone") as caught:
        replayable(run, "again")
    assert f"{tmp_path / 'root'}/{path}" in caught.value.message


@pytest.mark.parametrize("name", ["", "Upper", "../x", "a" * 41, "a\n"])
def test_no_name_for_a_run(run: RunDir, name: str) -> None:
    with pytest.raises(UserError, match="is not a run name"):
        replayable(run, name)


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_a_name_that_is_taken(run: RunDir, tmp_path: Path, name: str) -> None:
    open_storage(str(tmp_path / "root" / "other")).create("recipe.yaml", b"")
    with pytest.raises(UserError, match=f"{name} exists already, and a replay is a new run"):
        replayable(run, name)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run at"):
        replayable(RunDir(open_storage(str(tmp_path / "nothing"))), "again")


@pytest.mark.parametrize(
    "lock",
    [
        {"code": {"bundle": "sha256:../../x"}},
        {"code": {"bundle": 5}},
        {"code": {}},
        {"code": "sha256:" + "0" * 64},
        {"code": None, "image": ["x"]},
        {"code": {"bundle": "0" * 64}},
    ],
)
def test_a_damaged_lock_is_named(tmp_path: Path, lock: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"tiny/lock\.json is damaged"):
        replayable(run_with(tmp_path, json.loads(json.dumps(lock))), "again")
