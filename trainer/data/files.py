"""Finding and reading local data files, with errors that say which file and what to do.

Names are relative, in POSIX form and sorted by code point, so that every host sees the same
files in the same order whatever its locale and wherever the folder is mounted.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of a data set."""

    name: str
    """Path relative to the data set's root."""
    path: Path

    def read(self) -> bytes:
        """The whole file.

        Raises:
          UserError: it cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise unreadable(self.path, error) from None

    def status(self) -> os.stat_result:
        """Size and times of the file.

        Raises:
          UserError: there is no such file.
        """
        try:
            return self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error) from None


def unreadable(path: Path | str, error: OSError) -> UserError:
    """The error for a data file that the system would not read."""
    if isinstance(error, FileNotFoundError):
        return UserError(
            f"data file {path} does not exist",
            hint="check data.path, data.eval_path and data.tokenizer_path; every host needs the file",
        )
    if isinstance(error, PermissionError):
        return UserError(
            f"data file {path} cannot be read: permission denied",
            hint=f"give this user read access, for example: chmod -R u+rX {path}",
        )
    return UserError(
        f"data file {path} cannot be read: {error.strerror or error}",
        hint="check that the path names a readable file on a healthy disk",
    )


def local_path(address: str | None, key: str) -> Path:
    """The local path that a recipe's ``key`` names.

    Raises:
      UserError: no path is given, or it is an address in a bucket.
    """
    if not address or "\0" in address:
        raise UserError(f"{key}={address!r} is not a path", hint=f"set {key} to a local path")
    if "://" in address:
        raise UserError(
            f"{key}={address}: data is read from local paths only",
            hint="copy it to local disk, or mount the bucket (for example with gcsfuse) and give that path",
        )
    return Path(os.path.expanduser(address))


def find_files(address: str | None, key: str) -> list[DataFile]:
    """The files that ``address`` names: a file, all files under a folder, or a glob pattern (``**`` too).

    Raises:
      UserError: there are none, or they cannot be listed.
    """
    path = local_path(address, key)
    try:
        found = _find(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if not found:
        raise UserError(
            f"{key}={address}: no file there",
            hint=f"put files in the folder, or correct the pattern in {key}",
        )
    return sorted(found, key=lambda file: file.name)


def _find(path: Path) -> list[DataFile]:
    if path.is_dir():
        return list(walk(path))
    if glob.has_magic(str(path)) and not path.exists():
        return _match(path)
    path.stat()
    return [DataFile(name=path.name, path=path)]


def refuse_shared_files(train: list[DataFile], held_out: list[DataFile]) -> None:
    """Refuse a file that would be both trained on and held out.

    Raises:
      UserError: naming the first such file.
    """
    trained = {file.path.resolve() for file in train}
    for file in held_out:
        if file.path.resolve() in trained:
            raise UserError(
                f"data file {file.path} is in both data.path and data.eval_path",
                hint="held-out data must not be trained on: keep the two apart, or leave data.eval_path null",
            )


def walk(root: Path, *, skip_folders: Container[str] = ()) -> Iterator[DataFile]:
    """Every regular file under ``root`` that is not hidden, in no particular order."""

    def fail(error: OSError) -> None:
        raise unreadable(error.filename or root, error) from None

    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip_folders]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield DataFile(name=path.relative_to(root).as_posix(), path=path)


def _match(pattern: Path) -> list[DataFile]:
    fixed = 0
    while not glob.has_magic(pattern.parts[fixed]):
        fixed += 1
    root = Path(*pattern.parts[:fixed])
    paths = [Path(found) for found in glob.glob(str(pattern), recursive=True)]
    return [DataFile(name=path.relative_to(root).as_posix(), path=path) for path in paths if path.is_file()]
