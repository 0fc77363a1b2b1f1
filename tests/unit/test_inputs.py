"""Paths of a recipe's data, before a run is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launcher.compose import compose
from launcher.inputs import check_inputs
from recipes.errors import UserError
from recipes.schema import Recipe


def recipe(path: Path | str, **data: Any) -> Recipe:
    quickstart = compose("quickstart", []).recipe
    changed = dataclasses.replace(quickstart.data, source="text_files", path=str(path), **data)
    return dataclasses.replace(quickstart, data=changed)


def test_files_folders_patterns_and_buckets_pass(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("text")
    for path in (tmp_path, tmp_path / "deep" / "a.txt", tmp_path / "d*p" / "*.txt", "gs://bucket/a"):
        check_inputs(recipe(path))


@pytest.mark.parametrize(
    ("path", "said"), [("missing", "does not exist"), ("empty", "no file there"), ("zero.txt", "empty")]
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").touch()
    with pytest.raises(UserError, match=said) as caught:
        check_inputs(recipe(tmp_path / path))
    assert "data.path" in caught.value.message


def test_every_path_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"data\.tokenizer_path"):
        check_inputs(recipe(tmp_path, tokenizer="huggingface", tokenizer_path=str(tmp_path / "none.json")))
