"""The vocabulary of storage: what every back end can do, how it fails, and which paths are valid.

Imported by both back ends and re-exported by ``launcher.storage``, which is what callers import.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NewType, Protocol

from recipes.contract import ExitCode
from recipes.errors import UserError

Version = NewType("Version", str)
"""Opaque: names one written state of one object. Only equality means anything."""

Names = list[str]

READ_LIMIT_BYTES = 16 * 2**20
"""Objects that Muster reads whole are small; more is somebody else's file."""

MAX_PATH_BYTES = 900
"""GCS allows 1024 bytes for bucket-relative names; this leaves room for the run's own prefix."""


class StorageError(UserError):
    """An operation on stored objects failed for a reason that the user can mend."""


class NotFound(StorageError):
    """There is no such object."""


class Exists(StorageError):
    """``create`` found the object there already."""


class Conflict(StorageError):
    """``replace`` found another version than the one it was to replace."""


class Unavailable(StorageError):
    """The store did not answer within the retries; not the user's fault, so worth a restart."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=ExitCode.INFRASTRUCTURE)


class Storage(Protocol):
    """Objects under one root. Paths are relative, with ``/``; every write is whole or not there.

    All methods raise StorageError subclasses only.
    """

    @property
    def url(self) -> str:
        """Absolute local path or ``gs://bucket/prefix``; ``open_storage`` accepts it anywhere."""

    def child(self, path: str) -> Storage:
        """The same store, rooted at ``path``."""

    def exists(self, path: str) -> bool:
        """Whether there is such an object; one small request."""

    def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """The whole object; a larger one is refused."""

    def read_versioned(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> tuple[bytes, Version]:
        """The whole object and the version it had."""

    def create(self, path: str, data: bytes) -> Version:
        """Writes a new object; of any number of racing writers exactly one returns, others get Exists."""

    def replace(self, path: str, data: bytes, *, if_version: Version | None = None) -> Version:
        """Writes over whatever is there or, given a version, only over that one (else Conflict)."""

    def list(self, prefix: str = "") -> Names:
        """Every object below the folder ``prefix``, sorted, as paths that ``read`` takes."""

    def children(self, prefix: str = "") -> Names:
        """Names of objects and folders directly below the folder ``prefix``, sorted."""

    def modified(self, prefix: str) -> Mapping[str, float]:
        """When each object directly below the folder ``prefix`` was last written (Unix time), by name."""

    def marks(self, pattern: str) -> Mapping[str, str]:
        """Objects whose path matches ``pattern``, and for each a mark that changes whenever it is written.

        ``*`` stands for anything but ``/``. One listing, however many objects match.
        """

    def delete(self, path: str) -> None:
        """Removes one object; nothing happens when it is not there."""

    def write_log(self, path: str, offset: int, data: bytes) -> None:
        """Puts ``data`` at byte ``offset`` of a growing log; doing it twice is the same as once."""

    def read_log(self, path: str, offset: int = 0, *, limit_bytes: int | None = None) -> bytes:
        """A log's bytes from ``offset``; empty when there are none (yet)."""

    def read_log_tail(self, path: str, limit_bytes: int) -> tuple[int, bytes]:
        """At most ``limit_bytes`` from a log's end, after the offset where they begin."""

    def prepare_logs(self, paths: Sequence[str]) -> None:
        """Looks where these logs are, all at once, if that makes the next read of each cheaper."""

    def log_size(self, path: str) -> int:
        """Bytes of a log so far; 0 when there is none."""

    def stems(self, prefix: str) -> Names:
        """What names directly below the folder ``prefix`` have before their first dot, each once, sorted.

        Unlike ``children`` it is no slower when the logs there have grown.
        """


def checked_path(path: str) -> str:
    """``path`` if it may name an object below a root.

    Raises:
      StorageError: it is absolute, leaves the root, or holds an empty part or a control character.
    """
    reason = _why_invalid(path)
    if reason:
        raise StorageError(f"path {path!r} {reason}", hint="give a relative path of plain names joined by /")
    return path


def matcher(pattern: str) -> re.Pattern[str]:
    """What ``marks`` takes for a pattern: ``*`` is anything within one part of a path."""
    return re.compile("[^/]*".join(re.escape(part) for part in pattern.split("*")))


def checked_prefix(prefix: str) -> str:
    """Like :func:`checked_path`; empty means the root."""
    return checked_path(prefix) if prefix else prefix


def _why_invalid(path: str) -> str:
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in path) or "\\" in path:
        return "holds a control character or a backslash"
    parts = path.split("/")
    if "" in parts:
        return "holds an empty part (//)"
    if "." in parts or ".." in parts:
        return "holds . or .."
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    return ""


def denied(action: str, where: str, detail: str, hint: str) -> StorageError:
    """The error of every refused access."""
    return StorageError(f"no permission to {action} {where}: {detail}", hint=hint)
