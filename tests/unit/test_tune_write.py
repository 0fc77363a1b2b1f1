"""`muster tune --write`: the winner as a recipe that is the same when it is read again, or none at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.compose import compose
from recipes.errors import UserError

V5E = "llama3-8b-v5e-16x16"
SMALL = ("hardware.topology=4x4", "train.global_batch_size=16", "train.sequence_length=2048")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*words: str, recipe: str = V5E) -> int:
    return main(["tune", recipe, *SMALL, "--quick", *words])


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_winner_is_written_and_can_be_launched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--json", "--write", "faster") == 0
    best = json.loads(capsys.readouterr().out)["trials"][0]
    assert [path.name for path in (folder / "recipes").iterdir()] == ["faster.yaml"]
    written = compose("faster", []).recipe
    assert dataclasses.replace(written, name=V5E) == compose(V5E, [*SMALL, *best["overrides"]]).recipe
    assert main(["plan", "faster"]) == 0
    capsys.readouterr()
    assert tune("--write", "faster") == 2
    assert "there already" in capsys.readouterr().err
    assert tune("--write", "faster", "--force") == 0


def test_what_the_overrides_said_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {"NUMBER": "3e-4", "WORD": "no", "NULL": "null", "TEXT": "a: b # c", "QUOTE": 'x"y', "": ""}
    words = [f"target.env.{name}={json.dumps(text)}" for name, text in hostile.items() if name]
    chosen = ["model=llama3.1-8b", "run.name=mine", "optimizer.learning_rate=3e-5"]
    assert tune(*words, *chosen, "--write", "Any.Name", "--json") == 0
    best = json.loads(capsys.readouterr().out)["trials"][0]
    wanted = compose(V5E, [*SMALL, *words, *chosen, *best["overrides"]]).recipe
    assert dataclasses.replace(compose("Any.Name", []).recipe, name=V5E) == wanted
    assert main(["plan", "Any.Name"]) == 0


def test_what_a_file_cannot_say_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "recipes").mkdir()
    base = folder / "recipes" / "base.yaml"
    base.write_text(f"defaults: [{V5E}, _self_]\ntarget: {{env: {{A: '1', B: '2'}}}}\n")
    assert tune("~target.env.A", "--write", "mine", recipe="base") == 2
    assert "cannot say what became of target.env" in capsys.readouterr().err
    assert files(folder) == ["recipes/base.yaml"]


def test_another_recipe_of_the_same_name_is_not_taken_for_the_tuned_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = folder / "elsewhere" / "llama3-70b-v5p-4x4x8.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(f"defaults: [{V5E}]\n")
    assert tune("--write", "mine", recipe=str(elsewhere)) == 2
    assert "cannot be extended by name from" in capsys.readouterr().err
    assert tune("--write", "mine", "--recipes", str(elsewhere.parent), recipe=elsewhere.stem) == 0
    found = compose("mine", [], search=[elsewhere.parent]).recipe
    assert found.hardware.generation == "v5e"


def test_a_recipe_does_not_come_to_extend_itself(folder: Path) -> None:
    assert tune("--write", "first") == 0
    before = (folder / "recipes/first.yaml").read_text()
    assert tune("--write", "second", recipe="first") == 0
    assert tune("--write", "first", "--force", recipe="second") == 2
    assert (folder / "recipes/first.yaml").read_text() == before
    assert files(folder) == ["recipes/first.yaml", "recipes/second.yaml"]


def test_a_folder_that_cannot_be_written_is_one_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipes").write_text("not a folder")
    assert tune("--write", "mine") == 2
    assert capsys.readouterr().err.count("error: cannot write recipes/mine.yaml") == 1
    with pytest.raises(UserError):
        compose("mine", [])
