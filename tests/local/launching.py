"""Launches quickstart with the stand-in trainer, as a process of its own, and looks at what comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import ledger
from launcher.orphans import HostProcesses
from launcher.processes import is_running
from launcher.rundir import RunDir
from launcher.storage import open_storage

REPO = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
COMMAND = "import sys; from launcher.cli import main; sys.exit(main())"
TIMEOUT_S = 60.0
GRACE_S = 10


class Launch:
    """One ``muster launch quickstart`` with a small run."""

    def __init__(
        self,
        root: Path,
        *,
        script: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.run_path = root / "quickstart"
        self.run = RunDir(open_storage(str(self.run_path)))
        small = {
            "train.num_steps": "60",
            "checkpoint.save_interval_steps": "10",
            "target.grace_period_s": str(GRACE_S),
            "run.peer_timeout_s": "5",
        }
        argv = [sys.executable, "-P", "-c", COMMAND, "launch", "quickstart"]
        named = {override.partition("=")[0] for override in overrides}
        argv += [f"{key}={value}" for key, value in small.items() if key not in named]
        argv += [*overrides, *options]
        self.process = subprocess.Popen(
            argv,
            cwd=REPO,
            env={
                **os.environ,
                "PYTHONPATH": f"{STAND_IN}{os.pathsep}{REPO}",
                "STAND_IN": json.dumps(dict(script or {})),
                **(env or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing survives a test that failed."""
        self.process.kill()
        if self.process.stdout and not self.process.stdout.closed:
            self.process.communicate()
        for process in self.processes():
            for pid in (process.agent.pid, process.trainer.pid if process.trainer else None):
                if pid is not None and is_running(process.agent):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def finish(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once it has ended."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def processes(self, attempt: int | None = None) -> list[HostProcesses]:
        """Agents and trainers of an attempt, the newest by default, in host order."""
        number = attempt or max(self.run.attempts(), default=0)
        folder = self.run_path / "attempts" / f"{number:04d}" / "processes"
        return [
            ledger.decode(path.read_bytes(), HostProcesses, str(path))
            for path in sorted(folder.glob("*.json"))
        ]

    def step(self) -> int:
        """The step that all hosts of the newest attempt have reported, -1 when not all have."""
        newest = max(self.run.attempts(), default=0)
        beats = [beat for beat in self.run.heartbeats() if beat.attempt == newest]
        return min((beat.progress.step for beat in beats), default=-1) if len(beats) == 2 else -1

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what} within {TIMEOUT_S:.0f} s"
            if self.process.poll() is not None:
                raise AssertionError(f"ended before {what}: {self.finish()}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step, f"step {step}")

    def codes(self) -> list[int | None]:
        """Exit codes of all attempts."""
        return [
            end.exit_code if (end := self.run.attempt_end(number)) else None for number in self.run.attempts()
        ]


def trainer_pid(processes: HostProcesses) -> int:
    assert processes.trainer is not None
    return processes.trainer.pid


def none_running(processes: Sequence[HostProcesses]) -> bool:
    ids = [one for each in processes for one in (each.agent, each.trainer) if one is not None]
    return not any(map(is_running, ids))
