"""Storage on a local (or network) file system: temporary file, fsync, rename, under a folder's lock.

Every writer of a folder takes the flock of its ``.muster.lock``, so a version that was compared is
the version that is replaced. Files whose names start with ``.muster`` are never listed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.storage_types import (
    READ_LIMIT_BYTES,
    Conflict,
    Exists,
    Names,
    NotFound,
    Storage,
    StorageError,
    Unavailable,
    Version,
    checked_path,
    checked_prefix,
    denied,
    matcher,
)

LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.005
_HIDDEN = ".muster"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_BLOCKED = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class LocalStorage:
    """Objects are files below ``root``, which is made by the first write."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def child(self, path: str) -> Storage:
        return LocalStorage(self._locate(checked_path(path)))

    def exists(self, path: str) -> bool:
        target = self._locate(checked_path(path))
        with _explained("read", target):
            return target.is_file()

    def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        return self.read_versioned(path, limit_bytes=limit_bytes)[0]

    def read_versioned(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> tuple[bytes, Version]:
        target = self._locate(checked_path(path))
        with _explained("read", target), target.open("rb") as file:
            data = file.read(limit_bytes + 1)
            version = _version(os.fstat(file.fileno()), data)
        if len(data) > limit_bytes:
            raise StorageError(
                f"{target} is larger than {limit_bytes} bytes",
                hint="it is damaged or was not written by Muster",
            )
        return data, version

    def create(self, path: str, data: bytes) -> Version:
        target = self._locate(checked_path(path))
        with (
            _explained("write", target),
            _written(target, data) as (temporary, version),
            _locked(target.parent),
        ):
            if os.path.lexists(target):
                raise Exists(f"{target} exists already")
            _rename(temporary, target)
        return version

    def replace(self, path: str, data: bytes, *, if_version: Version | None = None) -> Version:
        target = self._locate(checked_path(path))
        with (
            _explained("write", target),
            _written(target, data) as (temporary, version),
            _locked(target.parent),
        ):
            if if_version is not None and self._version_now(path) != if_version:
                raise Conflict(f"{target} was changed by another process")
            _rename(temporary, target)
        return version

    def list(self, prefix: str = "") -> Names:
        folder = self._locate(checked_prefix(prefix))
        found: Names = []
        with _explained("list", folder):
            for parent, folders, files in os.walk(folder, onerror=_raise_unless_missing):
                folders.sort()
                found += [
                    os.path.relpath(os.path.join(parent, name), self._root)
                    for name in files
                    if not name.startswith(_HIDDEN)
                ]
        return sorted(found)

    def children(self, prefix: str = "") -> Names:
        folder = self._locate(checked_prefix(prefix))
        with _explained("list", folder):
            try:
                return sorted(name for name in os.listdir(folder) if not name.startswith(_HIDDEN))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def modified(self, prefix: str) -> Mapping[str, float]:
        folder = self._locate(checked_prefix(prefix))
        with (
            _explained("list", folder),
            contextlib.suppress(FileNotFoundError),
            os.scandir(folder) as entries,
        ):
            return {
                entry.name: entry.stat().st_mtime
                for entry in entries
                if entry.is_file() and not entry.name.startswith(_HIDDEN)
            }
        return {}

    def marks(self, pattern: str) -> Mapping[str, str]:
        folders = [""]
        *parents, last = pattern.split("/")
        for part in parents:
            folders = [
                f"{folder}{name}/"
                for folder in folders
                for name in self.children(folder.rstrip("/"))
                if matcher(part).fullmatch(name)
            ]
        found: dict[str, str] = {}
        for folder in folders:
            found |= self._marks_in(folder, matcher(last))
        return found

    def _marks_in(self, folder: str, matches: re.Pattern[str]) -> Mapping[str, str]:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._root / folder) as entries,
        ):
            return {
                f"{folder}{entry.name}": f"{entry.inode()}-{status.st_mtime_ns}-{status.st_size}"
                for entry in entries
                if matches.fullmatch(entry.name)
                and not entry.name.startswith(_HIDDEN)
                and entry.is_file()
                and (status := entry.stat())
            }
        return {}

    def delete(self, path: str) -> None:
        target = self._locate(checked_path(path))
        if not os.path.lexists(target):
            return
        with _explained("delete", target), _locked(target.parent):
            target.unlink(missing_ok=True)

    def write_log(self, path: str, offset: int, data: bytes) -> None:
        target = self._locate(checked_path(path))
        with _explained("write", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with open(descriptor, "wb", buffering=0) as file:
                _write_all(file.fileno(), data, offset)

    def read_log(self, path: str, offset: int = 0, *, limit_bytes: int | None = None) -> bytes:
        target = self._locate(checked_path(path))
        try:
            with _explained("read", target), target.open("rb") as file:
                file.seek(offset)
                return file.read(-1 if limit_bytes is None else limit_bytes)
        except NotFound:
            return b""

    def read_log_tail(self, path: str, limit_bytes: int) -> tuple[int, bytes]:
        target = self._locate(checked_path(path))
        try:
            with _explained("read", target), target.open("rb", buffering=0) as file:
                start = max(0, os.fstat(file.fileno()).st_size - limit_bytes)
                return start, os.pread(file.fileno(), limit_bytes, start)
        except NotFound:
            return 0, b""

    def prepare_logs(self, paths: Sequence[str]) -> None:
        pass

    def log_size(self, path: str) -> int:
        target = self._locate(checked_path(path))
        try:
            with _explained("read", target):
                return target.stat().st_size
        except NotFound:
            return 0

    def stems(self, prefix: str) -> Names:
        return sorted({name.partition(".")[0] for name in self.children(prefix) if "." in name})

    def _version_now(self, path: str) -> Version | None:
        try:
            return self.read_versioned(path)[1]
        except NotFound:
            return None

    def _locate(self, path: str) -> Path:
        """The file of a valid path; symbolic links may not lead out of the root."""
        target = self._root / path
        root, real = os.path.realpath(self._root), os.path.realpath(target)
        if os.path.commonpath([root, real]) != root:
            raise StorageError(
                f"{target} leads out of {self._root} (to {real})", hint="remove the symbolic link"
            )
        return target


@contextlib.contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Turns what the operating system says into an error with a hint."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _DENIED:
            raise denied(
                action, str(path), reason, "make it writable, or choose another folder with run.root"
            ) from error
        if error.errno in _FULL:
            raise StorageError(
                f"cannot {action} {path}: {reason}",
                hint="free some space, or choose another disk with run.root",
            ) from error
        if error.errno in _BLOCKED:
            raise StorageError(f"cannot {action} {path}: {reason}", hint="move what is in the way") from error
        raise Unavailable(
            f"cannot {action} {path}: {reason}", hint="look at the disk, then start again"
        ) from error


@contextlib.contextmanager
def _written(target: Path, data: bytes) -> Iterator[tuple[Path, Version]]:
    """A temporary file with ``data`` beside ``target``, on disk; gone afterwards unless renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{_HIDDEN}-{os.getpid()}-{secrets.token_hex(6)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            _write_all(descriptor, data, 0)
            os.fsync(descriptor)
            version = _version(os.fstat(file.fileno()), data)
        yield temporary, version
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _rename(temporary: Path, target: Path) -> None:
    os.replace(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _version(status: os.stat_result, data: bytes) -> Version:
    # The inode and time tell apart two writes of the same bytes; the digest, writes within one clock tick.
    return Version(f"{status.st_ino}-{status.st_mtime_ns}-{hashlib.sha256(data).hexdigest()}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the system drops it when the process dies, however it dies."""
    # A lock file and not the folder itself: NFS only locks what is open for writing.
    descriptor = os.open(folder / f"{_HIDDEN}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"{folder} has been locked by another process for {LOCK_TIMEOUT_S:g} s",
                    hint="look for a stopped (suspended) muster process",
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
