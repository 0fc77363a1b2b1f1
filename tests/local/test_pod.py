"""Pods as processes: two of them meet, run the stand-in trainer, and are ended in every way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from launcher.ledger import AttemptEnd
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from recipes.contract import COORDINATOR_PORT, Env, ExitCode, PodEnv, RunPath, host_name
from recipes.load import recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from tests.local.launching import REPO, STAND_IN
from tests.unit.rundir_support import make_recipe

TIMEOUT_S = 60.0
HOSTS = ("s0-h0", "s1-h0")


def small_recipe(root: Path, **run: Any) -> Recipe:
    data = recipe_to_dict(make_recipe(num_steps=60))
    data["multislice"]["num_slices"] = 2
    data["target"]["grace_period_s"] = 10.0
    data["checkpoint"]["save_interval_steps"] = 10
    data["run"] |= {"root": str(root), "peer_timeout_s": 5.0} | run
    return recipe_from_dict(data)


class Job:
    """What JobSet does for two slices of one host, by hand."""

    def __init__(self, root: Path, script: Mapping[str, Any] | None = None, **run: Any) -> None:
        self.root, self.script = root, dict(script or {})
        self.recipe = small_recipe(root, **run)
        storage = open_storage(self.recipe.run_dir)
        self.run: RunDir = create_or_open(storage, self.recipe, {}).run
        self.recipe_path, body = launched_recipe(self.recipe)
        storage.replace(self.recipe_path, body)
        digest = hashlib.sha256(str(root).encode()).digest()
        self.addresses = [f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + slice_id}" for slice_id in range(2)]
        self.pods: dict[str, subprocess.Popen[str]] = {}
        self.restart = 0

    def words(self, host: str) -> Path:
        return self.root / f"words-{self.restart}-{host}"

    def start(self, *slices: int, prefix: Sequence[str] = (), **changes: str) -> None:
        """Starts pods; both if none is named. ``prefix`` is put before the command."""
        for slice_id in slices or (0, 1):
            host = host_name(slice_id, 0)
            with (self.root / f"out-{self.restart}-{host}").open("w") as output:
                self.pods[host] = subprocess.Popen(
                    [*prefix, sys.executable, "-P", "-m", "launcher.pod"],
                    cwd=self.root,
                    env={**os.environ, **self._env(slice_id, host), **changes},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )

    def _env(self, slice_id: int, host: str) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{STAND_IN}{os.pathsep}{REPO}",
            "STAND_IN": json.dumps(self.script),
            Env.RUN_DIR: self.recipe.run_dir,
            Env.SLICE_ID: str(slice_id),
            Env.NUM_SLICES: "2",
            Env.HOST_ID: "0",
            Env.HOSTS_PER_SLICE: "1",
            Env.COORDINATOR: f"{self.addresses[0]}:{COORDINATOR_PORT}",
            Env.GRACE_PERIOD_S: "10",
            Env.SCRATCH_DIR: str(self.root / "scratch" / f"{self.restart}-{host}"),
            PodEnv.RECIPE: self.recipe_path,
            PodEnv.JOBSET_UID: "0c1e",
            PodEnv.RESTART_ATTEMPT: str(self.restart),
            PodEnv.POD_NAME: f"tiny-slice-{slice_id}-0",
            PodEnv.POD_UID: f"uid-{self.restart}-{slice_id}",
            PodEnv.POD_IP: self.addresses[slice_id],
            PodEnv.NODE_NAME: f"node-{slice_id}",
            PodEnv.TERMINATION_LOG: str(self.words(host)),
        }

    def finish(self) -> list[int]:
        """Exit codes, once all have ended; what they left behind is killed, as with a container."""
        codes = [self.pods[host].wait(TIMEOUT_S) for host in HOSTS]
        self.kill()
        self.restart += 1
        return codes

    def kill(self) -> None:
        for pod in self.pods.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()

    def notify(self, *hosts: str) -> None:
        for host in hosts or HOSTS:
            self.pods[host].send_signal(signal.SIGTERM)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        def all_there() -> bool:
            newest = max(self.run.attempts(), default=0)
            beats = [beat for beat in self.run.heartbeats() if beat.attempt == newest]
            return len(beats) == 2 and min(beat.progress.step for beat in beats) >= step

        self.wait_for(all_there)

    def output(self, host: str = "s0-h0") -> str:
        return "".join(path.read_text() for path in sorted(self.root.glob(f"out-*-{host}")))

    def end(self, attempt: int) -> AttemptEnd:
        end = self.run.attempt_end(attempt)
        assert end is not None, self.output()
        return end


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(script: Mapping[str, Any] | None = None, **run: Any) -> Job:
        made.append(Job(tmp_path, script, **run))
        return made[0]

    yield make
    for each in made:
        each.kill()


def faults(*found: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"faults": list(found), **more}


def test_two_pods_complete(job: Callable[..., Job]) -> None:
    two = job()
    two.start()
    assert two.finish() == [0, 0]
    assert two.run.attempts() == [1]
    end = two.end(1)
    assert (end.exit_code, end.first_failing_host, end.to_step) == (0, None, 60)
    start = two.run.attempt_start(1)
    assert start is not None
    assert list(start.hosts) == list(HOSTS)
    assert [record.hostname for record in two.run.hosts(1)] == ["node-0", "node-1"]
    assert not two.words("s0-h0").exists()


def test_a_late_pod_is_waited_for(job: Callable[..., Job]) -> None:
    two = job()
    two.start(0)
    two.wait_for(lambda: "waiting for s1-h0" in two.output())
    assert two.run.attempts() == []
    two.start(1)
    assert two.finish() == [0, 0]
    assert two.run.attempts() == [1]


def test_a_notice_saves_and_the_next_incarnation_goes_on(job: Callable[..., Job]) -> None:
    two = job({"step_s": 0.05})
    two.start()
    two.wait_for_step(3)
    two.notify()
    assert two.finish() == [42, 42]
    end = two.end(1)
    assert (end.exit_code, end.from_step) == (42, -1)
    assert end.to_step >= 3
    two.start()
    assert two.finish() == [0, 0]
    assert two.end(2).from_step == end.to_step
    # A clean stop leaves no lease to wait for.
    assert "waiting" not in two.output().partition("in use")[1]


def test_a_notice_before_the_others_came_is_heeded(job: Callable[..., Job]) -> None:
    two = job()
    two.start(1)
    two.wait_for(lambda: "waiting for the attempt" in two.output("s1-h0"))
    two.notify("s1-h0")
    assert two.pods["s1-h0"].wait(TIMEOUT_S) == 42
    two.start(0)
    two.wait_for(lambda: "waiting for s1-h0" in two.output())
    two.notify("s0-h0")
    assert two.pods["s0-h0"].wait(TIMEOUT_S) == 42
    assert two.run.attempts() == []


def test_the_users_error_is_named_with_its_host(job: Callable[..., Job]) -> None:
    script = faults({"step": 3, "host": "s1-h0", "do": "exit 1"}, step_s=0.05)
    two = job(script)
    two.start()
    assert two.pods["s1-h0"].wait(TIMEOUT_S) == 1
    two.notify("s0-h0")
    assert two.finish() == [42, 1]
    end = two.end(1)
    assert (end.exit_code, end.first_failing_host, end.message) == (1, "s1-h0", "the loss is NaN")
    two.restart -= 1
    assert two.words("s1-h0").read_text() == "s1-h0: the loss is NaN; lower it"


def test_a_killed_leader_is_followed_by_another(job: Callable[..., Job]) -> None:
    """SIGKILL to PID 1 of process 0 leaves lease and attempt open; the next incarnation settles both."""
    two = job({"step_s": 0.05})
    two.start()
    two.wait_for_step(12)
    began_s = time.monotonic()
    two.pods["s0-h0"].kill()
    two.notify("s1-h0")
    assert two.finish() == [-signal.SIGKILL, 42]
    two.start()
    assert two.finish() == [0, 0]
    assert time.monotonic() - began_s < 30, "it waited for the old lease to expire"
    first, second = two.end(1), two.end(2)
    assert (first.exit_code, first.first_failing_host) == (75, "s0-h0")
    assert (second.exit_code, second.from_step >= 10) == (0, True)


def test_a_peer_that_died_is_named_by_the_survivor(job: Callable[..., Job]) -> None:
    script = faults(
        {"step": 3, "host": "s1-h0", "do": "signal 9"},
        {"step": 5, "host": "s0-h0", "do": "peer-lost"},
        step_s=0.05,
    )
    two = job(script)
    two.start()
    assert two.finish() == [75, 75]
    end = two.end(1)
    assert (end.exit_code, end.first_failing_host) == (75, "s1-h0")
    assert "SIGKILL" in end.message


def test_a_crash_loop_ends_with_the_users_code(job: Callable[..., Job]) -> None:
    script = faults({"step": 3, "do": "exit 75"})
    two = job(script, max_attempts_without_progress=2)
    for _ in range(2):
        two.start()
        assert two.finish() == [75, 75]
    two.start()
    assert two.pods["s0-h0"].wait(TIMEOUT_S) == ExitCode.EXPERIMENT_FAILED
    two.notify("s1-h0")
    assert two.finish() == [1, 42]
    two.restart -= 1
    assert "2 attempts in a row committed no new step" in two.words("s0-h0").read_text()


def test_a_request_to_stop_is_obeyed_without_a_cluster(job: Callable[..., Job]) -> None:
    """Where nobody deletes the JobSet: all save, and the next incarnation does not train."""
    two = job({"step_s": 0.05})
    two.start()
    two.wait_for_step(3)
    two.run.request_stop(time.time(), "ada@laptop")
    assert two.pods["s0-h0"].wait(TIMEOUT_S) == ExitCode.PREEMPTED
    two.notify("s1-h0")
    assert two.finish() == [42, 42]
    two.start()
    assert two.pods["s0-h0"].wait(TIMEOUT_S) == ExitCode.EXPERIMENT_FAILED
    assert "stopped as asked by ada@laptop" in two.words("s0-h0").read_text()
    two.notify("s1-h0")
    assert two.finish() == [1, 42]
    assert two.run.attempts() == [1]


def test_a_lease_that_is_gone_is_said_and_counted(job: Callable[..., Job]) -> None:
    two = job({"step_s": 0.5})
    two.start()
    two.wait_for_step(3)
    two.run.storage.delete(RunPath.LEASE)
    assert two.pods["s0-h0"].wait(TIMEOUT_S) == ExitCode.INFRASTRUCTURE
    end = two.end(1)
    assert (end.exit_code, end.first_failing_host) == (75, "s0-h0")
    assert "lease.json is gone" in end.message


def test_a_stale_pod_cannot_join(job: Callable[..., Job]) -> None:
    """A pod of the incarnation before waits; it never becomes part of this one."""
    two = job({"step_s": 0.05})
    two.start(0)
    two.start(1, **{PodEnv.RESTART_ATTEMPT: "7"})
    two.wait_for(lambda: "another incarnation" in two.output("s1-h0"))
    assert two.run.attempts() == []
    two.notify()
    assert two.finish() == [42, 42]


NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
"""Gives the command a process-id namespace, in which it is PID 1; needs root."""


def can_unshare() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not can_unshare(), reason="no process-id namespaces here (unshare needs root)")
def test_as_a_real_pid_1(job: Callable[..., Job]) -> None:
    """PID 1 gets no signal that it has no handler for, and inherits every orphan."""
    two = job({"step_s": 0.05})
    two.start(prefix=NAMESPACE)
    two.wait_for_step(3)
    for pod in two.pods.values():
        (inner,) = psutil.Process(pod.pid).children()
        inner.send_signal(signal.SIGTERM)
    assert two.finish() == [42, 42]
    assert [record.pid for record in two.run.hosts(1)] == [1, 1]
    two.start(prefix=NAMESPACE)
    assert two.finish() == [0, 0]


@pytest.mark.parametrize("name", [PodEnv.POD_IP, PodEnv.RECIPE, Env.NUM_SLICES])
def test_an_incomplete_environment_is_refused(job: Callable[..., Job], name: str) -> None:
    two = job()
    two.start(1, **{name: ""})
    assert two.pods["s1-h0"].wait(TIMEOUT_S) == ExitCode.BAD_INPUT
    assert "Traceback" not in two.output("s1-h0")
    assert name in two.output("s1-h0") or "invalid literal" in two.output("s1-h0")
