"""Processes that end with the one that started them, however it ends (Linux).

Every child and what it starts carries a mark in its environment. A guard process, which holds one end of a
pipe, kills whatever carries the mark once the other end is gone: also after SIGKILL to the test run, also
children that moved to a session of their own. A leash by prctl would hang on the thread that forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

MARK = "CLUSTER_HARNESS"


def marked(mark: str) -> list[int]:
    """Processes that carry ``mark`` or one that begins with it and a slash."""
    found = []
    prefix = f"\0{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                _, found_prefix, rest = (b"\0" + (entry / "environ").read_bytes()).partition(prefix)
                if found_prefix and rest[:1] in (b"", b"\0", b"/"):
                    found.append(int(entry.name))
    return found


def kill_marked(mark: str) -> None:
    """SIGKILL to all that carry ``mark``, until nothing does: some may be forking."""
    while pids := marked(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


class Children:
    """Starts processes that never outlive this one."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={"PATH": os.environ["PATH"]},
        )

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes] | int,
        cwd: Path | None = None,
        mark: str = "",
    ) -> subprocess.Popen[bytes]:
        """Starts ``argv`` in a session of its own, both outputs to ``output``."""
        return subprocess.Popen(
            argv,
            env={**env, MARK: f"{self.mark}/{mark}"},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def pids(self, mark: str) -> list[int]:
        """What was spawned with ``mark``, and all that it started."""
        return marked(f"{self.mark}/{mark}")

    def kill(self, mark: str) -> None:
        """Ends what was spawned with ``mark`` and all that it started."""
        kill_marked(f"{self.mark}/{mark}")

    def close(self) -> None:
        """Ends everything."""
        kill_marked(self.mark)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
