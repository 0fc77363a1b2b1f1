"""Where recipes and their ingredients are found, and what there is: fast, without Hydra.

Searched in this order, the first hit wins: ``--recipes DIR``, the folders in ``MUSTER_RECIPES``,
``./recipes`` of the working directory, and the recipes that come with Muster. Each folder holds
complete recipes at its top and groups (``model/``, ``mesh/`` ...) in subfolders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import recipes
from launcher.recipe_yaml import first_comment
from recipes.errors import UserError
from recipes.load import nearest

GROUPS = ("model", "mesh", "multislice", "data", "optimizer", "checkpoint", "target")
SHIPPED = Path(recipes.__file__).resolve().parent
ENVIRONMENT_VARIABLE = "MUSTER_RECIPES"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One recipe, or one option of a group."""

    name: str
    path: Path
    comment: str
    """The first comment line of the file."""
    shadows: tuple[str, ...]
    """Labels of files of the same name further down the search path."""

    @property
    def label(self) -> str:
        return label(self.path)


def search_path(extra: Sequence[Path] = ()) -> tuple[Path, ...]:
    """The folders to search, first hit first, without repetitions.

    Raises:
      UserError: a folder that was asked for does not exist.
    """
    named = [(folder, "--recipes") for folder in extra]
    listed = os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep)
    named += [(Path(folder), ENVIRONMENT_VARIABLE) for folder in listed if folder]
    for folder, source in named:
        if not folder.is_dir():
            raise UserError(f"{source}: no folder {folder}", hint="give a folder that holds recipes")
    local = [Path("recipes")] if Path("recipes").is_dir() else []
    folders = [folder.resolve() for folder, _ in named] + [folder.resolve() for folder in local] + [SHIPPED]
    return tuple(dict.fromkeys(folders))


def label(path: Path) -> str:
    """How messages call a file: ``recipes/...`` when shipped, else relative to here when below here."""
    for base, prefix in ((SHIPPED, "recipes/"), (Path.cwd(), "./")):
        if path.is_relative_to(base):
            return prefix + path.relative_to(base).as_posix()
    return str(path)


def find(folders: Sequence[Path], name: str, group: str | None = None) -> Path | None:
    """The file of a recipe or of a group's option."""
    if not NAME_PATTERN.fullmatch(name):
        return None
    candidates = (folder / (group or "") / f"{name}.yaml" for folder in folders)
    return next((path for path in candidates if path.is_file()), None)


def not_a_file(folders: Sequence[Path], name: str, group: str | None = None) -> str:
    """What has the name that was looked for, and is a folder or a device; empty when nothing has it."""
    if not NAME_PATTERN.fullmatch(name):
        return ""
    candidates = (folder / (group or "") / f"{name}.yaml" for folder in folders)
    return next((label(path) for path in candidates if os.path.lexists(path)), "")


def names(folders: Sequence[Path], group: str | None = None) -> list[str]:
    """Names of all recipes, or of a group's options, sorted."""
    found: set[str] = set()
    for folder in folders:
        try:
            with os.scandir(folder / (group or "")) as found_there:
                files = [entry.name for entry in found_there if entry.is_file()]
        except OSError:
            continue
        found.update(
            file[:-5] for file in files if file.endswith(".yaml") and NAME_PATTERN.fullmatch(file[:-5])
        )
    return sorted(found)


def entries(folders: Sequence[Path], group: str | None = None) -> list[Entry]:
    """All recipes, or a group's options, with what each is for; sorted by name."""
    listed = []
    for name in names(folders, group):
        paths = [path for folder in folders if (path := folder / (group or "") / f"{name}.yaml").is_file()]
        if paths:
            shadows = tuple(label(path) for path in paths[1:])
            listed.append(Entry(name=name, path=paths[0], comment=first_comment(paths[0]), shadows=shadows))
    return listed


def locate(name: str, extra: Sequence[Path] = ()) -> tuple[str, tuple[Path, ...]]:
    """A recipe's name and search path, from its name or the path of its file.

    Raises:
      UserError: there is no such recipe; with the nearest name and where it was searched.
    """
    if name.endswith(".yaml") or "/" in name or os.sep in name:
        return _locate_file(name, extra)
    folders = search_path(extra)
    if find(folders, name):
        return name, folders
    if there := not_a_file(folders, name):
        raise UserError(f"no recipe {name!r}: {there} is not a file", hint="make it a file, or move it away")
    guess = nearest(name, names(folders))
    raise UserError(
        f"no recipe {name!r} (searched {describe(folders)})",
        hint=f"did you mean {guess}?" if guess else "`muster recipes` lists what there is",
    )


def _locate_file(name: str, extra: Sequence[Path]) -> tuple[str, tuple[Path, ...]]:
    path = Path(name)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        if "\0" not in name and os.path.lexists(name):
            raise UserError(f"recipe file {name!r} is not a file", hint="give the path of a .yaml file")
        raise UserError(f"no recipe file {name!r}", hint="give a recipe's name or the path of a .yaml file")
    if path.suffix != ".yaml" or not NAME_PATTERN.fullmatch(path.stem):
        raise UserError(
            f"recipe file {name!r}: not a name for a recipe",
            hint="letters, digits, . _ and -, ending in .yaml",
        )
    return path.stem, search_path([path.parent, *extra])


def describe(folders: Sequence[Path]) -> str:
    """The folders, for messages."""
    return ", ".join("recipes (shipped)" if folder == SHIPPED else label(folder) for folder in folders)
