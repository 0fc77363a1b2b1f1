"""Processes of this machine: start, identify, signal and end them. POSIX; Linux where /proc helps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """One process, told from a later one that got the same number."""

    pid: int
    started: str
    """Boot, process-id namespace and start time in ticks (Linux); empty when unknown."""

    @property
    def machine(self) -> str:
        """Boot and process-id namespace: only within the same one does the number say anything."""
        return self.started.rpartition("/")[0]


def process_id(pid: int) -> ProcessId | None:
    """The process that has this number now, or None. A zombie counts as ended."""
    if sys.platform != "linux":
        return ProcessId(pid=pid, started="") if _exists(pid) else None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    # The command's name is in parentheses and may hold anything, so fields count from the last one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid=pid, started=f"{boot}/{namespace}/{fields[19]}")


def is_running(process: ProcessId) -> bool:
    """Whether this very process, not another with its number, still runs."""
    return process_id(process.pid) == process


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def spawn_leashed(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] | None = subprocess.STDOUT,
) -> subprocess.Popen[bytes]:
    """Starts ``argv`` in its own process group, all output on one pipe unless it is told another place.

    Linux kills it when its parent dies. To be called from the main thread before there are others: the
    leash is held by the thread that forks.
    """
    libc, parent = _libc(), os.getpid()

    def leash() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
        preexec_fn=leash,
    )


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, as PID 1 is (Linux)."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def reap(process: subprocess.Popen[bytes]) -> int | None:
    """Reaps every ended child; returns the return code of ``process`` once it has ended."""
    while process.returncode is None:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode


def signal_process(pid: int, number: signal.Signals) -> None:
    """Signals one process; it may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(group: int) -> None:
    """SIGKILL to a process group; it may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def wait_until_gone(
    processes: Sequence[ProcessId],
    timeout_s: float,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[ProcessId]:
    """Waits for processes that need not be children; returns those still running after ``timeout_s``."""
    deadline_s = monotonic() + timeout_s
    while True:
        left = [process for process in processes if is_running(process)]
        if not left or monotonic() >= deadline_s:
            return left
        sleep(POLL_S)


def drain(pipe: IO[bytes], take: Callable[[bytes], None]) -> None:
    """Hands every chunk of ``pipe`` to ``take`` until it closes."""
    while chunk := os.read(pipe.fileno(), 1 << 16):
        take(chunk)
