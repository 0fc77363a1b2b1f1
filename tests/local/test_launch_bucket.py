"""``muster launch`` with its run in a bucket: shipping, resuming, and a bucket that goes away meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import storage_gcs
from launcher.cli import main
from launcher.rundir import RunDir, committed_step
from launcher.storage import open_storage
from recipes.contract import Phase
from tests.local.faulty_gcs import Weather, faulty_gcs
from tests.local.gcs_server import running_gcs_server
from tests.local.launching import Launch


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Weather]]:
    """The address of a folder of runs; and the weather between the launched processes and the server."""
    with running_gcs_server(tmp_path) as server, faulty_gcs(server.url) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server.make_bucket("bucket") + "/runs", weather
        storage_gcs._client_of(server.url).close()
        storage_gcs._client_of.cache_clear()


def _launch(root: str, weather: Weather, tmp_path: Path, step_s: float, *overrides: str) -> Launch:
    env = {**weather.env, "GOOGLE_CLOUD_PROJECT": "muster-test"}
    launch = Launch(tmp_path, script={"step_s": step_s}, overrides=[f"run.root={root}", *overrides], env=env)
    launch.run = RunDir(open_storage(f"{root}/quickstart"))
    return launch


def test_everything_is_in_the_bucket(bucket: tuple[str, Weather], tmp_path: Path) -> None:
    root, weather = bucket
    with _launch(root, weather, tmp_path, 0.5) as launch:
        launch.wait_for(lambda: committed_step(launch.run.storage) >= 10, "checkpoint")
        launch.process.send_signal(signal.SIGTERM)
        code, _, err = launch.finish()
        assert code == 42, err
    run = launch.run
    saved = committed_step(run.storage)
    assert f"saved at step {saved}" in err
    assert [(record.exit_code, record.status) for record in run.hosts(1)] == [(42, 42), (42, 42)]
    assert {beat.progress.phase for beat in run.heartbeats()} == {Phase.SAVING}
    with _launch(root, weather, tmp_path, 0.01) as launch:
        code, _, err = launch.finish()
    assert code == 0, err
    assert b"stand-in s1-h0" in run.storage.read_log(run.log_path(2, "s1-h0"))
    metrics = [run.storage.read(f"metrics/{attempt:04d}.jsonl").count(b"\n") for attempt in (1, 2)]
    assert metrics == [saved, 60 - saved]


def test_a_bucket_that_goes_away_does_not_stop_the_training(
    bucket: tuple[str, Weather], tmp_path: Path
) -> None:
    root, weather = bucket
    # The stand-in does not retry, so it saves nothing meanwhile.
    with _launch(root, weather, tmp_path, 0.4, "checkpoint.save_interval_steps=1000") as launch:
        launch.wait_for(lambda: len(launch.run.heartbeats()) == 2, "heartbeat")
        weather.plan(*[403] * 6)
        code, _, err = launch.finish()
    assert code == 0, err
    log = b"".join(launch.run.storage.read_log(launch.run.log_path(1, host)) for host in ("s0-h0", "s1-h0"))
    assert b"trying again" in log


def test_stacks_and_profiles_go_through_the_bucket(
    bucket: tuple[str, Weather], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, weather = bucket
    env = {**weather.env, "GOOGLE_CLOUD_PROJECT": "muster-test"}
    script = {"step_s": 0.5, "profile_step": 2}
    with Launch(tmp_path, script=script, overrides=[f"run.root={root}"], env=env) as launch:
        launch.run = RunDir(open_storage(f"{root}/quickstart"))
        launch.wait_for_step(1)
        code = main(["stacks", f"{root}/quickstart", "--json"])
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish()[0] == 42
    document = json.loads(capsys.readouterr().out)
    assert (code, document["missing"]) == (0, {})
    assert sorted(host for group in document["groups"] for host in group["hosts"]) == ["s0-h0", "s1-h0"]
    traces = launch.run.storage.list("profiles/attempt-0001/step-00000002/plugins/profile/one")
    assert [path.rpartition("/")[2] for path in traces] == ["s0-h0.xplane.pb", "s1-h0.xplane.pb"]
