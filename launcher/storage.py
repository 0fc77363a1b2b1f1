"""Where runs live: one interface over a local folder and a GCS bucket.

``open_storage("runs")`` and ``open_storage("gs://bucket/prefix")`` give the same operations: read,
list, create-if-absent and replace-if-version, which is all that the run directory needs to be the
only state. The cloud library is imported on the first gs:// address, never before.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from launcher.storage_types import (
    Conflict,
    Exists,
    NotFound,
    Storage,
    StorageError,
    Unavailable,
    Version,
    checked_path,
    checked_prefix,
)

__all__ = [
    "Conflict",
    "Exists",
    "NotFound",
    "Storage",
    "StorageError",
    "Unavailable",
    "Version",
    "checked_path",
    "is_remote",
    "open_storage",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


def is_remote(url: str) -> bool:
    """Whether ``url`` is a bucket address and not a local path."""
    return _SCHEME.match(url) is not None


def open_storage(url: str) -> Storage:
    """The store at a local path or ``gs://bucket/prefix``. Nothing is touched until it is used.

    Raises:
      StorageError: the address is malformed or of an unknown kind.
    """
    if not url or "\0" in url:
        raise StorageError(
            "the storage address is empty or holds a NUL byte", hint="give a path or gs://bucket/prefix"
        )
    scheme = _SCHEME.match(url)
    if scheme is None:
        from launcher.storage_local import LocalStorage

        return LocalStorage(Path(os.path.abspath(os.path.expanduser(url))))
    if scheme[1] != "gs":
        raise StorageError(
            f"{scheme[1]}:// addresses are not supported: {url}",
            hint="give a local path or gs://bucket/prefix",
        )
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    if _BUCKET.fullmatch(bucket) is None:
        raise StorageError(f"{bucket!r} in {url} is not a bucket name", hint="give gs://bucket/prefix")
    from launcher.storage_gcs import GcsStorage

    return GcsStorage(bucket, checked_prefix(prefix.rstrip("/")))
