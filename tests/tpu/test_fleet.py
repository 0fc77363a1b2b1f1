"""Looking at a thousand runs: what is listed, what is read, and what one damaged run does to the others."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from launcher import lease, ledger
from launcher.ledger import AttemptEnd, AttemptStart, Heartbeat, HostRecord, StopRequest
from launcher.processes import ProcessId
from launcher.rundir import launched_recipe
from launcher.storage import Storage, StorageError, open_storage
from launcher.supervise.fleet import PATTERNS, Fleet, observation
from launcher.supervise.place import Look
from launcher.supervise.records import Order, Provision
from recipes.contract import Phase, Progress
from tests.local.gcs_server import GcsServer, close_clients, running_gcs_server
from tests.unit.rundir_support import make_recipe

NOW = 1_800_000_000.0
RECIPE_PATH, RECIPE = launched_recipe(make_recipe())
NUM_LIVE = 50
NUM_RUNS = {"local": 1000, "gs": 200}


class Counting:
    """A storage that counts what is asked of it."""

    def __init__(self, inner: Storage, counts: dict[str, int] | None = None) -> None:
        self._inner, self.counts = inner, {} if counts is None else counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "child":
            return lambda path: Counting(found(path), self.counts)
        if callable(found):
            self.counts[name] = self.counts.get(name, 0) + 1
        return found

    def taken(self) -> Mapping[str, int]:
        """Since the last time."""
        counts = dict(self.counts)
        self.counts.clear()
        return counts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(params=["local", "gs"])
def root(
    request: pytest.FixtureRequest, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    if request.param == "local":
        yield open_storage(str(tmp_path / "root"))
        return
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield open_storage(f"gs://bucket/{tmp_path.name}")
    close_clients()


def order(number: int = 1) -> Order:
    return Order(id=f"o{number}", recipe=RECIPE_PATH, bundle=None, launched_s=NOW + number, by="me")


def provision(*, ended: bool, number: int = 1, **changes: Any) -> Provision:
    values: dict[str, Any] = {
        "number": number,
        "order": "o1",
        "place": "projects/p/locations/z",
        "capacity": "spot",
        "num_slices": 1,
        "is_probe": False,
        "name": "qr",
        "num_chips": 4,
        "usd_per_hour": 1.0,
        "requested_s": NOW,
        "ended_s": NOW + 9 if ended else None,
    }
    return Provision(**(values | changes))


def start(attempt: int = 1, job: str = "o1") -> AttemptStart:
    return AttemptStart(
        attempt=attempt, started_s=NOW + 5 + attempt, hosts=("s0-h0",), from_step=-1, lock={"job": job}
    )


def end(code: int, host: str | None = None) -> AttemptEnd:
    return AttemptEnd(
        end_s=NOW + 8, exit_code=code, first_failing_host=host, message="", hint="", from_step=-1, to_step=3
    )


def held(until_s: float) -> lease.Lease:
    owner = lease.Owner(id="x", hostname="elsewhere", process=ProcessId(pid=1, started=""), what="it")
    return lease.Lease(owner=owner, acquired_s=NOW, expires_s=until_s)


def beat(time_s: float) -> Heartbeat:
    progress = Progress(
        phase=Phase.TRAINING, step=1, num_steps=2, committed_step=-1, time_s=time_s, metrics={}
    )
    return Heartbeat(host="s0-h0", attempt=1, progress=progress)


def objects(*, live: bool) -> Mapping[str, object]:
    """Of one run; one that is not live is complete."""
    records: dict[str, object] = {
        "order.json": order(),
        "provisions/0001.json": provision(ended=not live),
        "attempts/0001/start.json": start(),
        "lease.json": held(NOW + 60),
        "heartbeat/s0-h0.json": beat(NOW + 6),
    }
    return records if live else records | {"attempts/0001/end.json": end(0)}


def put(root: Storage, run: str, **changes: object) -> None:
    """Writes a run that is live, with some records written anew; bytes as they are."""
    for path, record in (dict(objects(live=True)) | changes).items():
        root.replace(f"{run}/{path}", record if isinstance(record, bytes) else ledger.encode(record))
    root.replace(f"{run}/{RECIPE_PATH}", RECIPE)


def fill(root: Storage, number: int) -> None:
    wanted = [
        (f"run-{each}/{path}", ledger.encode(record))
        for each in range(number)
        for path, record in objects(live=each < NUM_LIVE).items()
    ]
    wanted += [(f"run-{each}/{RECIPE_PATH}", RECIPE) for each in range(NUM_LIVE)]
    if root.url.startswith("gs://"):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda each: root.replace(*each), wanted))
        return
    for path, data in wanted:
        target = Path(root.url, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def test_a_pass_over_many_runs_lists_little_and_reads_what_is_new(root: Storage) -> None:
    number = NUM_RUNS["gs" if root.url.startswith("gs://") else "local"]
    fill(root, number)
    counting = Counting(root)
    fleet = Fleet(cast(Storage, counting), None)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fleet.refresh(NOW + 20)
    # Of each: order, provision, start; of complete ones the end; of live ones lease, heartbeat and recipe.
    assert counting.taken() == {"marks": len(PATTERNS), "read": 4 * number + 2 * NUM_LIVE}
    assert len(fleet.runs()) == NUM_LIVE
    began_s = time.process_time()
    fleet.refresh(NOW + 30)
    runs = fleet.runs()
    assert time.process_time() - began_s < 2.0
    assert counting.taken() == {"marks": len(PATTERNS)}
    assert [facts.name for facts in runs] == sorted(f"run-{each}" for each in range(NUM_LIVE))
    assert all(facts.is_held and facts.recipe == make_recipe() and not facts.problems for facts in runs)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300 * 1024

    root.replace("run-7/stop.json", ledger.encode(StopRequest(requested_s=NOW, by="me")))
    root.replace("run-8/heartbeat/s0-h0.json", ledger.encode(beat(NOW + 31)))
    fleet.refresh(NOW + 40)
    assert counting.taken() == {"marks": len(PATTERNS), "read": 1}
    seen = {facts.name: facts for facts in fleet.runs()}
    assert seen["run-7"].stop is not None
    assert seen["run-8"].stop is None
    assert (seen["run-7"].beat_s, seen["run-8"].beat_s) == (NOW + 6, NOW + 40)


def test_one_run_by_its_name_also_when_it_is_complete(root: Storage) -> None:
    put(root, "run", **{"attempts/0001/end.json": end(0), "provisions/0001.json": provision(ended=True)})
    put(root, "run-2")
    everything, one = Fleet(root, None), Fleet(root, ["run"])
    for fleet in (everything, one):
        fleet.refresh(NOW)
    assert [facts.name for facts in everything.runs()] == ["run-2"]
    (facts,) = one.runs()
    assert (facts.name, facts.attempt, len(facts.ends)) == ("run", None, 1)


def test_a_complete_run_that_is_launched_anew_is_wanted_again(root: Storage) -> None:
    put(root, "run", **{"attempts/0001/end.json": end(0), "provisions/0001.json": provision(ended=True)})
    fleet = Fleet(root, None)
    fleet.refresh(NOW)
    assert not fleet.runs()
    root.replace("run/order.json", ledger.encode(order(2)))
    fleet.refresh(NOW)
    (facts,) = fleet.runs()
    assert (facts.order, facts.ends, facts.attempt) == (order(2), [], None)


@pytest.mark.parametrize(
    "path", ["order.json", "lease.json", "supervisor.json", "provisions/0001.json", RECIPE_PATH]
)
def test_nothing_is_decided_without_what_is_damaged_and_others_go_on(tmp_path: Path, path: str) -> None:
    root = open_storage(str(tmp_path))
    put(root, "bad")
    put(root, "good")
    root.replace(f"bad/{path}", b"{")
    fleet = Fleet(root, None)
    fleet.refresh(NOW)
    bad, good = fleet.runs()
    assert len(bad.problems) == 1
    assert f"bad/{path}" in bad.problems[0]
    with pytest.raises(StorageError, match="is damaged"):
        observation(bad, Look(machines=()))
    assert not good.problems
    assert observation(good, Look(machines=())).is_held
    put(root, "bad")
    if path == "supervisor.json":
        root.delete("bad/supervisor.json")
    fleet.refresh(NOW)
    assert not fleet.runs()[0].problems
    assert fleet.runs()[0].unusable is None


def test_a_damaged_end_is_an_end_and_a_damaged_stop_is_a_stop(tmp_path: Path) -> None:
    root = open_storage(str(tmp_path))
    put(root, "run", **{"attempts/0001/end.json": b"{", "stop.json": b"{"})
    fleet = Fleet(root, None)
    fleet.refresh(NOW)
    (facts,) = fleet.runs()
    assert len(facts.problems) == 2
    seen = observation(facts, Look(machines=()))
    assert (seen.attempt, list(seen.ends)) == (None, [])
    assert seen.stop is not None


def test_attempts_of_this_order_and_machines_that_failed_on_this_provision(tmp_path: Path) -> None:
    root = open_storage(str(tmp_path))
    put(
        root,
        "run",
        **{
            "attempts/0001/start.json": start(1, "o0"),
            "attempts/0001/end.json": end(75, "s0-h0"),
            "attempts/0002/start.json": start(2),
            "attempts/0002/end.json": end(75, "s0-h1"),
            "attempts/0002/hosts/s0-h1.json": HostRecord(host="s0-h1", hostname="vm-1", pid=1, start_s=NOW),
            "attempts/0003/start.json": start(3),
            # A probe that is asked for later is no reason to forget what failed on the others.
            "provisions/0002.json": provision(ended=False, number=2, is_probe=True, requested_s=NOW + 50),
        },
    )
    counting = Counting(root)
    fleet = Fleet(cast(Storage, counting), None)
    fleet.refresh(NOW)
    (facts,) = fleet.runs()
    assert facts.attempt == start(3)
    assert list(facts.ends) == [end(75, "s0-h1")]
    assert list(facts.failing_machines) == ["vm-1"]
    assert [each.number for each in facts.provisions] == [1, 2]
    counting.taken()
    fleet.refresh(NOW)
    assert fleet.runs() == [facts]
    assert counting.taken() == {"marks": len(PATTERNS)}
