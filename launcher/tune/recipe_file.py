"""The winner as a recipe of the user's own, which extends the one that was tuned."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.compose import compose
from launcher.recipe_path import NAME_PATTERN, find, label, search_path
from launcher.text import time_text
from launcher.tune.search import Trial
from recipes.errors import UserError
from recipes.load import flatten, nest, recipe_to_dict
from recipes.schema import Recipe

FOLDER = Path("recipes")
"""Where users have their own, below the working directory."""


def check_name(name: str, base: str, *, search: Sequence[Path], is_forced: bool) -> Path:
    """Where a recipe of that name goes.

    Raises:
      UserError: it is not a name, or there is such a recipe already.
    """
    path = FOLDER / f"{name}.yaml"
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(f"--write {name!r}: not a name for a recipe", hint="use letters, digits, . _ and -")
    if find(search_path(search), base) is None:
        raise UserError(
            f"--write {name}: {base} is a file that recipes cannot be extended by name from",
            hint="move it to ./recipes, or name its folder with --recipes",
        )
    there = find(search_path(search), name)
    if name == base or (there is not None and there.resolve() != path.resolve()):
        where = base if there is None else label(there)
        raise UserError(f"--write {name}: {where} has that name already", hint="choose another name")
    if there is not None and not is_forced:
        raise UserError(
            f"--write {name}: {path} is there already", hint="choose another name, or add --force"
        )
    return path


def write_recipe(name: str, base: str, trial: Trial, *, search: Sequence[Path], is_forced: bool) -> Path:
    """Writes ``recipes/NAME.yaml``, whole or not at all.

    Args:
      base: name of the recipe that was tuned.

    Raises:
      UserError: as :func:`check_name`, or it cannot be written.
    """
    path = check_name(name, base, search=search, is_forced=is_forced)
    wanted, bare = (flatten(recipe_to_dict(each)) for each in (trial.candidate.recipe, _bare(base, search)))
    values = {key: value for key, value in wanted.items() if key != "name" and bare[key] != value}
    _write_whole(path, _text(base, trial, nest(values)))
    return path


def _bare(base: str, search: Sequence[Path]) -> Recipe:
    return compose(base, [], search=search).recipe


def _text(base: str, trial: Trial, values: Mapping[str, Any]) -> str:
    prediction = trial.prediction
    assert prediction is not None
    how = "compiled" if trial.is_compiled else "from sizes alone"
    band = f"{time_text(prediction.low_s)} to {time_text(prediction.high_s)}"
    comment = f"# {base}, tuned: a step of {time_text(prediction.step_s)} predicted ({band}; {how})\n"
    defaults = {"defaults": [base, "_self_"]}
    body = f"\n{yaml.safe_dump(dict(values), sort_keys=False)}" if values else ""
    return comment + yaml.safe_dump(defaults, sort_keys=False) + body


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path}: {error.strerror}", hint="run it in a folder that you can write to"
        ) from error
