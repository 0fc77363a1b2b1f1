"""Stacks and profiles of real processes: on request, at a hang, and of a trainer that cannot answer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.local.launching import COMMAND, REPO, TIMEOUT_S, Launch, trainer_pid

SLOW = {"step_s": 0.5}
"""60 steps take half a minute: longer than the questions do."""


def _launch(root: Path, **arguments: Any) -> Launch:
    overrides = [f"run.root='{root}'", *arguments.pop("overrides", ())]
    return Launch(root, overrides=overrides, **arguments)


def _stacks(launch: Launch, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``muster stacks``."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "stacks", str(launch.run_path), *options],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def _groups(out: str) -> dict[str, dict[str, Any]]:
    """Groups of the JSON document, by host."""
    return {host: group for group in json.loads(out)["groups"] for host in group["hosts"]}


def test_stacks_on_request_leave_the_run_as_it_was(tmp_path: Path) -> None:
    with _launch(tmp_path, script={**SLOW, "profile_step": 2}) as launch:
        launch.wait_for_step(3)
        code, out, err = _stacks(launch, "--json")
        one = _stacks(launch, "--host", "1/0")
        launch.process.send_signal(signal.SIGTERM)
        finished = launch.finish()
    assert code == 0, err
    assert set(_groups(out)) == {"s0-h0", "s1-h0"}
    assert "in main" in " ".join(_groups(out)["s1-h0"]["main_thread"])
    assert json.loads(out)["missing"] == {}
    assert one[0] == 0, one[2]
    assert "1 host (training, step " in one[1]
    assert "s0-h0" not in one[1]
    assert "asked 2 hosts of attempt 1" in err
    assert "stacks of the trainer" in (launch.run_path / "attempts/0001/logs/s0-h0.log").read_text()
    assert (finished[0], launch.codes()) == (42, [42]), finished[2]
    profiles = launch.run_path / "profiles/attempt-0001/step-00000002/plugins/profile/one"
    assert [path.name for path in sorted(profiles.glob("*.pb"))] == ["s0-h0.xplane.pb", "s1-h0.xplane.pb"]
    assert (profiles / "s1-h0.xplane.pb").stat().st_size == 2**20
    code, _, err = _stacks(launch)
    assert code == 2
    assert "error: quickstart is not running: it is stopped" in err


def test_a_trainer_that_cannot_answer_is_named(tmp_path: Path) -> None:
    with _launch(tmp_path, script=SLOW) as launch:
        launch.wait_for_step(3)
        stopped = trainer_pid(launch.processes()[1])
        os.kill(stopped, signal.SIGSTOP)
        code, out, err = _stacks(launch)
        os.kill(stopped, signal.SIGCONT)
        launch.process.send_signal(signal.SIGTERM)
        finished = launch.finish()
    assert code == 1, err
    assert re.search(r"\): s1-h0\n  no stacks: the trainer wrote no stacks within 2 s\n", out)
    assert out.index("s1-h0") < out.index("s0-h0")
    assert (finished[0], launch.codes()) == (42, [42])


def test_a_hang_leaves_the_stacks_of_every_host(tmp_path: Path) -> None:
    limits = ["run.hang_minimum_s=2", "run.hang_factor=5"]
    fault = {"attempt": 1, "host": "s1-h0", "step": 12, "do": "deaf"}
    with _launch(tmp_path, script={"step_s": 0.2, "faults": [fault]}, overrides=limits) as launch:
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (0, [75, 0]), err
    assert [path.name for path in sorted((launch.run_path / "attempts/0001/stacks/hang").iterdir())] == [
        ".muster.lock",
        "s0-h0.json",
        "s1-h0.json",
    ]
    assert "in do" in (launch.run_path / "attempts/0001/logs/s1-h0.log").read_text()
    code, out, err = _stacks(launch, "--attempt", "1", "--json")
    assert code == 0, err
    found = _groups(out)
    assert "in do" in found["s1-h0"]["main_thread"][0]
    assert found["s1-h0"]["steps"] == [12]
    assert "in do" not in " ".join(found["s0-h0"]["main_thread"])
    code, _, err = _stacks(launch, "--attempt", "2")
    assert code == 2
    assert "attempt 2 of quickstart left no stacks: it did not hang" in err
