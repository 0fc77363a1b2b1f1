"""TPU VMs of a run at the stand-in of the API: asked for once, adopted, foreign, lost answers, listings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import StatusCode

from launcher.rundir import RunDir, launched_recipe
from launcher.supervise.observation import Option, Phase
from launcher.supervise.place import Refusal
from launcher.supervise.records import Order, Trouble
from launcher.tpu import client, names
from launcher.tpu.listing import Listings
from launcher.tpu.place import TpuPlace
from launcher.tpu.request import Wish, request
from recipes.errors import UserError
from recipes.load import recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from tests.tpu.cloud import ManualClock, TpuCloud
from tests.unit.rundir_support import make_recipe, make_run

ZONE = "projects/muster-test/locations/us-east5-a"
ORDER = Order(id="o1", recipe="launches/0.yaml", bundle="sha256:" + 64 * "0", launched_s=0.0, by="me")
OPTION = Option(place=ZONE, capacity="spot", num_slices=2, num_chips=8, usd_per_hour=None)
READY_S = 120.0


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TpuCloud]:
    with TpuCloud(tmp_path / "cloud", clock=ManualClock(), with_workers=False) as cloud:
        monkeypatch.setenv("MUSTER_TPU_ENDPOINT", cloud.endpoint)
        yield cloud


def tpu_recipe(**target: object) -> Recipe:
    plain = recipe_to_dict(make_recipe(global_batch_size=8))
    own = {
        "kind": "tpu",
        "project": "muster-test",
        "zone": "us-east5-a",
        "capacity": "spot",
        "python": "/usr/bin/python3",
    }
    return recipe_from_dict(plain | {"target": own | target, "multislice": {"num_slices": 2}})


def place_of(run: RunDir, recipe: Recipe | None = None, also: tuple[str, ...] = ()) -> TpuPlace:
    return TpuPlace(run=run, recipe=recipe or tpu_recipe(), order=ORDER, listings=Listings(), also=also)


def test_two_slices_come_and_go(cloud: TpuCloud, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    place = place_of(run)
    place.create(OPTION, 3, is_probe=False)
    name = names.resource_id(run.url)
    (seen,) = place.look().machines
    assert (seen.phase, seen.provision, seen.order, seen.num_slices) == (Phase.WAITING, 3, "o1", 2)
    assert seen.name == name == place.name(OPTION, is_probe=False)
    assert run.storage.read(launched_recipe(tpu_recipe())[0])
    cloud.advance(READY_S)
    place = place_of(run)
    (seen,) = place.look().machines
    assert seen.phase is Phase.UP
    assert cloud.node_ids() == [f"{name}-0", f"{name}-1"]
    cloud.preempt(f"{name}-1")
    cloud.advance(READY_S)
    place = place_of(run)
    (seen,) = place.look().machines
    assert seen.phase is Phase.LOST
    assert seen.fault is not None
    assert seen.fault.trouble is Trouble.PREEMPTED
    place.delete(seen)
    assert place.look().machines[0].phase is Phase.DELETING
    cloud.advance(READY_S)
    place = place_of(run)
    assert place.look().machines == []
    place.delete(seen)
    assert (cloud.node_ids(), cloud.queued_ids()) == ([], [])


def test_what_is_there_is_adopted_if_it_is_this_provision(cloud: TpuCloud, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    place_of(run).create(OPTION, 3, is_probe=False)
    place_of(run).create(OPTION, 3, is_probe=False)
    assert len(cloud.queued_ids()) == 1
    with pytest.raises(Refusal) as caught:
        place_of(run).create(OPTION, 4, is_probe=False)
    assert caught.value.fault.trouble is Trouble.UNAVAILABLE


def test_what_is_not_ours_is_left_alone(cloud: TpuCloud, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    wish = Wish(order=ORDER, number=3, zone="us-east5-a", capacity="spot", num_slices=2)
    asked = request(tpu_recipe(), run.url, wish)
    body = dict(asked.body)
    spec = {**body["tpu"]["node_spec"][0]}
    spec["node"] = {**spec["node"], "labels": {"team": "other"}}
    client.TpuApi().create(dataclasses.replace(asked, body={**body, "tpu": {"node_spec": [spec]}}))
    place = place_of(run)
    assert place.look().machines == []
    with pytest.raises(Refusal, match="is not this run's") as caught:
        place.create(OPTION, 3, is_probe=False)
    assert caught.value.fault.trouble is Trouble.BAD_REQUEST
    assert len(cloud.queued_ids()) == 1


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED])
def test_a_lost_answer_makes_no_second_set(cloud: TpuCloud, tmp_path: Path, code: StatusCode) -> None:
    run = make_run(tmp_path)
    cloud.fault("CreateQueuedResource", code, is_committed=True)
    place_of(run).create(OPTION, 3, is_probe=False)
    assert cloud.calls["CreateQueuedResource"] == 2
    assert cloud.queued_ids() == [names.resource_id(run.url)]


def test_no_capacity_and_quota_are_answers(cloud: TpuCloud, tmp_path: Path) -> None:
    cloud.quota("us-east5-a", 1)
    with pytest.raises(Refusal) as caught:
        place_of(make_run(tmp_path)).create(OPTION, 3, is_probe=False)
    assert caught.value.fault.trouble is Trouble.QUOTA
    assert cloud.calls["CreateQueuedResource"] == 1


def test_a_zone_that_does_not_answer_is_unseen(
    cloud: TpuCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RETRY_S", 0.0)
    recipe = tpu_recipe(fallbacks=["us-east5-b/spot"])
    cloud.fault("ListNodes", StatusCode.UNAVAILABLE)
    seen = place_of(make_run(tmp_path), recipe).look()
    assert (seen.machines, seen.unseen) == ([], [ZONE])


def test_several_slices_of_a_workload_type(cloud: TpuCloud, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    recipe = tpu_recipe(workload_type="availability_optimized")
    place_of(run, recipe).create(OPTION, 3, is_probe=False)
    cloud.advance(READY_S)
    (seen,) = place_of(run, recipe).look().machines
    assert (seen.phase, seen.num_slices) == (Phase.UP, 2)


def test_a_node_whose_queued_resource_is_gone_is_removed(cloud: TpuCloud, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    api = client.TpuApi()
    wish = Wish(order=ORDER, number=3, zone="us-east5-a", capacity="spot", num_slices=1)
    (spec,) = request(tpu_recipe(), run.url, wish).body["tpu"]["node_spec"]
    message = {"parent": ZONE, "node_id": spec["node_id"], "node": spec["node"]}
    api._client("v2").create_node(request=message)
    place = place_of(run)
    (seen,) = place.look().machines
    assert (seen.phase, seen.name) == (Phase.LOST, spec["node_id"])
    place.delete(seen)
    assert (place.look().machines, cloud.node_ids()) == ([], [])


def test_many_runs_are_listed_once_page_by_page(cloud: TpuCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 10)
    wish = Wish(order=ORDER, number=3, zone="us-east5-a", capacity="spot", num_slices=2)
    recipe, listings = tpu_recipe(), Listings()
    urls = [f"gs://bucket/runs/r{number}" for number in range(25)]
    for url in urls:
        listings.api.create(request(recipe, url, wish))
    found = [listings.zone(ZONE).queued[names.home(url)] for url in urls]
    assert all(len(each) == 1 for each in found)
    assert (cloud.calls["ListNodes"], cloud.calls["ListQueuedResources"]) == (1, 3)


@pytest.mark.parametrize("value", ["tpu.googleapis.com:443", "10.0.0.1:80", "127.0.0.1", "127.0.0.1:0", "x"])
def test_a_stand_in_is_on_this_machine(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.ENDPOINT, value)
    with pytest.raises(UserError, match="loopback"):
        client.TpuApi().nodes(ZONE)
