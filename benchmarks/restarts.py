"""What a start, a kill, a stop and a resume of quickstart cost: ``muster launch`` itself, on a stopwatch.

Two processes of four CPU devices each, as quickstart has them. The end of a step is when the trainer
read its metrics, which is up to two steps after the devices finished it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.figures import Figure, summary
from benchmarks.machine import MUSTER, REPO, environment, run_module
from launcher import ledger
from launcher.compose import compose
from launcher.orphans import HostProcesses
from launcher.rundir import RunDir, committed_step
from launcher.storage import open_storage
from recipes.contract import ExitCode, RunPath, attempt_path
from recipes.load import recipe_to_dict

SAVE_INTERVAL_STEPS = 20
OVERRIDES = (
    "train.num_steps=1000000",
    "train.eval_num_batches=0",
    f"checkpoint.save_interval_steps={SAVE_INTERVAL_STEPS}",
    "run.max_restarts=100",
)
"""Changes to quickstart: it goes on until it is stopped, and nothing but steps and saves is measured."""

PATIENCE_S = 300.0
POLL_S = 0.02


def restarts(*, num_rounds: int, work: Path) -> Sequence[Figure]:
    """Start, kill, stop and resume; one cold start, everything else ``num_rounds`` times."""
    cache = work / "launch-cache"
    cold_s, kills = _cold_start_and_kills(work / "cold", cache, num_rounds)
    warm_s, stop_s, resume_s = [], [], []
    for number in range(num_rounds):
        root = work / f"warm-{number}"
        with _launched(root, cache) as launch:
            warm_s.append(launch.first_step_s(attempt=1) - launch.started_s)
            launch.wait_for_commit()
            stop_s.append(launch.stop())
        with _launched(root, cache) as launch:
            resume_s.append(launch.first_step_s(attempt=2) - launch.started_s)
    first = "launch to the first step"
    return [
        summary(f"{first}, nothing cached", "s", [cold_s], note="data tables and compiled programs made"),
        summary(f"{first}, cached", "s", warm_s),
        summary("SIGKILL of one trainer to the next step", "s", [kill.next_step_s for kill in kills]),
        summary("of it until the new trainers start", "s", [kill.launcher_s for kill in kills]),
        summary("clean stop, checkpoint included", "s", stop_s),
        summary("resume: launch of the stopped run to its next step", "s", resume_s),
    ]


def saves(work: Path) -> Sequence[Figure]:
    """Save and restore of quickstart's state, in one process."""
    path = work / "saves.yaml"
    changes = ("multislice=one-slice", "hardware.topology=1x8", "checkpoint.save_interval_steps=1")
    path.write_text(yaml.safe_dump(recipe_to_dict(compose("quickstart", changes).recipe)))
    env = environment(work / "cache")
    times = json.loads(run_module(["benchmarks.saves", str(path), str(work / "saves")], env))
    size = f"{times['size_bytes'] / 1e6:.1f} MB of state"
    return [
        summary("save: the loop is held up", "s", times["held_s"], note=size),
        summary("save: until its commit is seen", "s", times["committed_s"], note=size),
        summary("restore and check", "s", times["restored_s"], note=f"{size}, files in memory"),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One trainer killed, and what followed."""

    next_step_s: float
    launcher_s: float
    """Until the last of the new trainers was started."""


def _cold_start_and_kills(root: Path, cache: Path, num_kills: int) -> tuple[float, Sequence[Kill]]:
    with _launched(root, cache) as launch:
        cold_s = launch.first_step_s(attempt=1) - launch.started_s
        return cold_s, [_kill(launch, attempt) for attempt in range(1, num_kills + 1)]


def _kill(launch: Launch, attempt: int) -> Kill:
    """Kills the trainer of the last host just after a commit of this attempt."""
    launch.wait_for_commit()
    os.kill(launch.trainer_pid(attempt), signal.SIGKILL)
    killed_s = time.time()
    next_step_s = launch.first_step_s(attempt + 1) - killed_s
    started_s = max(host.start_s for host in launch.run.hosts(attempt + 1))
    return Kill(next_step_s=next_step_s, launcher_s=started_s - killed_s)


class Launch:
    """One ``muster launch`` under way."""

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self.path = root / "quickstart"
        self.run = RunDir(open_storage(str(self.path)))
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the launch
        self.started_s = time.time()
        self.process = subprocess.Popen(
            [*MUSTER, "launch", "quickstart", f"run.root={root}", *OVERRIDES],
            cwd=REPO,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._talk,
        )

    def first_step_s(self, attempt: int) -> float:
        """When the first step of an attempt ended, in Unix time."""
        path = self.path / RunPath.METRICS / f"{attempt:04d}.jsonl"
        self._wait_for(lambda: path.exists() and b"\n" in path.read_bytes(), f"step of attempt {attempt}")
        return float(json.loads(path.read_text().partition("\n")[0])["time_s"])

    def wait_for_commit(self) -> None:
        """Until a checkpoint is committed that is not yet."""
        before = committed_step(self.run.storage)
        self._wait_for(lambda: committed_step(self.run.storage) > before, "commit")

    def trainer_pid(self, attempt: int) -> int:
        """Process of the last host's trainer."""
        path = self.path / attempt_path(attempt) / "processes" / "s1-h0.json"
        trainer = ledger.decode(path.read_bytes(), HostProcesses, str(path)).trainer
        assert trainer is not None
        return trainer.pid

    def stop(self) -> float:
        """Ctrl-C; returns the seconds until the launcher has ended."""
        start_s = time.perf_counter()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(PATIENCE_S)
        if code != ExitCode.PREEMPTED:
            raise RuntimeError(f"the launch ended with {code} after a stop:\n{self._words()}")
        return time.perf_counter() - start_s

    def end(self) -> None:
        """Leaves nothing running; the second request is not a clean stop but a quick one."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(30)
        self.process.kill()
        self.process.wait()
        self._talk.close()

    def _wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"no {what}:\n{self._words()}")
            time.sleep(POLL_S)

    def _words(self) -> str:
        self._talk.seek(0)
        return self._talk.read().decode(errors="replace")[-3000:]


@contextlib.contextmanager
def _launched(root: Path, cache: Path) -> Iterator[Launch]:
    launch = Launch(root, environment(cache))
    try:
        yield launch
    finally:
        launch.end()
