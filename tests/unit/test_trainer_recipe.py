"""What ``python -m trainer RECIPE.yaml`` takes and refuses, before JAX is imported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.compose import compose
from recipes.errors import UserError
from trainer.__main__ import read_recipe


def test_what_muster_show_prints_can_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "quickstart", "train.seed=3"]) == 0
    shown = tmp_path / "mine.yaml"
    shown.write_text(capsys.readouterr().out)
    composed = compose("quickstart", ["train.seed=3"]).recipe
    assert read_recipe(shown) == dataclasses.replace(composed, name="mine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read recipe"),
        ("a: [", "cannot read recipe"),
        ("!!python/object/apply:os.system [ls]", "cannot read recipe"),
        ("- 1", "is not a mapping"),
        ("train: {num_step: 3}", "did you mean train.num_steps?"),
    ],
)
def test_a_bad_recipe_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_recipe(path)
    assert said in caught.value.message


def test_the_command_refuses_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("train: {num_steps: 0}")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "trainer", str(path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: recipe bad")
    assert "Traceback" not in ended.stderr
