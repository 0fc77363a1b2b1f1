"""The winner as a recipe of the user's own, which extends the one that was tuned."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.compose import compose
from launcher.recipe_path import NAME_PATTERN, find, label, locate, search_path
from launcher.text import time_text
from launcher.tune.search import Trial
from recipes.check import check
from recipes.errors import RecipeError, UserError
from recipes.fingerprint import changes
from recipes.load import flatten, nest, recipe_to_dict
from recipes.schema import Recipe

FOLDER = Path("recipes")
"""Where users have their own, below the working directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a winner goes."""

    name: str
    path: Path
    base: Recipe
    """The recipe that it extends, without overrides."""
    search: Sequence[Path]


def target_of(name: str, tuned: str, composed: Recipe, *, search: Sequence[Path], is_forced: bool) -> Target:
    """Where a recipe of that name goes; asked before hours of compiling, too.

    Args:
      tuned: the recipe that is tuned, as the user called it: a name, or the path of a file.
      composed: the same with overrides.

    Raises:
      UserError: it is no name for a recipe, there is one already, or the tuned one cannot be extended.
    """
    path = FOLDER / f"{name}.yaml"
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(f"--write {name!r}: not a name for a recipe", hint="use letters, digits, . _ and -")
    base, folders = locate(tuned, search)
    by_name = find(search_path(search), base)
    if by_name is None or by_name.resolve() != _file(folders, base):
        raise UserError(
            f"--write {name}: {base} is a file that recipes cannot be extended by name from",
            hint="move it to ./recipes, or name its folder with --recipes",
        )
    there = find(search_path(search), name)
    if name == base or (there is not None and there.resolve() != path.resolve()):
        where = base if there is None else label(there)
        raise UserError(f"--write {name}: {where} has that name already", hint="choose another name")
    if os.path.lexists(path) and not is_forced:
        raise UserError(
            f"--write {name}: {path} is there already", hint="choose another name, or add --force"
        )
    # Of a run that has no name the recipe's is the name.
    if problems := check(dataclasses.replace(composed, name=name)):
        raise RecipeError(name, problems)
    return Target(name=name, path=path, base=compose(base, [], search=search).recipe, search=search)


def _file(folders: Sequence[Path], name: str) -> Path | None:
    path = find(folders, name)
    return None if path is None else path.resolve()


def write_recipe(target: Target, trial: Trial) -> Path:
    """Writes ``recipes/NAME.yaml``, whole or not at all, once it is known to be the winner when read again.

    Raises:
      UserError: it cannot be written, or a file cannot say what the overrides did.
    """
    text = _text(target.base, trial)
    try:
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".tune-") as folder:
            partial = Path(folder) / target.path.name
            partial.write_text(text, encoding="utf-8")
            _check_same(target, partial, trial.candidate.recipe)
            os.replace(partial, target.path)
    except OSError as error:
        raise UserError(
            f"cannot write {target.path}: {error.strerror}", hint="run it in a folder that you can write to"
        ) from error
    return target.path


def _check_same(target: Target, partial: Path, wanted: Recipe) -> None:
    read = compose(target.name, [], search=[partial.parent, *target.search]).recipe
    if differing := [change.key for change in changes(wanted, read)]:
        raise UserError(
            f"--write {target.name}: a recipe that extends {target.base.name} cannot say what became of"
            f" {', '.join(differing)}",
            hint="entries cannot be removed from a file: leave ~... out, and remove them at the launch",
        )


def _text(base: Recipe, trial: Trial) -> str:
    prediction = trial.prediction
    assert prediction is not None
    wanted, bare = (flatten(recipe_to_dict(each)) for each in (trial.candidate.recipe, base))
    values = {key: value for key, value in wanted.items() if key != "name" and bare[key] != value}
    how = "compiled" if trial.is_compiled else "from sizes alone"
    band = f"{time_text(prediction.low_s)} to {time_text(prediction.high_s)}"
    comment = f"# {base.name}, tuned: a step of {time_text(prediction.step_s)} predicted ({band}; {how})\n"
    return (
        comment + _yaml({"defaults": [base.name, "_self_"]}) + (f"\n{_yaml(nest(values))}" if values else "")
    )


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is no plain word: YAML 1.2, which recipes are, takes 3e-4 for a number."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = text.replace("_", "").replace("-", "").isalpha() and text.isascii()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _quoted)


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False)
