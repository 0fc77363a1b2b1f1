"""``muster supervise --all`` over a thousand runs on the stand-in: what one pass takes."""

from __future__ import annotations

import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from launcher.attempts import Opening, number_attempt
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from launcher.supervise.fleet import RunFacts
from launcher.supervise.fleet_loop import Overseer
from launcher.supervise.place import Place
from launcher.supervise.records import Order, Provision
from launcher.supervise.wanted import zone_place
from launcher.tpu.client import TpuApi
from launcher.tpu.listing import Listings
from launcher.tpu.place import TpuPlace
from launcher.tpu.request import Wish, request
from recipes.schema import Recipe
from tests.tpu.cloud import ManualClock, TpuCloud
from tests.tpu.simulated import ZONE, tpu_recipe

NUM_RUNS = 1000
CPU_S, MEMORY_BYTES = 5.0, 500 * 2**20


def launched(root: Path, number: int, api: TpuApi, now: float) -> None:
    """A run whose machines are up and whose attempt is under way."""
    recipe = tpu_recipe(root, 1000, run={"name": f"run-{number}"})
    run = create_or_open(open_storage(recipe.run_dir), recipe, {}).run
    path, body = launched_recipe(recipe)
    run.storage.replace(path, body)
    order = Order(id=f"o{number}", recipe=path, bundle="sha256:" + 64 * "0", launched_s=now, by="me")
    run.write_order(order)
    wish = Wish(order=order, number=1, zone=ZONE, capacity="spot", num_slices=2)
    asked = request(recipe, run.url, wish)
    api.create(asked)
    run.write_provision(
        Provision(
            number=1,
            order=order.id,
            place=zone_place(recipe.target.project, ZONE),
            capacity="spot",
            num_slices=2,
            is_probe=False,
            name=asked.resource_id,
            num_chips=2,
            usd_per_hour=2.0,
            requested_s=now,
            is_created=True,
            ready_s=now + 100,
        )
    )
    opening = Opening(recipe=recipe, hosts=["s0-h0", "s1-h0"], job=order.id, lock={})
    number_attempt(run, opening, now + 200)


@pytest.mark.timeout(300)
def test_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    with TpuCloud(tmp_path / "cloud", clock=clock, with_workers=False) as cloud:
        cloud.quota(ZONE, 10_000)
        cloud.stock(ZONE, 10_000)
        monkeypatch.setenv("MUSTER_TPU_ENDPOINT", cloud.endpoint)
        listings, root = Listings(TpuApi()), tmp_path / "runs"
        for number in range(NUM_RUNS):
            launched(root, number, listings.api, clock())
        cloud.advance(300)
        assert len(cloud.node_ids()) == 2 * NUM_RUNS

        def place(run: RunDir, facts: RunFacts, recipe: Recipe) -> Place:
            assert facts.order is not None
            return TpuPlace(run=run, recipe=recipe, order=facts.order, listings=listings)

        said: list[str] = []
        overseer = Overseer(
            open_storage(str(root)), place, begin_pass=listings.forget, say=said.append, what="all", now=clock
        )
        first_s, steady_s, calls = time.process_time(), 0.0, 0
        # What this process had before belongs to other tests and to the stand-in.
        before_bytes = psutil.Process().memory_info().rss
        for count in range(2):
            cloud.calls.clear()
            before_s = time.process_time()
            done = overseer.once()
            steady_s = time.process_time() - before_s
            calls = sum(cloud.calls.values())
            assert (done.num_runs, done.num_acted, done.problems) == (NUM_RUNS, 0, {})
            print(f"pass {count + 1}: {steady_s:.2f} s of CPU, the stand-in's included; {calls} calls")
        memory_bytes = psutil.Process().memory_info().rss - before_bytes
        print(f"both: {time.process_time() - first_s:.2f} s of CPU; {memory_bytes / 2**20:.0f} MiB more")
        # Two kinds of things, a thousand a page.
        assert cloud.calls == {"ListQueuedResources": 1, "ListNodes": 2} and calls == 3
        assert steady_s < CPU_S
        assert memory_bytes < MEMORY_BYTES
        assert set(done.waits.values()) == {"attempt 1 is under way"} and not said
