"""Storage in a GCS bucket, by the official client; all writes carry generation preconditions where asked.

Logs are numbered parts, ``<path>.<offset of its first byte>``, because objects cannot grow. The
client library is imported inside functions only: opening a local run must not pay for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher import waiting
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
from recipes.contract import ExitCode

CALL_TIMEOUT_S = (10.0, 60.0)
"""To connect, and between bytes."""
SLOWEST_UPLOAD_BYTES_PER_S = 2**17
RETRY_TIMEOUT_S = 60.0
DOWNLOADS = 3
"""How often an object is fetched whose bytes do not fit its checksum."""
Blobs = list[Any]
Part = tuple[int, int, Any]
"""Of a log: offset, size, and the object."""
Parts = list[Part]
PARTS_AHEAD = 10
"""A list of this many parts a log costs about as much as one request for each log."""
CONNECTIONS = 32
"""Fetches at once; those who wait for them may be as many again with requests of their own."""
_WRITE_ID = "muster-write-id"
_OFFSET_DIGITS = 15


class GcsStorage:
    """Objects are those of ``gs://bucket/prefix/``."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket_name = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._known_parts: dict[str, Parts] = {}
        """Of logs that ``prepare_logs`` found and nobody has read since."""

    @property
    def url(self) -> str:
        return f"gs://{self._bucket_name}/{self._prefix}".rstrip("/")

    def child(self, path: str) -> Storage:
        return GcsStorage(self._bucket_name, self._prefix + checked_path(path))

    def exists(self, path: str) -> bool:
        blob = self._blob(checked_path(path))
        with self._explained("read", path):
            return bool(blob.exists(timeout=CALL_TIMEOUT_S, retry=_retry()))

    def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        return self.read_versioned(path, limit_bytes=limit_bytes)[0]

    def read_versioned(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> tuple[bytes, Version]:
        blob = self._blob(checked_path(path))
        with self._explained("read", path):
            # One whole download: its checksum is verified, and its header gives the generation it had.
            data = _downloaded(blob)
        if len(data) > limit_bytes:
            raise StorageError(
                f"{self._where(path)} is larger than {limit_bytes} bytes",
                hint="it is damaged or was not written by Muster",
            )
        return data, Version(str(blob.generation))

    def create(self, path: str, data: bytes) -> Version:
        try:
            return self._write(checked_path(path), data, 0)
        except Conflict as error:
            raise Exists(f"{self._where(path)} exists already") from error

    def replace(self, path: str, data: bytes, *, if_version: Version | None = None) -> Version:
        return self._write(checked_path(path), data, None if if_version is None else int(if_version))

    def list(self, prefix: str = "") -> Names:
        return [blob.name.removeprefix(self._prefix) for blob in self._blobs(_folder(prefix), prefix)]

    def children(self, prefix: str = "") -> Names:
        objects, folders = self._listed(_folder(prefix), "/")
        return sorted({*objects, *(name.rstrip("/") for name in folders)})

    def modified(self, prefix: str) -> Mapping[str, float]:
        folder = self._prefix + _folder(prefix)
        with self._explained("list", prefix):
            listing = _client().list_blobs(
                self._bucket_name,
                prefix=folder,
                delimiter="/",
                # Without the rest of its metadata a page of a thousand is a fifth as large.
                fields="items(name,updated),nextPageToken",
                timeout=CALL_TIMEOUT_S,
                retry=_retry(),
            )
            return {blob.name.removeprefix(folder): blob.updated.timestamp() for blob in listing}

    def marks(self, pattern: str) -> Mapping[str, str]:
        before = pattern.partition("*")[0]
        matches = matcher(pattern)
        with self._explained("list", pattern):
            listing = _client().list_blobs(
                self._bucket_name,
                prefix=self._prefix + before[: before.rfind("/") + 1],
                # Characters that mean something in a glob; they are compared again here.
                match_glob=re.sub(r"[\[\]{}?\\]", "?", self._prefix + pattern),
                fields="items(name,generation),nextPageToken",
                timeout=CALL_TIMEOUT_S,
                retry=_retry(),
            )
            found = {blob.name.removeprefix(self._prefix): str(blob.generation) for blob in listing}
        return {path: mark for path, mark in found.items() if matches.fullmatch(path)}

    def delete(self, path: str) -> None:
        with contextlib.suppress(NotFound), self._explained("delete", path):
            self._blob(checked_path(path)).delete(timeout=CALL_TIMEOUT_S, retry=_retry())

    def write_log(self, path: str, offset: int, data: bytes) -> None:
        if data:
            self._write(checked_path(f"{path}.{offset:0{_OFFSET_DIGITS}d}"), data, None)

    def read_log(self, path: str, offset: int = 0, *, limit_bytes: int | None = None) -> bytes:
        return self._download(self._parts(path), offset, limit_bytes)

    def read_log_tail(self, path: str, limit_bytes: int) -> tuple[int, bytes]:
        parts = self._parts(path)
        start = max(0, _end(parts) - limit_bytes)
        return start, self._download(parts, start, limit_bytes)

    def prepare_logs(self, paths: Sequence[str]) -> None:
        if len(paths) > 1:
            limit = PARTS_AHEAD * len(paths)
            # By characters, not folders: the logs of one slice begin alike.
            start = os.path.commonprefix([*paths])  # noqa: RUF071
            blobs = self._blobs(start, start, limit)
            found: dict[str, Parts] = {}
            for blob in blobs:
                path, _, suffix = blob.name.removeprefix(self._prefix).rpartition(".")
                if suffix.isdigit():
                    found.setdefault(path, []).append((int(suffix), int(blob.size or 0), blob))
            if len(blobs) == limit and found:
                # Listed by name, so only the last log may have more parts.
                found.popitem()
            self._known_parts = found

    def log_size(self, path: str) -> int:
        return _end(self._parts(path))

    def stems(self, prefix: str) -> Names:
        # The service folds all parts of a log into one answer.
        found = self._listed(_folder(prefix), ".")[1]
        return [name.removesuffix(".") for name in found if "/" not in name]

    def _download(self, parts: Parts, offset: int, limit_bytes: int | None) -> bytes:
        """A log's bytes from ``offset``; its parts are fetched side by side, because most are small."""
        end = _end(parts) if limit_bytes is None else offset + limit_bytes
        wanted = [part for part in parts if part[0] < end and part[0] + part[1] > offset]

        def fetch(part: Part) -> bytes:
            start, size, blob = part
            skip = max(0, offset - start)
            with self._explained("read", blob.name.removeprefix(self._prefix)):
                return _downloaded(
                    blob, start=skip or None, end=end - start - 1 if end < start + size else None
                )

        fetched = map(fetch, wanted) if len(wanted) == 1 else _fetchers().map(fetch, wanted)
        return b"".join(fetched)[:limit_bytes]

    def _parts(self, path: str) -> Parts:
        known = self._known_parts.pop(path, None)
        if known is not None:
            return sorted(known, key=_offset)
        blobs = self._blobs(f"{checked_path(path)}.", path)
        suffixes = ((blob, blob.name.removeprefix(f"{self._prefix}{path}.")) for blob in blobs)
        parts = [(int(suffix), int(blob.size or 0), blob) for blob, suffix in suffixes if suffix.isdigit()]
        return sorted(parts, key=_offset)

    def _blobs(self, start: str, path: str, limit: int | None = None) -> Blobs:
        with self._explained("list", path):
            listing = _client().list_blobs(
                self._bucket_name,
                prefix=self._prefix + start,
                max_results=limit,
                # No generation either: a part that was replaced by a longer one since is read as it is.
                fields="items(name,size),nextPageToken",
                timeout=CALL_TIMEOUT_S,
                retry=_retry(),
            )
            return [*listing]

    def _listed(self, folder: str, delimiter: str) -> tuple[Names, Names]:
        """Names below ``folder``: without the delimiter, and what others have up to and with it."""
        prefix = self._prefix + folder
        with self._explained("list", folder.rstrip("/")):
            listing = _client().list_blobs(
                self._bucket_name, prefix=prefix, delimiter=delimiter, timeout=CALL_TIMEOUT_S, retry=_retry()
            )
            # The second is complete once the first has been gone through.
            names = [blob.name.removeprefix(prefix) for blob in listing]
            return names, sorted(name.removeprefix(prefix) for name in listing.prefixes)

    def _write(self, path: str, data: bytes, if_generation: int | None) -> Version:
        """Uploads in one request.

        A retried request may find its own first try done; the write id tells that from a lost race.
        """
        blob = self._blob(path)
        write_id = secrets.token_hex(8)
        connect_s, answer_s = CALL_TIMEOUT_S
        # urllib3 also lets sending the whole body take as long as connecting may, and no longer.
        send_s = connect_s + len(data) / SLOWEST_UPLOAD_BYTES_PER_S
        blob.metadata = {_WRITE_ID: write_id}
        try:
            with self._explained("write", path):
                blob.upload_from_string(
                    data,
                    content_type=_content_type(path),
                    if_generation_match=if_generation,
                    timeout=(send_s, answer_s),
                    retry=_retry(),
                )
        except Conflict:
            with contextlib.suppress(NotFound), self._explained("read", path):
                blob.reload(timeout=CALL_TIMEOUT_S, retry=_retry())
                if (blob.metadata or {}).get(_WRITE_ID) == write_id:
                    return Version(str(blob.generation))
            raise
        return Version(str(blob.generation))

    def _blob(self, path: str) -> Any:
        return _client().bucket(self._bucket_name).blob(self._prefix + path)

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    @contextlib.contextmanager
    def _explained(self, action: str, path: str) -> Iterator[None]:
        """Turns what the service says into an error with a hint."""
        from google.api_core import exceptions as api
        from google.auth import exceptions as auth
        from google.cloud.storage.exceptions import DataCorruption

        where = self._where(path)
        try:
            with waiting.named(f"gs://{self._bucket_name}"):
                yield
        except api.NotFound as error:
            if action in ("list", "write") or "bucket does not exist" in str(error).lower():
                raise StorageError(
                    f"bucket {self._bucket_name} does not exist",
                    hint=f"run `gcloud storage buckets create gs://{self._bucket_name}`, or correct run.root",
                ) from error
            raise NotFound(f"{where} does not exist") from error
        except api.PreconditionFailed as error:
            raise Conflict(f"{where} was changed by another process") from error
        except (api.Forbidden, api.Unauthorized, auth.RefreshError) as error:
            hint = f"this identity needs roles/storage.objectUser on gs://{self._bucket_name}"
            raise denied(action, where, _first_line(error), hint) from error
        except DataCorruption as error:
            raise StorageError(
                f"{where} is damaged or changed on the way: its bytes do not fit its checksum",
                hint="look at proxies on the way to the bucket, and try again",
                exit_code=ExitCode.INFRASTRUCTURE,
            ) from error
        except (api.GoogleAPIError, auth.GoogleAuthError, OSError) as error:
            raise Unavailable(
                f"cannot {action} {where}: {_first_line(error)}",
                hint="the storage service did not answer; look at the network, then start again",
            ) from error

    def location(self) -> tuple[str, Names]:
        """Where the bucket is, for example ``US-EAST5``; and the regions of a configurable dual-region."""
        with self._explained("read the location of", ""):
            bucket = _client().get_bucket(self._bucket_name, timeout=CALL_TIMEOUT_S, retry=_retry())
            return str(bucket.location or ""), [*(bucket.data_locations or ())]


def _downloaded(blob: Any, **part: int | None) -> bytes:
    """An object's bytes; tried again from the start when they do not fit their checksum."""
    from google.cloud.storage.exceptions import DataCorruption

    for tries_left in reversed(range(DOWNLOADS)):
        try:
            data: bytes = blob.download_as_bytes(**part, timeout=CALL_TIMEOUT_S, retry=_retry())
            return data
        except DataCorruption:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _offset(part: Part) -> int:
    return part[0]


def _end(parts: Parts) -> int:
    return max((start + size for start, size, _ in parts), default=0)


def _folder(prefix: str) -> str:
    return f"{checked_prefix(prefix)}/" if prefix else ""


def _content_type(path: str) -> str:
    return "application/json" if path.endswith(".json") else "text/plain; charset=utf-8"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _client() -> Any:
    return _client_of(os.environ.get("STORAGE_EMULATOR_HOST"))


@functools.cache
def _client_of(emulator: str | None) -> Any:
    """One client a process and service: it keeps connections and is safe to share between threads.

    Args:
      emulator: where the client library will look for a stand-in; it reads the same variable.
    """
    import google.cloud.storage as storage
    from google.auth.exceptions import DefaultCredentialsError

    # Else the client asks, for traces, for the bucket itself: a permission that a run need not have.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    try:
        client = storage.Client(project=None)
        # The library's default holds 10 connections and warns about each further one.
        for scheme in ("https://", "http://"):
            client._http.get_adapter(scheme).init_poolmanager(connections=10, maxsize=2 * CONNECTIONS)
        return client
    except DefaultCredentialsError as error:
        raise StorageError(
            "no Google Cloud credentials were found",
            hint="run `gcloud auth application-default login`, or use a local run.root",
        ) from error


@functools.cache
def _fetchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="gcs")


@functools.cache
def _retry() -> Any:
    """The library's own policy (429, 5xx, dropped connections) with an end. 403 and 412 are not retried."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(RETRY_TIMEOUT_S)
