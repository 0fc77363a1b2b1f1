"""``muster stop`` for a run on TPU VMs of the stand-in: asked, and nothing left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from launcher import lease
from launcher.cli import status, stop
from launcher.cli.places import Places
from launcher.cli.stopping_vms import remove_machines
from launcher.cli.supervising import check, held
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from launcher.supervise.one import supervised
from launcher.supervise.records import Order
from recipes.contract import ExitCode, RunPath
from recipes.errors import UserError
from recipes.load import recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from tests.local.gcs_server import GcsServer, close_clients, running_gcs_server
from tests.tpu.cloud import QUICK, TpuCloud
from tests.unit.rundir_support import make_recipe


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def cloud(server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TpuCloud]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    with TpuCloud(tmp_path / "cloud", timing=QUICK, with_workers=False) as cloud:
        monkeypatch.setenv("MUSTER_TPU_ENDPOINT", cloud.endpoint)
        yield cloud
    close_clients()


def make_tpu_recipe(root: str) -> Recipe:
    plain = recipe_to_dict(make_recipe())
    target = {
        "kind": "tpu",
        "project": "muster-test",
        "zone": "us-east5-a",
        "capacity": "spot",
        "python": "/usr/bin/python3",
        "grace_period_s": 30.0,
    }
    price = {"price_per_chip_hour": 2.0}
    return recipe_from_dict(
        plain | {"target": target, "run": {"root": root}, "hardware": {**plain["hardware"], **price}}
    )


def launched(folder: str) -> RunDir:
    """A run with an order, as a launch leaves it."""
    recipe = make_tpu_recipe(f"gs://bucket/{folder}")
    run = create_or_open(open_storage(recipe.run_dir), recipe, {}).run
    path, body = launched_recipe(recipe)
    run.storage.replace(path, body)
    run.write_order(Order(id="o1", recipe=path, bundle="sha256:" + 64 * "0", launched_s=time.time(), by="me"))
    return run


def get_machines(run: RunDir) -> None:
    """What a supervisor does until the machines are up; then it is gone."""
    places = Places()
    with held(run, "muster supervise") as keeper:
        supervisor = supervised(run, places).supervisor(say=print, may_act=lambda: check(keeper))
        deadline_s = time.monotonic() + 30
        while not any(each.ready_s for each in run.provisions()):
            assert time.monotonic() < deadline_s
            places.forget()
            supervisor.step()
            time.sleep(0.1)


def invoke(command: click.Command, *words: str) -> str:
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_stop_removes_the_machines(cloud: TpuCloud, tmp_path: Path) -> None:
    run = launched(tmp_path.name)
    get_machines(run)
    before = invoke(status.command, run.url)
    assert "us-east5-a spot, 1 slice: up for" in before
    assert "USD 8.00 an hour now" in before
    assert "supervised  by nobody" in before
    assert cloud.node_ids()
    invoke(stop.command, run.url)
    assert (cloud.node_ids(), cloud.queued_ids(), cloud.doubles) == ([], [], [])
    (provision,) = run.provisions()
    assert provision.ended_s is not None
    after = invoke(status.command, run.url)
    assert after.startswith("tiny: stopped, ")
    assert "USD 0.00 an hour now" in after
    assert "nobody" not in after
    assert "is not running: it is stopped" in invoke(stop.command, run.url)


def test_stop_says_what_is_left_and_what_it_costs(cloud: TpuCloud, tmp_path: Path) -> None:
    run = launched(tmp_path.name)
    get_machines(run)
    other = run.acquire(lease.this_process("muster supervise tiny"), time.time(), RunPath.SUPERVISOR)
    run.request_stop(time.time(), "me")
    told: list[str] = []
    clock = iter(range(10))
    with pytest.raises(UserError) as caught:
        remove_machines(run, 2.0, say=told.append, sleep=lambda _: None, monotonic=lambda: float(next(clock)))
    assert caught.value.exit_code == ExitCode.INFRASTRUCTURE
    assert "in us-east5-a may still be there after 2 s, at USD 8.00 an hour" in caught.value.message
    assert any("muster supervise tiny" in line and "removes them" in line for line in told)
    run.release(other)
    remove_machines(run, 60.0, say=told.append)
    run_again = run.provisions()
    assert all(each.ended_s is not None for each in run_again)
    assert run_again


def test_stop_reaches_a_supervisor_that_waits(cloud: TpuCloud, tmp_path: Path) -> None:
    """There are no machines between two tries; the next one must not come."""
    run = launched(tmp_path.name)
    run.request_stop(time.time(), "supervisor", resumes=True)
    invoke(stop.command, run.url)
    asked = run.stop_request()
    assert asked is not None
    assert not asked.resumes
    assert cloud.calls["CreateQueuedResource"] == 0
