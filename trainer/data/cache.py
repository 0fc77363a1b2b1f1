"""Results on this host's disk that cost a full read of the data: scans of files, and token files.

Entries are keyed by the path, size and modification time (ns) of what they were made from, appear
atomically, and may be deleted at any time. Several processes of one host may share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from recipes.errors import UserError
from trainer.data.corpus import StoredTokens, TokenScan, scan
from trainer.data.files import DataFile

type Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCache:
    """The cache folder; without one, everything is computed anew."""

    folder: Path | None

    def arrays(self, file: DataFile, purpose: str, compute: Callable[[], Arrays]) -> Arrays:
        """``compute()`` for ``file`` as it is now. A folder that cannot be written only costs time."""
        if self.folder is None:
            return compute()
        entry = self.folder / f"{purpose}-{source_key([file])}.npz"
        try:
            with entry.open("rb") as stream, np.load(stream, allow_pickle=False) as saved:
                return dict(saved)
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            result = compute()
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with _replacing(entry) as output:
                np.savez(output, allow_pickle=False, **result)
        return result

    def scan(self, file: DataFile, tokens: StoredTokens) -> TokenScan:
        """The scan of ``tokens``, which are ``file`` memory-mapped."""

        def compute() -> Arrays:
            found = scan(tokens)
            return {"digest": np.array(found.digest), "largest": np.array(found.largest)}

        saved = self.arrays(file, f"scan-{tokens.dtype.name}", compute)
        return TokenScan(digest=str(saved["digest"]), largest=int(saved["largest"]))

    def token_file(self, key: str, write: Callable[[BinaryIO], None]) -> Path:
        """The file that ``write`` fills, written by the first process to ask and awaited by the others.

        Raises:
          UserError: the folder cannot be written.
        """
        assert self.folder is not None
        path = self.folder / f"tokens-{key}.bin"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                if not path.exists():
                    for left_by_a_killed_process in self.folder.glob(f".{path.name}.*"):
                        left_by_a_killed_process.unlink()
                    with _replacing(path) as stream:
                        write(stream)
        except OSError as error:
            raise UserError(
                f"token cache {path} cannot be written: {error.strerror or error}",
                hint="free space or allow writing there",
            ) from None
        return path


def source_key(files: list[DataFile], *more: str) -> str:
    """Hex key of files as they are now, and of what is made from them."""
    facts: list[object] = [*more]
    for file in files:
        status = file.status()
        facts.append([file.name, os.path.realpath(file.path), status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content appears at ``path`` all at once, or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
