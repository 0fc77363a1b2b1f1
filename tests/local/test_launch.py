"""``muster launch`` on this machine, with real agents and a stand-in trainer: ends, stops and kills."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.orphans import HostProcesses
from tests.local.launching import GRACE_S, Launch, none_running, trainer_pid

SLOW = {"step_s": 0.1}
"""60 steps take 6 s: long enough to be interrupted."""


def _launch(root: Path, **arguments: Any) -> Launch:
    overrides = [f"run.root='{root}'", *arguments.pop("overrides", ())]
    return Launch(root, overrides=overrides, **arguments)


def _faults(*faults: dict[str, Any], **script: Any) -> dict[str, Any]:
    return {**script, "faults": list(faults)}


def _one_writer(launch: Launch) -> None:
    assert not (launch.run_path / "TWO-WRITERS").exists()


def test_a_run_completes_and_says_where_everything_is(tmp_path: Path) -> None:
    with _launch(tmp_path, options=["--json"], env={"CANARY": "s3cret-c4nary"}) as launch:
        code, out, err = launch.finish()
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["outcome"], summary["committed_step"], summary["num_attempts"]) == ("complete", 60, 1)
    assert (summary["loss"], summary["eval_loss"], summary["eval_unigram_entropy_nats"]) == (1.0, 2.0, 3.2188)
    learned = "held-out loss 2.00 nats per token (unigram entropy 3.22), train loss 1.00"
    assert f"  {learned}\n" in err
    for place in ("checkpoints", "metrics", "logs"):
        assert Path(summary[place]).is_dir()
        assert summary[place] in err
    assert "muster status" in err
    assert "tensorboard --logdir" in err
    assert (launch.run_path / "metrics" / "0001.jsonl").read_text().count("\n") == 60
    assert "stand-in s1-h0" in (launch.run_path / "attempts/0001/logs/s1-h0.log").read_text()
    assert [record.exit_code for record in launch.run.hosts(1)] == [0, 0]
    assert none_running(launch.processes())
    files = [path for path in launch.run_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"s3cret-c4nary" in path.read_bytes()]
    with _launch(tmp_path) as again:
        code, _, err = again.finish()
    assert code == 0
    assert "complete already" in err
    assert learned in err
    assert len(again.run.attempts()) == 1


@pytest.mark.parametrize("code", [1, 2])
def test_the_users_error_ends_the_run_at_once(tmp_path: Path, code: int) -> None:
    # The other host would wait for ever.
    script = _faults(
        {"host": "s1-h0", "step": 5, "do": f"exit {code}"}, {"host": "s0-h0", "step": 5, "do": "deaf"}
    )
    with _launch(tmp_path, script=script) as launch:
        returned, _, err = launch.finish()
    assert (returned, launch.codes()) == (code, [code])
    assert "error: quickstart: s1-h0: the loss is NaN" in err
    assert "hint: lower it" in err
    end = launch.run.attempt_end(1)
    assert end is not None
    assert end.first_failing_host == "s1-h0"


@pytest.mark.parametrize("what", ["exit 75", "exit 3", "peer-lost"])
def test_a_failure_is_restarted_and_resumed(tmp_path: Path, what: str) -> None:
    script = _faults(
        {"attempt": 1, "host": "s0-h0", "step": 25, "do": what},
        {"attempt": 1, "host": "s1-h0", "step": 25, "do": "deaf"},
        trace=str(tmp_path / "trace"),
    )
    with _launch(tmp_path, script=script) as launch:
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (0, [75, 0]), err
    end = launch.run.attempt_end(1)
    assert end is not None
    assert (end.first_failing_host, end.to_step) == ("s0-h0", 20)
    assert "2 s0-h0 21\n" in (tmp_path / "trace").read_text()
    _one_writer(launch)


def test_failures_use_up_the_budget(tmp_path: Path) -> None:
    faults = [{"host": "s0-h0", "step": step, "do": "exit 75"} for step in (15, 25, 35)]
    with _launch(tmp_path, script=_faults(*faults), overrides=["run.max_restarts=1"]) as launch:
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (75, [75, 75])
    assert "2 attempts failed (run.max_restarts=1)" in err
    assert "resume with: muster launch quickstart" in err


def test_attempts_without_progress_end_the_run(tmp_path: Path) -> None:
    script = _faults({"step": 0, "do": "exit 75"})
    with _launch(tmp_path, script=script, overrides=["run.max_attempts_without_progress=2"]) as launch:
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (75, [75, 75])
    assert "2 attempts in a row committed no new step" in err


def test_preemptions_are_not_counted(tmp_path: Path) -> None:
    faults = [{"host": "s1-h0", "step": step, "do": "signal 15"} for step in (15, 25, 35)]
    with _launch(tmp_path, script=_faults(*faults, **SLOW), overrides=["run.max_restarts=0"]) as launch:
        code, _, err = launch.finish()
    *preempted, last = launch.codes()
    assert (code, last) == (0, 0), err
    assert len(preempted) >= 3
    assert set(preempted) == {42}


def test_no_restart(tmp_path: Path) -> None:
    script = _faults({"step": 5, "do": "exit 75"})
    with _launch(tmp_path, script=script, options=["--no-restart"]) as launch:
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (75, [75])
    assert "--no-restart" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_saves_and_the_same_line_resumes(tmp_path: Path, number: signal.Signals) -> None:
    with _launch(tmp_path, script=SLOW) as launch:
        launch.wait_for_step(12)
        launch.process.send_signal(number)
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (42, [42]), err
    end = launch.run.attempt_end(1)
    assert end is not None
    assert end.to_step > 12
    assert f"saved at step {end.to_step}" in err
    assert "resume with: muster launch quickstart" in err
    assert none_running(launch.processes())
    with _launch(tmp_path, script={}) as again:
        code, _, err = again.finish()
    assert (code, again.codes()) == (0, [42, 0])
    assert f"from step {end.to_step}" in err


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    script = _faults({"step": 12, "do": "deaf"})
    with _launch(tmp_path, script=script, overrides=["target.grace_period_s=60"]) as launch:
        launch.wait_for_step(12)
        launch.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        begun_s = time.monotonic()
        launch.process.send_signal(signal.SIGINT)
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (42, [42])
    assert time.monotonic() - begun_s < 10
    assert "stopping at once" in err
    assert none_running(launch.processes())


def test_a_deaf_trainer_is_killed_before_the_grace_ends(tmp_path: Path) -> None:
    with _launch(tmp_path, script=_faults({"step": 12, "do": "deaf"})) as launch:
        launch.wait_for_step(12)
        begun_s = time.monotonic()
        launch.process.send_signal(signal.SIGTERM)
        code, _, _ = launch.finish()
    assert code == 42
    assert 5 < time.monotonic() - begun_s < GRACE_S
    assert "killed at the end of the grace period" in launch.run.hosts(1)[0].reason
    assert launch.run.hosts(1)[0].status == 137


def test_a_trainer_that_has_nothing_to_save_is_not_waited_for(tmp_path: Path) -> None:
    with _launch(tmp_path, script=_faults({"step": 0, "do": "deaf"}), options=["--no-restart"]) as launch:
        launch.wait_for(lambda: len(launch.run.heartbeats()) == 2, "heartbeats")
        begun_s = time.monotonic()
        launch.process.send_signal(signal.SIGTERM)
        code, _, _ = launch.finish()
    assert (code, launch.codes()) == (42, [42])
    assert time.monotonic() - begun_s < 5
    assert "nothing to save" in launch.run.hosts(1)[0].reason


def test_a_stop_request_in_the_run_directory(tmp_path: Path) -> None:
    with _launch(tmp_path, script=SLOW) as launch:
        launch.wait_for_step(12)
        launch.run.request_stop(time.time(), "somebody@elsewhere")
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (42, [42])
    assert "muster stop (somebody@elsewhere)" in err


@pytest.mark.parametrize("victim", ["agent", "trainer"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_process_is_signalled(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    with _launch(tmp_path, script=SLOW) as launch:
        launch.wait_for_step(12)
        hosts = launch.processes()
        os.kill(hosts[1].agent.pid if victim == "agent" else trainer_pid(hosts[1]), number)
        code, _, err = launch.finish()
    first = 42 if number == signal.SIGTERM else 75
    assert (code, launch.codes()) == (0, [first, 0]), err
    end = launch.run.attempt_end(1)
    assert end is not None
    if number == signal.SIGKILL:
        assert end.first_failing_host == "s1-h0"
        assert "SIGKILL" in end.message
    else:
        assert end.to_step > 12
    assert none_running(hosts)
    _one_writer(launch)


def test_the_log_of_a_killed_agent_is_kept(tmp_path: Path) -> None:
    with _launch(tmp_path, script=SLOW, options=["--no-restart"]) as launch:
        launch.wait_for(lambda: any(host.trainer for host in launch.processes()), "trainer")
        launch.wait_for_step(1)
        os.kill(launch.processes()[0].agent.pid, signal.SIGKILL)
        launch.finish()
    assert "stand-in s0-h0" in (launch.run_path / "attempts/0001/logs/s0-h0.log").read_text()


def test_a_hang_is_noticed_and_restarted(tmp_path: Path) -> None:
    limits = ["run.hang_minimum_s=2", "run.hang_factor=5"]
    with _launch(tmp_path, script=SLOW, overrides=limits) as launch:
        launch.wait_for_step(12)
        stopped = launch.processes()[1]
        os.kill(trainer_pid(stopped), signal.SIGSTOP)
        code, _, err = launch.finish()
    assert (code, launch.codes()) == (0, [75, 0]), err
    end = launch.run.attempt_end(1)
    assert end is not None
    assert end.first_failing_host == "s1-h0"
    assert end.message.startswith("hung: nothing moved")
    assert "asking for all stacks" in (launch.run_path / "attempts/0001/logs/s1-h0.log").read_text()
    assert none_running([stopped])


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    with _launch(tmp_path, script=SLOW) as launch:
        launch.wait_for_step(1)
        # No context manager: its end would kill the first one's processes.
        code, _, err = _launch(tmp_path).finish()
        assert code == 2
        assert "is in use by muster launch quickstart" in err
        launch.process.send_signal(signal.SIGTERM)
        code, _, err = launch.finish()
    assert code == 42, err
    assert launch.codes() == [42]
    _one_writer(launch)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_killed_launcher_leaves_no_second_writer(tmp_path: Path, deaf: bool) -> None:
    faults = [{"attempt": 1, "step": 15, "do": "deaf"}] if deaf else []
    with _launch(tmp_path, script=_faults(*faults, **SLOW)) as launch:
        launch.wait_for_step(15)
        left = launch.processes()
        launch.process.kill()
        launch.process.wait()
        with _launch(tmp_path) as second:
            code, _, err = second.finish()
    assert code == 0, err
    assert "from step" in err
    assert none_running(left)
    _one_writer(second)


def test_agents_stop_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with _launch(tmp_path, script=SLOW) as launch:
        launch.wait_for_step(12)
        left: list[HostProcesses] = launch.processes()
        launch.process.kill()
        launch.process.wait()
        deadline_s = time.monotonic() + 10
        while not none_running(left):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert [record.exit_code for record in launch.run.hosts(1)] == [42, 42]


def test_a_weird_root_is_no_shell(tmp_path: Path) -> None:
    root = tmp_path / "a b; touch pwned 'q' \"d\" $(id)"
    root.mkdir()
    env = {"WEIRD": str(root)}
    arguments = [f"run.root={json.dumps(str(root))}"]
    with Launch(root, overrides=arguments, env=env) as launch:
        code, _, err = launch.finish()
    assert code == 0, err
    assert launch.codes() == [0]
    assert not (Path.cwd() / "pwned").exists()
    assert not list(tmp_path.rglob("pwned"))


def test_other_targets_are_refused_after_all_checks(tmp_path: Path) -> None:
    with _launch(tmp_path, overrides=["target=gke-spot"]) as launch:
        code, _, err = launch.finish()
    assert code == 2
    assert "error:" in err
    assert "Traceback" not in err
    assert not launch.run_path.exists()


def test_a_dry_run_touches_nothing(tmp_path: Path) -> None:
    with _launch(tmp_path, options=["--dry-run"]) as launch:
        code, out, err = launch.finish()
    assert code == 0, err
    assert json.loads(out)["run_name"] == "quickstart"
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with Launch(tmp_path, overrides=[f"run.root={tmp_path / 'file'}"]) as launch:
        code, _, err = launch.finish()
    assert code == 2
    assert "error:" in err
    assert "hint:" in err
    assert "Traceback" not in err
