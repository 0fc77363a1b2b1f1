"""What a fork begins with, what is refused, and that no kill leaves a fork that would start from scratch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.fork import find_fork, renamed
from launcher.rundir import RunDir, create_or_open, encode_recipe
from launcher.storage import StorageError, open_storage
from recipes.contract import Fork
from recipes.errors import UserError
from recipes.fingerprint import fingerprint
from recipes.schema import Recipe
from tests.unit.rundir_support import commit_checkpoint, make_recipe, make_run


def _recipe(root: Path, *, name: str = "tiny", num_steps: int = 20, seed: int = 0) -> Recipe:
    recipe = make_recipe(num_steps=num_steps, seed=seed)
    return dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, root=str(root), name=name))


def _fork(root: Path) -> Fork:
    return find_fork(_recipe(root, seed=1), "new")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With a run ``tiny`` that has saved steps 5 and 10, and begun to save 15."""
    run = make_run(tmp_path)
    commit_checkpoint(run.storage, 5)
    commit_checkpoint(run.storage, 10)
    run.storage.replace("checkpoints/15/_CHECKPOINT_METADATA", b"{}")
    return tmp_path


def test_a_fork_names_the_newest_committed_step_and_what_changed(root: Path) -> None:
    assert _fork(root) == Fork(
        source_url=str(root / "tiny"),
        source_run="tiny",
        step=10,
        source_fingerprint=fingerprint(make_recipe()),
        changed_keys=("train.seed",),
    )
    assert not (root / "new").exists()


@pytest.mark.parametrize(
    ("recipe", "name", "message", "hint"),
    [
        ({}, "New!", "'New!' is not a run name", "a-z, 0-9 and hyphens"),
        ({}, "", "'' is not a run name", "a-z"),
        ({}, "tiny", "tiny is the run to begin from", "another name"),
        ({"name": "other"}, "new", "there is no run at", "run.name=RUN"),
        ({"name": "empty"}, "new", "has no committed checkpoint", "wait for one"),
        ({"num_steps": 10}, "new", "is at step 10, train.num_steps=10 is reached", "train.num_steps=20"),
        ({"num_steps": 4}, "new", "is at step 10, train.num_steps=4 is reached", "train.num_steps=14"),
    ],
)
def test_refusals(recipe: dict[str, int], name: str, message: str, hint: str, root: Path) -> None:
    make_run(root, "empty")
    with pytest.raises(UserError) as caught:
        find_fork(_recipe(root, **recipe), name)  # type: ignore[arg-type]
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_new_fork_is_written_and_read_back_and_resumes_like_any_run(root: Path) -> None:
    fork, recipe = _fork(root), renamed(_recipe(root, seed=1), "new")
    storage = open_storage(recipe.run_dir)
    opened = create_or_open(storage, recipe, {}, fork=fork)
    assert (opened.created, opened.run.fork(), opened.run.recipe()) == (True, fork, recipe)
    assert json.loads(storage.read("fork.json"))["step"] == 10
    before = storage.read("recipe.yaml"), storage.read("fork.json")
    assert not create_or_open(storage, _recipe(root, seed=1, name="new"), {}).created
    assert (storage.read("recipe.yaml"), storage.read("fork.json")) == before


def test_a_fork_onto_a_run_is_refused(root: Path) -> None:
    make_run(root, "new")
    fork, recipe = _fork(root), renamed(_recipe(root, seed=1), "new")
    with pytest.raises(UserError, match="exists already") as caught:
        create_or_open(open_storage(recipe.run_dir), recipe, {}, fork=fork)
    assert "run.name=new" in caught.value.hint
    assert not (root / "new" / "fork.json").exists()


def test_the_next_launch_completes_what_a_killed_fork_left(root: Path) -> None:
    fork, recipe = _fork(root), renamed(_recipe(root, seed=1), "new")
    storage = open_storage(recipe.run_dir)
    storage.create("recipe.yaml", encode_recipe(recipe, fork))
    assert create_or_open(storage, recipe, {}).run.fork() == fork
    assert json.loads(storage.read("fork.json"))["source_url"] == str(root / "tiny")


def test_a_run_that_is_no_fork_has_no_source(root: Path) -> None:
    assert RunDir(open_storage(str(root / "tiny"))).fork() is None
    create_or_open(open_storage(str(root / "tiny")), make_recipe(), {})
    assert not (root / "tiny" / "fork.json").exists()


def test_a_damaged_source_in_the_header_is_one_error(root: Path) -> None:
    fork, recipe = _fork(root), renamed(_recipe(root), "new")
    storage = open_storage(recipe.run_dir)
    storage.create("recipe.yaml", encode_recipe(recipe, fork).replace(b"step: 10", b"step: ten"))
    with pytest.raises(StorageError, match="step is not a whole number"):
        RunDir(storage).fork()


def test_dry_run_of_a_fork_plans_the_new_run_and_touches_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "quickstart", f"run.root={root}", "run.name=tiny", "--dry-run", "--fork"]
    assert main([*words, "new"]) == 0
    assert json.loads(capsys.readouterr().out)["run_name"] == "new"
    assert not (root / "new").exists()
    assert main([*words, "tiny"]) == 2
    assert "error: --fork: tiny is the run to begin from" in capsys.readouterr().err
