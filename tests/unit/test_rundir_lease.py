"""Who gets the lease, as a table over its states; the clock is injected."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import lease
from launcher.processes import ProcessId
from launcher.storage import Storage as Store
from launcher.storage import StorageError, open_storage


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_storage(str(tmp_path))


def _other() -> lease.Owner:
    # A number that no process here has.
    process = ProcessId(pid=2**22 + 1, started="other/pid:[1]/5")
    return dataclasses.replace(lease.this_process("muster launch"), hostname="elsewhere", process=process)


def test_a_free_run_is_taken_and_then_refused(store: Store) -> None:
    lease.acquire(store, lease.this_process("muster launch"), 100.0)
    with pytest.raises(lease.LeaseHeld, match=f"in use by muster launch .process {os.getpid()} on") as caught:
        lease.acquire(store, lease.this_process("muster launch"), 101.0)
    assert "muster stop" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("after_s", "free"),
    [
        (0.0, False),
        (lease.LEASE_S, False),
        (lease.LEASE_S + lease.CLOCK_SKEW_S, False),
        (lease.LEASE_S + 6, True),
    ],
)
def test_another_machines_lease_ends_only_by_time(after_s: float, free: bool, store: Store) -> None:
    lease.acquire(store, _other(), 100.0)
    assert lease.is_held(lease.read(store), 100.0 + after_s) is not free
    if free:
        lease.acquire(store, lease.this_process("next"), 100.0 + after_s)
    else:
        with pytest.raises(lease.LeaseHeld):
            lease.acquire(store, lease.this_process("next"), 100.0 + after_s)


def test_a_dead_process_of_this_machine_holds_nothing(store: Store) -> None:
    code = (
        "import sys; from launcher import lease; from launcher.storage import open_storage;"
        "lease.acquire(open_storage(sys.argv[1]), lease.this_process('victim'), 100.0)"
    )
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code, store.url], check=True, env=environ)
    left = lease.read(store)
    assert left is not None
    assert not left.released
    assert lease.acquire(store, lease.this_process("next"), 101.0).lease.owner.what == "next"


def test_a_process_id_that_was_used_again_is_not_the_owner(store: Store) -> None:
    owner = lease.this_process("before")
    earlier = dataclasses.replace(owner.process, started=f"{owner.process.machine}/1")
    lease.acquire(store, dataclasses.replace(owner, process=earlier), 100.0)
    lease.acquire(store, lease.this_process("next"), 101.0)


def test_renewing_keeps_it(store: Store) -> None:
    held = lease.acquire(store, _other(), 100.0)
    held = lease.renew(store, held, 150.0)
    held = lease.renew(store, held, 200.0)
    with pytest.raises(lease.LeaseHeld):
        lease.acquire(store, lease.this_process("next"), 250.0)


def test_who_lost_it_is_told_and_takes_nothing_back(store: Store) -> None:
    first = lease.acquire(store, _other(), 100.0)
    lease.acquire(store, lease.this_process("next"), 200.0)
    with pytest.raises(lease.LeaseLost) as caught:
        lease.renew(store, first, 201.0)
    assert caught.value.exit_code == 75
    lease.release(store, first)
    now = lease.read(store)
    assert now is not None
    assert now.owner.what == "next"
    assert not now.released


def test_releasing_leaves_a_marker_and_frees_the_run(store: Store) -> None:
    held = lease.acquire(store, lease.this_process("first"), 100.0)
    lease.release(store, held)
    left = lease.read(store)
    assert left is not None
    assert left.released
    lease.acquire(store, lease.this_process("second"), 101.0)
    lease.release(store, held)
    assert lease.is_held(lease.read(store), 101.0)


def test_a_damaged_lease_is_named_not_taken(store: Store) -> None:
    store.create("lease.json", b"{}")
    with pytest.raises(StorageError, match=r"lease\.json is damaged: owner is not an object") as caught:
        lease.acquire(store, lease.this_process("next"), 1.0)
    assert "damaged or was not written by Muster" in caught.value.hint
    assert f"move {store.url}/lease.json away" in caught.value.hint


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1" + "0" * 400])
def test_a_lease_without_a_finite_end_is_damaged(number: str, store: Store) -> None:
    lease.acquire(store, _other(), 100.0)
    whole = store.read("lease.json").decode()
    store.replace("lease.json", whole.replace('"expires_s": 160.0', f'"expires_s": {number}').encode())
    with pytest.raises(StorageError, match="expires_s is not a finite number"):
        lease.acquire(store, lease.this_process("next"), 1e12)


@pytest.mark.parametrize(
    ("acquired_s", "message"),
    [
        (100.0, "in use by muster launch .* on elsewhere.$"),
        (700.0, "in use by muster launch .* on elsewhere.$"),
        (701.0, "until 1970-01-01 00:12:41 UTC, by a clock that is wrong: .* here it is 1970-01-01 00:01:40"),
        (1e18, "until a year beyond 9999, by a clock that is wrong"),
    ],
)
def test_a_lease_far_ahead_is_a_wrong_clocks(acquired_s: float, message: str, store: Store) -> None:
    lease.acquire(store, _other(), acquired_s)
    with pytest.raises(lease.LeaseHeld, match=message) as caught:
        lease.acquire(store, lease.this_process("next"), 100.0)
    wrong = "clock" in message
    assert ("lease.json away" in caught.value.hint) is wrong
    assert ("muster stop" in caught.value.hint) is not wrong


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["recipe.yaml", "lease.json"], "the run directory {} is gone"),
        (["lease.json"], "{}/lease.json is gone"),
    ],
)
def test_a_lease_that_was_removed_was_not_taken_over(removed: list[str], message: str, store: Store) -> None:
    store.create("recipe.yaml", b"")
    held = lease.acquire(store, _other(), 100.0)
    for path in removed:
        store.delete(path)
    with pytest.raises(lease.LeaseLost) as caught:
        lease.renew(store, held, 101.0)
    assert caught.value.message == message.format(store.url)
    lease.release(store, held)
    assert lease.read(store) is None
