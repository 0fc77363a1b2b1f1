"""A run again, from what it recorded: the recipe of its ``recipe.yaml``, code and image of its ``lock.json``.

Reads only; the new run is created and launched like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher import ledger
from launcher.bundle import bundle_path
from launcher.fork import renamed
from launcher.rundir import RunDir
from launcher.storage import open_storage
from recipes.contract import RunPath, is_run_name
from recipes.errors import UserError
from recipes.fingerprint import fingerprint
from recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What launches a run again."""

    recipe: Recipe
    """The run's, under the new name."""
    bundle: str | None
    """Digest of the code that is in the bucket still; None when the image has the code."""
    image: str | None
    lock: Mapping[str, Any]
    """All of the run's lock, for the new one to be compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    bundle: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lock:
    code: _Code | None = None
    image: str | None = None


def replayable(run: RunDir, name: str) -> Replay:
    """What launches ``run`` again as the run ``name``: a new one, or this very replay begun before.

    Raises:
      UserError: ``name`` cannot be, or the run recorded no code, or its code is gone.
    """
    if not run.exists():
        raise UserError(f"there is no run at {run.url}", hint="`muster ls` lists the runs of a root")
    recipe = run.recipe()
    new = _new_run(recipe, name)
    where = f"{run.url}/{RunPath.LOCK}"
    lock = run.lock()
    facts = ledger.from_plain(dict(lock), _Lock, where)
    bundle = facts.code.bundle if facts.code else None
    if bundle is None and facts.image is None:
        raise UserError(
            f"{where} has neither code nor image to launch again: the run used the code of its machine",
            hint="check out the commit in lock.json and launch its recipe.yaml under another run.name",
        )
    if bundle is not None:
        _check_bundle(recipe.run.root, bundle, where)
    if new.exists() and not _is_replay(new, run, recipe, lock):
        raise UserError(
            f"{new.url} exists already, and it is no replay of {run.url}", hint="choose another name"
        )
    return Replay(recipe=renamed(recipe, name), bundle=bundle, image=facts.image, lock=lock)


def _new_run(recipe: Recipe, name: str) -> RunDir:
    if not is_run_name(name):
        raise UserError(f"{name!r} is not a run name", hint="run names are a-z, 0-9 and hyphens, at most 40")
    return RunDir(open_storage(renamed(recipe, name).run_dir))


def _is_replay(new: RunDir, run: RunDir, recipe: Recipe, lock: Mapping[str, Any]) -> bool:
    """Whether an earlier replay made ``new``: it is gone on with then, as an earlier launch would be."""
    if new.url == run.url or new.fork() is not None:
        return False
    # Empty: that replay was killed before it wrote the lock, so nothing has run.
    theirs = new.lock()
    same_code = not theirs or all(theirs.get(key) == lock.get(key) for key in ("code", "image"))
    return same_code and fingerprint(new.recipe()) == fingerprint(recipe)


def _check_bundle(root: str, digest: str, where: str) -> None:
    try:
        path = bundle_path(digest)
    except UserError as error:
        raise ledger.Damaged(where, error.message) from error
    storage = open_storage(root)
    if not storage.exists(path):
        raise UserError(
            f"the code of this run is gone: {storage.url}/{path} does not exist",
            hint="check out the commit in lock.json, apply its patch, and launch recipe.yaml anew",
        )
