"""Recipes that are there by name, and are no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.compose import compose
from launcher.recipe_path import locate
from recipes.errors import UserError


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_what_is_not_a_file_is_said_to_be_none(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(make)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "model").mkdir(parents=True)
    make(tmp_path / "recipes" / "ff.yaml")
    make(tmp_path / "recipes" / "model" / "gg.yaml")
    with pytest.raises(UserError, match=r"no recipe 'ff': \./recipes/ff\.yaml is not a file"):
        locate("ff")
    with pytest.raises(UserError, match=r"recipe file 'recipes/ff\.yaml' is not a file"):
        locate("recipes/ff.yaml")
    with pytest.raises(
        UserError, match=r"model=gg .*: is no option: \./recipes/model/gg\.yaml is not a file"
    ):
        compose("quickstart", ["model=gg"])
    (tmp_path / "recipes" / "hh.yaml").write_text("defaults: [{model: gg}]\n")
    with pytest.raises(UserError, match=r"recipe hh: \./recipes/model/gg\.yaml is not a file"):
        compose("hh", [])
    with pytest.raises(UserError) as caught:
        locate("fff")
    assert "ff?" not in caught.value.hint


def test_a_file_further_down_the_search_path_is_found_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "quickstart.yaml").mkdir(parents=True)
    assert locate("quickstart")[0] == "quickstart"
