"""The local back end: one agent process a host, all on this machine, on CPU devices.

The agents, the environment and the ways to die are those of a pod or a TPU VM, so a local run rehearses
a real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from launcher.exits import AttemptOutcome, HostEnd, attempt_outcome, describe_status, host_end, shell_status
from launcher.ledger import HostRecord
from launcher.orphans import end_orphans
from launcher.rundir import RunDir
from launcher.shipping import output_cargo, profile_cargo
from launcher.storage import StorageError
from recipes.contract import ExitCode, HostContext, cache_dir, host_names
from recipes.errors import UserError

ADDRESS = "127.0.0.1"
STRIPPED = ("MUSTER_", "MEGASCALE_", "TPU_", "CLOUD_TPU_", "JAX_COORDINATOR", "JAX_PLATFORM", "JAX_NUM_CPU")
"""Inherited variables that would say something else than this attempt's own."""

SETTLE_S = 1.5
"""After one host failed, how long the others may take to end by themselves and tell why."""
SETTLE_CLEAN_S = 8.0
"""The same after a clean stop: the others are saving the same step."""
LAST_WORDS_S = 3.0
"""How long hosts without a peer may take after SIGTERM: they can save nothing any more."""
OVERRUN_S = 5.0
"""How long an agent may outlive its grace period before it is killed itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShape:
    """How many processes, and what each has."""

    num_slices: int
    hosts_per_slice: int
    devices_per_host: int
    grace_period_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    """The recipe's own variables."""

    @property
    def hosts(self) -> Sequence[str]:
        """Names of all hosts, in the order of their ranks."""
        return host_names(self.num_slices, self.hosts_per_slice)


def agent_env(inherited: Mapping[str, str], context: HostContext, devices_per_host: int) -> dict[str, str]:
    """The environment of one agent: what was inherited, without what belongs to other jobs, and its own."""
    env = {name: value for name, value in inherited.items() if not name.startswith(STRIPPED)}
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", env.pop("XLA_FLAGS", "")).strip()
    cache = cache_dir(env) / "xla"
    return {
        **env,
        **({"XLA_FLAGS": flags} if flags else {}),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_per_host),
        "JAX_COORDINATOR_BIND_ADDRESS": context.coordinator,
        "JAX_COMPILATION_CACHE_DIR": env.get("JAX_COMPILATION_CACHE_DIR") or str(cache),
        "PYTHONUNBUFFERED": "1",
        **context.to_env(),
    }


def _make_scratch() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="muster-"))
    except OSError as error:
        raise UserError(
            f"no folder for temporary files: {error}",
            hint="free some space, or name another disk with TMPDIR",
        ) from error


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


class LocalBackend:
    """Starts attempts as processes of this machine."""

    def __init__(
        self, run: RunDir, shape: LocalShape, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._run, self._shape, self._environ, self._say = run, shape, environ, say

    def begin(self, attempt: int) -> LocalAttempt:
        """Ends what earlier attempts left running here, then starts this one."""
        end_orphans(self._run, grace_period_s=self._shape.grace_period_s + OVERRUN_S, say=self._say)
        return LocalAttempt(self._run, attempt, self._shape, self._environ, self._say)


@dataclass(slots=True)
class _Host:
    context: HostContext
    process: subprocess.Popen[bytes]
    words: IO[bytes]
    """What the agent itself wrote to stderr."""
    stopped: bool = False
    """We sent SIGTERM because another host had ended."""
    end: HostEnd | None = field(default=None)


class LocalAttempt:
    """The agents of one attempt."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        shape: LocalShape,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._attempt, self._shape, self._monotonic = run, attempt, shape, monotonic
        self._say, self._scratch = say, _make_scratch()
        self._asked = False
        """The launcher asked for the stop, so no host's end is another's fault."""
        self._first_end_s: float | None = None
        self._first_code = 0
        self._kill_s: float | None = None
        coordinator = f"{ADDRESS}:{free_port()}"
        self._hosts = [
            self._start(environ, coordinator, slice_id, host_id)
            for slice_id in range(shape.num_slices)
            for host_id in range(shape.hosts_per_slice)
        ]

    def poll(self) -> AttemptOutcome | None:
        """See :class:`launcher.backends.Attempt`."""
        for host in self._hosts:
            if host.end is None and host.process.poll() is not None:
                self._take_end(host)
        running = [host for host in self._hosts if host.end is None]
        if running:
            self._press(running)
            return None
        if any(Path(host.context.scratch_dir).exists() for host in self._hosts):
            self._say(f"not all output could be brought to {self._run.url}; it is in {self._scratch}")
        else:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return attempt_outcome([host.end for host in self._hosts if host.end is not None])

    def stop(self) -> None:
        self._asked = True
        self._kill_s = self._monotonic() + self._shape.grace_period_s + OVERRUN_S
        self._signal(signal.SIGTERM)

    def hurry(self) -> None:
        self._asked = True
        self._kill_s = self._monotonic() + OVERRUN_S
        self._signal(signal.SIGQUIT)

    def _start(self, environ: Mapping[str, str], coordinator: str, slice_id: int, host_id: int) -> _Host:
        context = HostContext(
            run_dir=self._run.url,
            attempt=self._attempt,
            slice_id=slice_id,
            num_slices=self._shape.num_slices,
            host_id=host_id,
            hosts_per_slice=self._shape.hosts_per_slice,
            coordinator=coordinator,
            grace_period_s=self._shape.grace_period_s,
            scratch_dir=str(self._scratch / f"s{slice_id}-h{host_id}"),
        )
        words = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the agent has ended
        # A session of its own: Ctrl-C in the terminal reaches the launcher only, which stops all hosts.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.agent", "--parent", str(os.getpid())],
            env=agent_env({**environ, **self._shape.env}, context, self._shape.devices_per_host),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
        )
        return _Host(context=context, process=process, words=words)

    def _press(self, running: Sequence[_Host]) -> None:
        """Ends those that wait for a host that is gone, and agents that overrun their grace."""
        now_s = self._monotonic()
        if self._kill_s is not None and now_s > self._kill_s:
            for host in running:
                host.process.kill()
        if self._first_end_s is None or self._asked:
            return
        clean = self._first_code == ExitCode.PREEMPTED
        settled_s = self._first_end_s + (SETTLE_CLEAN_S if clean else SETTLE_S)
        if now_s <= settled_s:
            return
        for host in running:
            if not host.stopped:
                host.stopped = True
                host.process.send_signal(signal.SIGTERM)
        if not clean and now_s > settled_s + LAST_WORDS_S:
            for host in running:
                host.process.send_signal(signal.SIGQUIT)
        last_s = self._shape.grace_period_s if clean else LAST_WORDS_S
        self._kill_s = self._kill_s or settled_s + last_s + OVERRUN_S

    def _signal(self, number: signal.Signals) -> None:
        for host in self._hosts:
            if host.end is None:
                host.process.send_signal(number)

    def _take_end(self, host: _Host) -> None:
        record = self._record(host)
        host.end = self._host_end(host, record)
        host.words.close()
        self._rescue(host)
        if host.end.exit_code != ExitCode.COMPLETE and self._first_end_s is None:
            self._first_end_s, self._first_code = self._monotonic(), host.end.exit_code

    def _host_end(self, host: _Host, record: HostRecord | None) -> HostEnd:
        code = host.process.returncode
        name = host.context.host_name
        if record is None or record.end_s is None:
            code = ExitCode.PREEMPTED if self._asked else code
            reason = f"the agent ended with {describe_status(shell_status(code))}" + self._words(host)
            return HostEnd(
                host=name, exit_code=code, reason=reason, time_s=time.time(), collateral=host.stopped
            )
        return dataclasses.replace(
            host_end(record, record.end_s),
            exit_code=code,
            collateral=record.collateral or host.stopped,
            last_report_s=self._last_report_s(name),
        )

    def _record(self, host: _Host) -> HostRecord | None:
        with contextlib.suppress(StorageError):
            records = self._run.hosts(self._attempt)
            return next((record for record in records if record.host == host.context.host_name), None)
        return None

    def _last_report_s(self, name: str) -> float:
        with contextlib.suppress(StorageError):
            beats = [
                beat for beat in self._run.heartbeats() if beat.host == name and beat.attempt == self._attempt
            ]
            return beats[0].progress.time_s if beats else 0.0
        return 0.0

    def _words(self, host: _Host) -> str:
        host.words.seek(0)
        lines = host.words.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""

    def _rescue(self, host: _Host) -> None:
        """Brings the output of an agent that could not do it itself."""
        scratch, run = Path(host.context.scratch_dir), self._run
        if not scratch.exists():
            return
        with contextlib.suppress(StorageError, OSError):
            shipped_bytes = run.storage.log_size(run.log_path(self._attempt, host.context.host_name))
            output = output_cargo(host.context, run, shipped_bytes=shipped_bytes)
            for cargo in (*output, profile_cargo(host.context, run)):
                cargo.ship(final=True)
            shutil.rmtree(scratch)
