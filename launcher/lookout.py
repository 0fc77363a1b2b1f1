"""Looks at a run directory from a thread of its own, so that a slow store never delays a stop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.ledger import Heartbeat, StopRequest
from launcher.rundir import RunDir
from launcher.storage import StorageError, is_remote

LOCAL_PERIOD_S = 1.0
REMOTE_PERIOD_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the last look showed."""

    stop: StopRequest | None = None
    beats: Sequence[Heartbeat] = ()
    """The newest of every host that ever wrote one (look at its attempt)."""


class Lookout:
    """A context manager: keeps looking inside."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._seen, self._done = run, Seen(), threading.Event()
        self._period_s = REMOTE_PERIOD_S if is_remote(run.url) else LOCAL_PERIOD_S
        self._thread = threading.Thread(target=self._keep_looking, name="lookout", daemon=True)

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not joined: it may be waiting for the store, and changes nothing.
        self._done.set()

    def seen(self) -> Seen:
        """What the looks so far showed."""
        return self._seen

    def look(self) -> None:
        """One look; what cannot be read stays as it was, and the stop never waits for the rest."""
        with contextlib.suppress(StorageError):
            self._seen = replace(self._seen, stop=self._run.stop_request())
        with contextlib.suppress(StorageError):
            self._seen = replace(self._seen, beats=tuple(self._run.heartbeats()))

    def _keep_looking(self) -> None:
        while not self._done.wait(self._period_s):
            self.look()
