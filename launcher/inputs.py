"""The files that a local run will read, looked at before anything is written.

The trainer checks their content; this finds the missing and the empty ones in milliseconds, so that a
misspelt path leaves no run behind.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from recipes.errors import UserError
from recipes.schema import Recipe


def check_inputs(recipe: Recipe) -> None:
    """Looks at every path of the recipe's data.

    Raises:
      UserError: one is missing, unreadable or empty.
    """
    data = recipe.data
    paths = {
        "data.path": data.path,
        "data.eval_path": data.eval_path,
        "data.tokenizer_path": data.tokenizer_path,
    }
    for key, path in paths.items():
        if path is not None and not path.startswith("gs://"):
            _check(key, path)


def _check(key: str, path: str) -> None:
    try:
        files = list(_files(path))
        readable = [file for file in files if os.access(file, os.R_OK) and file.stat().st_size > 0]
    except OSError as error:
        raise UserError(
            f"{key}={path}: {error.strerror}", hint="give a path that this user may read"
        ) from error
    if not files:
        what = "no file there" if Path(path).exists() else "does not exist"
        raise UserError(f"{key}={path}: {what}", hint="correct the path; relative ones start from here")
    if not readable:
        raise UserError(f"{key}={path}: empty, or not readable", hint="give files with content and rights")


def _files(path: str) -> Iterable[Path]:
    """The files that a path, folder or pattern means."""
    found = [Path(path)] if Path(path).exists() else [Path(match) for match in sorted(glob.glob(path))]
    for place in found:
        if place.is_dir():
            yield from (file for file in sorted(place.rglob("*")) if file.is_file())
        else:
            yield place
