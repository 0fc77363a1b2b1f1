"""Follows a submitted run to its end: what ``muster launch --wait`` shows.

It only looks. The cluster and the bucket may be away for a while; the run does not notice this process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.gke.api_errors import ClusterError, Unreachable
from launcher.gke.client import Cluster
from launcher.gke.look import observe
from launcher.gke.observe import JobState, Observation
from launcher.ledger import AttemptEnd, Heartbeat
from launcher.restarts import Watcher
from launcher.rundir import RunDir
from launcher.storage import StorageError
from recipes.contract import ExitCode, host_name

PERIOD_S = 2.0
BEATS_PERIOD_S = 5.0
ALL_HOSTS = 32
"""With more hosts only process 0 is read for the status line."""
AWAY_S = 900.0
"""How long the cluster may not answer before following ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended that was followed."""

    exit_code: ExitCode
    reason: str
    hint: str = ""


class Follower:
    """Looks every two seconds until the run is over."""

    def __init__(
        self,
        cluster: Cluster,
        run: RunDir,
        name: str,
        watcher: Watcher,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._run, self._name, self._watcher = cluster, run, name, watcher
        self._sleep, self._monotonic = sleep, monotonic
        self._told = ""
        self._away_since_s: float | None = None
        self._beats_s = -BEATS_PERIOD_S
        self._beats: Sequence[Heartbeat] = ()

    def follow(self) -> Ended:
        """Raises ClusterError when the cluster refuses, or is away for long."""
        while True:
            seen = self._observe()
            if seen is not None:
                if seen.state.is_over:
                    return ended(seen, self._last_end())
                self._tell(seen)
            self._sleep(PERIOD_S)

    def _observe(self) -> Observation | None:
        """None while the cluster is away."""
        try:
            seen = observe(self._cluster, self._name)
        except ClusterError as error:
            if not isinstance(error, Unreachable) and error.exit_code != ExitCode.INFRASTRUCTURE:
                raise
            now_s = self._monotonic()
            if self._away_since_s is None:
                self._away_since_s = now_s
                self._watcher.say(f"{error.message}; the run goes on, looking again")
            if now_s - self._away_since_s > AWAY_S:
                raise
            return None
        self._away_since_s = None
        return seen

    def _tell(self, seen: Observation) -> None:
        """News once, and the status line while it runs."""
        line = seen.state.value + (f": {seen.why}" if seen.why else "")
        if line != self._told:
            self._told = line
            self._watcher.say(line)
        if seen.state is not JobState.RUNNING:
            return
        if self._monotonic() - self._beats_s >= BEATS_PERIOD_S:
            self._beats_s = self._monotonic()
            # The bucket may be away: the line then stays as it was.
            with contextlib.suppress(StorageError):
                self._beats = self._read_beats(seen.total)
        attempt = max((beat.attempt for beat in self._beats), default=0)
        self._watcher.show(attempt, [beat for beat in self._beats if beat.attempt == attempt])

    def _read_beats(self, num_hosts: int) -> Sequence[Heartbeat]:
        only = None if num_hosts <= ALL_HOSTS else [host_name(0, 0)]
        return self._run.heartbeats(only=only)

    def _last_end(self) -> AttemptEnd | None:
        with contextlib.suppress(StorageError):
            attempts = self._run.attempts()
            return self._run.attempt_end(attempts[-1]) if attempts else None
        return None


def ended(seen: Observation, end: AttemptEnd | None) -> Ended:
    """From the JobSet and, where that is gone or does not know the cause, the run directory.

    Args:
      seen: a JobSet that is over.
      end: how the newest attempt ended; None when nothing says.
    """
    if seen.state is JobState.COMPLETED or (end is not None and end.exit_code == ExitCode.COMPLETE):
        return Ended(exit_code=ExitCode.COMPLETE, reason="complete")
    if seen.state is JobState.ABSENT:
        return Ended(
            exit_code=ExitCode.PREEMPTED,
            reason="stopped: its JobSet was deleted",
            hint="launch it again to resume",
        )
    hint = end.hint if end else ""
    code = seen.exit_code if seen.exit_code is not None else end.exit_code if end else None
    known = (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT)
    exit_code = ExitCode(code) if code in known else ExitCode.INFRASTRUCTURE
    return Ended(exit_code=exit_code, reason=seen.why, hint=hint)
