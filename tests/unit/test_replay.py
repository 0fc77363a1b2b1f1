"""What a run is launched again from, and why it sometimes cannot be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher import ledger
from launcher.bundle import bundle_path, make_bundle, upload
from launcher.fork import renamed
from launcher.provenance import lock_info
from launcher.replay import replayable
from launcher.rundir import RunDir, create_or_open, encode_recipe
from launcher.storage import open_storage
from recipes.contract import Fork
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


def replayed(run: RunDir, name: str, *, lock: Mapping[str, Any] | None, recipe: Recipe | None = None) -> None:
    """What a replay leaves that is killed before it submits: without ``lock``, before it wrote one."""
    new = renamed(recipe or run.recipe(), name)
    storage = open_storage(new.run_dir)
    storage.create("recipe.yaml", encode_recipe(new))
    if lock is not None:
        storage.create("lock.json", ledger.encode(dict(lock)))


@pytest.mark.parametrize("wrote_lock", [True, False])
def test_a_replay_that_was_killed_is_gone_on_with(run: RunDir, wrote_lock: bool) -> None:
    facts = {**run.lock(), "python": "another", "manifest_sha256": "1" * 64}
    replayed(run, "again", lock=facts if wrote_lock else None)
    assert replayable(run, "again").recipe.run_name == "again"


@pytest.mark.parametrize(
    "change", [{"code": {"bundle": "sha256:" + "2" * 64}}, {"code": None}, {"image": "x"}]
)
def test_a_name_of_other_code(run: RunDir, change: dict[str, Any]) -> None:
    replayed(run, "again", lock={**run.lock(), **change})
    with pytest.raises(UserError, match="again exists already, and it is no replay of"):
        replayable(run, "again")


def test_a_name_of_another_experiment(run: RunDir) -> None:
    recipe = run.recipe()
    other = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=recipe.train.seed + 1))
    replayed(run, "again", lock=run.lock(), recipe=other)
    with pytest.raises(UserError, match="again exists already, and it is no replay of"):
        replayable(run, "again")


def test_a_name_of_a_fork(run: RunDir) -> None:
    fork = Fork(source_url=run.url, source_run="tiny", step=1, source_fingerprint="0" * 64, changed_keys=())
    new = renamed(run.recipe(), "again")
    open_storage(new.run_dir).create("recipe.yaml", encode_recipe(new, fork))
    with pytest.raises(UserError, match="again exists already, and it is no replay of"):
        replayable(run, "again")


def test_its_own_name(run: RunDir) -> None:
    with pytest.raises(UserError, match="tiny exists already, and it is no replay of"):
        replayable(run, "tiny")


def test_a_name_that_is_taken_by_something_damaged(run: RunDir, tmp_path: Path) -> None:
    open_storage(str(tmp_path / "root" / "other")).create("recipe.yaml", b"")
    with pytest.raises(UserError, match=r"other/recipe\.yaml has no .* header"):
        replayable(run, "other")


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
