"""Checkpoint directories as they lie in storage: which are committed, moving and removing them.

Works on local paths and gs:// alike. A step is a directory with a plain integer name that holds the
commit file; on gs:// that file alone tells a finished save from a broken one, on local disks the name
alone would be believed by the checkpoint library, so both are asked for. Only process 0 writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import fsspec  # type: ignore[import-untyped]
from etils import epath

from recipes.contract import RunPath

COMMIT_FILE = "commit_success.txt"
STATE_ITEM = "state"
MANIFEST_ITEM = "manifest"
_MANIFEST_FILE = "metadata"  # the name that Orbax's JSON handler writes
_KILLED_SAVE = re.compile(r"[0-9]+\.orbax-checkpoint-tmp")
_STEP_NAME = re.compile(r"0|[1-9][0-9]*")


class CheckpointStore:
    """The checkpoints of one run directory, and its quarantine."""

    def __init__(self, run_dir: str) -> None:
        if run_dir.startswith("gs://"):
            # Arrays are written past the file-system layer, whose lists would then be out of date.
            fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
        self._run_dir = epath.Path(run_dir if "://" in run_dir else epath.Path(run_dir).absolute())
        self.root = self._run_dir / RunPath.CHECKPOINTS
        self.quarantine_root = self._run_dir / RunPath.QUARANTINE
        self._left: list[str] = []

    def prepare(self) -> None:
        """Create the folder and prove that it can be written to."""
        self.root.mkdir(parents=True, exist_ok=True)
        probe = self.root / ".write-check"
        probe.write_text("")
        probe.unlink()
        self._left = [name for name in _names(self.root) if _KILLED_SAVE.fullmatch(name)]

    def remove_leftovers(self) -> None:
        """Delete what killed saves of earlier attempts left, as it was when this one began.

        Only under the temporary name that local disks know. On gs:// a broken save has the name of a
        good one and may be a copy that lost its commit file, so it stays until its step is saved again.
        """
        while self._left:
            path = self.root / self._left.pop()
            if path.exists():  # unless its step was saved since
                path.rmtree()

    def path(self, step: int) -> epath.Path:
        return self.root / str(step)

    def committed_steps(self) -> list[int]:
        """Steps whose save was finished, oldest first."""
        names = _names(self.root)
        steps = sorted(int(name) for name in names if _STEP_NAME.fullmatch(name))
        return [step for step in steps if self.is_committed(step)]

    def unfinished(self) -> list[str]:
        """What lies beside the committed steps: saves that were killed, or lost their commit file."""
        committed = {str(step) for step in self.committed_steps()}
        return sorted(name for name in _names(self.root) if name not in committed)

    def quarantined(self) -> list[str]:
        """Checkpoints that were found damaged, now or by an earlier attempt."""
        names = sorted(_names(self.quarantine_root))
        return [str(self.quarantine_root / name) for name in names if not name.endswith(".json")]

    def is_committed(self, step: int) -> bool:
        return bool((self.path(step) / COMMIT_FILE).exists())

    def read_manifest(self, step: int) -> str:
        return str((self.path(step) / MANIFEST_ITEM / _MANIFEST_FILE).read_text())

    def read_fork(self) -> str:
        """What the launcher wrote about the run that this one begins from; empty when there is none."""
        try:
            return str((self._run_dir / RunPath.FORK).read_text())
        except FileNotFoundError:
            return ""

    def remove(self, step: int) -> None:
        """Delete a step; the commit file goes first, so that half a deletion is not a checkpoint."""
        (self.path(step) / COMMIT_FILE).unlink()
        self.path(step).rmtree()

    def quarantine(self, step: int, attempt: int, note: Mapping[str, Any]) -> str:
        """Move a step out of the way, so that it can be saved again, with a note beside it."""
        target = self._free_name(f"checkpoint-{step}-attempt-{attempt}")
        self.quarantine_root.mkdir(parents=True, exist_ok=True)
        (self.quarantine_root / f"{target.name}.json").write_text(json.dumps(dict(note), indent=1))
        source = self.path(step)
        if "://" in str(source):
            _move_objects(source, target)
        else:
            source.rename(target)
        return str(target)

    def _free_name(self, name: str) -> epath.Path:
        number = 1
        target = self.quarantine_root / name
        while target.exists() or (self.quarantine_root / f"{target.name}.json").exists():
            number += 1
            target = self.quarantine_root / f"{name}-{number}"
        return target


def _names(folder: epath.Path) -> list[str]:
    """What is in a folder; nothing where there is none (on gs:// an empty one does not exist)."""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def _move_objects(source: epath.Path, target: epath.Path) -> None:
    """Copy all, then delete; the commit file first, so that half a move is not a checkpoint."""
    files = list(_files(source))
    for file in files:
        (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        file.copy(target / file.relative_to(source))
    files.sort(key=lambda file: file != source / COMMIT_FILE)
    for file in files:
        file.unlink()
    if source.exists():
        source.rmtree()


def _files(folder: epath.Path) -> list[epath.Path]:
    found: list[epath.Path] = []
    for path in folder.iterdir():
        found += _files(path) if path.is_dir() else [path]
    return found
