"""Carries one host's log, progress and metrics from its scratch directory to the run directory.

Runs in a thread of its own and never stops the training: what the store refuses is said once and tried again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from launcher.rundir import RunDir
from launcher.storage import Storage, StorageError, is_remote
from recipes.contract import METRICS_DIR, PROFILES_DIR, HostContext, RunPath

LOCAL_PERIOD_S = 1.0
REMOTE_PERIOD_S = 2.0
"""Of heartbeats; a bucket takes one change of an object a second."""
REMOTE_LOG_PERIOD_S = 10.0
"""Each shipment is an object of its own."""
REMOTE_HOSTS_PER_S = 100
"""All hosts of a run write to one prefix of a bucket, and each log is a listing's length."""
REMOTE_METRICS_PERIOD_S = 30.0
LOG_FILE = "trainer.log"
"""In the scratch directory: all output of the trainer, and what its agent has to say."""

CHUNK_BYTES = 4 * 2**20
RETRY_S = 0.5


def period_s(url: str, num_hosts: int) -> float:
    """Seconds between two shipments of one of so many hosts to a run directory."""
    if not is_remote(url):
        return LOCAL_PERIOD_S
    return max(REMOTE_PERIOD_S, num_hosts / REMOTE_HOSTS_PER_S)


class Cargo(Protocol):
    """One thing that is brought to the store again and again."""

    def ship(self, *, final: bool) -> None:
        """Brings what is new; raises StorageError or OSError, after which it can be called again."""


class LogCargo:
    """A growing file, as a log of the store."""

    def __init__(self, source: Path, store: Storage, path: str, *, shipped_bytes: int = 0) -> None:
        self._source, self._store, self._path = source, store, path
        self._shipped_bytes = shipped_bytes

    def ship(self, *, final: bool) -> None:
        with self._source.open("rb") as file:
            file.seek(self._shipped_bytes)
            while data := file.read(CHUNK_BYTES):
                self._store.write_log(self._path, self._shipped_bytes, data)
                self._shipped_bytes += len(data)


class LatestCargo:
    """A small object that is replaced whenever it changes."""

    def __init__(self, body: Callable[[], bytes | None], store: Storage, path: str) -> None:
        self._body, self._store, self._path = body, store, path
        self._shipped: bytes | None = None

    def ship(self, *, final: bool) -> None:
        body = self._body()
        if body is not None and body != self._shipped:
            self._store.replace(self._path, body)
            self._shipped = body


class FolderCargo:
    """Every file below a folder, under the same names; the trainer puts the attempt into them."""

    def __init__(self, folder: Path, store: Storage, prefix: str) -> None:
        self._folder, self._store, self._prefix = folder, store, prefix
        self._files: dict[Path, Cargo] = {}

    def ship(self, *, final: bool) -> None:
        for source in sorted(self._folder.rglob("*")):
            if source.is_file() and not source.name.startswith("."):
                if source not in self._files:
                    self._files[source] = self._cargo(source)
                self._files[source].ship(final=final)

    def _cargo(self, source: Path) -> Cargo:
        path = f"{self._prefix}/{source.relative_to(self._folder).as_posix()}"
        if is_remote(self._store.url):
            # Readers of metrics want whole objects, not the parts that a log has in a bucket.
            return Seldom(LatestCargo(source.read_bytes, self._store, path), REMOTE_METRICS_PERIOD_S)
        return LogCargo(source, self._store, path)


class OnceCargo:
    """Files below a folder that are complete once they are there: brought, then removed here.

    What is below a hidden name is still being written.
    """

    def __init__(self, folder: Path, store: Storage, prefix: str) -> None:
        self._folder, self._store, self._prefix = folder, store, prefix

    def ship(self, *, final: bool) -> None:
        for parent, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for source in (Path(parent, name) for name in files if not name.startswith(".")):
                path = f"{self._prefix}/{source.relative_to(self._folder).as_posix()}"
                self._store.replace(path, source.read_bytes())
                source.unlink()


class Seldom:
    """Cargo that is brought at most once in ``period_s``, and always at the end."""

    def __init__(
        self, cargo: Cargo, period_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._cargo, self._period_s, self._monotonic = cargo, period_s, monotonic
        self._next_s = monotonic()

    def ship(self, *, final: bool) -> None:
        if final or self._monotonic() >= self._next_s:
            self._next_s = self._monotonic() + self._period_s
            self._cargo.ship(final=final)


def output_cargo(context: HostContext, run: RunDir, *, shipped_bytes: int = 0) -> Sequence[Cargo]:
    """Log (of which ``shipped_bytes`` are there already) and, from process 0, metrics of one host."""
    scratch, path = Path(context.scratch_dir), run.log_path(context.attempt, context.host_name)
    log: Cargo = LogCargo(scratch / LOG_FILE, run.storage, path, shipped_bytes=shipped_bytes)
    if is_remote(run.url):
        log = Seldom(log, REMOTE_LOG_PERIOD_S)
    if context.process_id:
        return [log]
    return [log, FolderCargo(scratch / METRICS_DIR, run.storage, RunPath.METRICS)]


def profile_cargo(context: HostContext, run: RunDir) -> Cargo:
    """Profiler traces of one host. They may be large."""
    return OnceCargo(Path(context.scratch_dir) / PROFILES_DIR, run.storage, RunPath.PROFILES)


class Shipper:
    """Ships all cargo periodically in a thread; ``finish`` ships what is left."""

    def __init__(self, cargo: Sequence[Cargo], *, period_s: float, say: Callable[[str], None]) -> None:
        self._cargo, self._period_s, self._say = cargo, period_s, say
        self._wake = threading.Event()
        self._deadline_s: float | None = None
        self._failing = ""
        self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)
        self.delivered = False

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Ships everything once more, trying again until ``timeout_s``; whether all of it arrived."""
        self._deadline_s = time.monotonic() + timeout_s
        self._wake.set()
        self._thread.join(timeout_s)
        return self.delivered

    def _run(self) -> None:
        while not self._wake.wait(self._period_s):
            self._ship_all(final=False)
        while True:
            self.delivered = self._ship_all(final=True)
            if self.delivered or self._deadline_s is None or time.monotonic() + RETRY_S >= self._deadline_s:
                return
            time.sleep(RETRY_S)

    def _ship_all(self, *, final: bool) -> bool:
        errors = [error for cargo in self._cargo if (error := _try(cargo, final))]
        if bool(errors) != bool(self._failing):
            self._say(f"storage: {errors[0]}; trying again" if errors else "storage: works again")
        self._failing = errors[0] if errors else ""
        return not errors


def _try(cargo: Cargo, final: bool) -> str:
    """Ships; what went wrong, or an empty text. A client library's surprise must not end the thread."""
    try:
        cargo.ship(final=final)
    except (StorageError, OSError) as error:
        return str(error) or type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
