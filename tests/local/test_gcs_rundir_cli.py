"""The verbs that look at runs, over a bucket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import lease, storage_gcs
from launcher.cli import main
from launcher.ledger import AttemptEnd
from launcher.rundir import create_or_open
from launcher.storage import open_storage
from tests.local.faulty_gcs import faulty_gcs, leaves_sockets
from tests.local.gcs_server import running_gcs_server
from tests.unit.rundir_support import commit_checkpoint, make_recipe


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_gcs_server(tmp_path) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server.make_bucket("bucket") + "/runs"
        storage_gcs._client_of(server.url).close()
        storage_gcs._client_of.cache_clear()


def test_a_run_in_a_bucket_is_seen_from_anywhere(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_or_open(open_storage(f"{root}/tiny"), make_recipe(), {}).run
    held = run.acquire(lease.this_process("muster launch"), 100.0)
    attempt = run.next_attempt(100.0, recipe=make_recipe(), hosts=["s0-h0"])
    run.storage.write_log(run.log_path(attempt, "s0-h0"), 0, b"one\n")
    run.storage.write_log(run.log_path(attempt, "s0-h0"), 4, b"two\n")
    commit_checkpoint(run.storage, 20)
    end = AttemptEnd(
        end_s=3.0, exit_code=0, first_failing_host=None, message="", hint="", from_step=-1, to_step=20
    )
    run.write_attempt_end(attempt, end)
    run.release(held)

    assert main(["ls", "--root", root, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["name"], listed["state"], listed["committed_step"]) == ("tiny", "complete", 20)
    assert main(["status", f"{root}/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**listed, "cluster": None}
    assert main(["logs", "tiny", "--root", root, "--tail", "1"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert main(["stop", "tiny", "--root", root]) == 0
    assert "not running" in capsys.readouterr().err
    assert main(["status", "tini", "--root", root]) == 2
    assert "did you mean tiny?" in capsys.readouterr().err


def test_a_bucket_that_does_not_exist_is_one_error(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["ls", "--root", "gs://no-such-bucket"], ["status", "gs://no-such-bucket/runs/tiny"]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert "error: bucket no-such-bucket does not exist" in captured.err
        assert "hint:" in captured.err


@leaves_sockets
def test_one_damaged_object_leaves_the_other_runs_listed(
    root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny", "tidy"):
        create_or_open(open_storage(f"{root}/{name}"), make_recipe(), {})
    with faulty_gcs(os.environ["STORAGE_EMULATOR_HOST"]) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        weather.damaged = "runs/tiny/recipe.yaml"
        assert main(["ls", "--root", root, "--json"]) == 0
        tidy, tiny = json.loads(capsys.readouterr().out)["runs"]
        assert (tidy["name"], tidy["state"]) == ("tidy", "created")
        assert (tiny["name"], tiny["state"]) == ("tiny", "damaged")
        assert "tiny/recipe.yaml is damaged or changed on the way" in tiny["problem"]
        assert main(["status", "tiny", "--root", root]) == 75
        assert "tiny/recipe.yaml is damaged or changed on the way" in capsys.readouterr().err
        storage_gcs._client_of(weather.url).close()
