"""One contract, two back ends: a local folder and the GCS stand-in; and storage weather."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import storage_gcs
from launcher.storage import Conflict, Exists, NotFound, Storage, StorageError, Unavailable, open_storage
from tests.local.faulty_gcs import Fault, faulty_gcs, leaves_sockets
from tests.local.gcs_server import GcsServer, close_clients, running_gcs_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(autouse=True)
def _closed_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture(params=["local", "gs"])
def store(
    request: pytest.FixtureRequest, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "root"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    return open_storage(f"gs://bucket/{tmp_path.name}")


def test_create_is_only_for_what_is_not_there(store: Storage) -> None:
    store.create("a/b.json", b"first")
    with pytest.raises(Exists, match=r"a/b\.json exists already"):
        store.create("a/b.json", b"second")
    assert store.read("a/b.json") == b"first"


def test_replace_goes_by_the_version(store: Storage) -> None:
    first = store.create("a", b"1")
    second = store.replace("a", b"2", if_version=first)
    with pytest.raises(Conflict):
        store.replace("a", b"3", if_version=first)
    assert store.read_versioned("a") == (b"2", second)
    store.replace("a", b"4")
    with pytest.raises(Conflict):
        store.replace("a", b"5", if_version=second)
    assert store.read("a") == b"4"


def test_writing_the_same_bytes_makes_another_version(store: Storage) -> None:
    first = store.create("a", b"same")
    store.replace("a", b"same")
    with pytest.raises(Conflict):
        store.replace("a", b"mine", if_version=first)


def test_replace_of_a_version_that_was_deleted_is_a_conflict(store: Storage) -> None:
    version = store.create("a", b"1")
    store.delete("a")
    with pytest.raises(Conflict):
        store.replace("a", b"2", if_version=version)
    with pytest.raises(NotFound):
        store.read("a")


def test_lists_below_a_folder_not_below_a_prefix_of_its_name(store: Storage) -> None:
    for path in ("run/a.json", "run/x/b.json", "run-2/c.json", "top"):
        store.replace(path, b"")
    assert store.list("run") == ["run/a.json", "run/x/b.json"]
    assert store.list() == ["run-2/c.json", "run/a.json", "run/x/b.json", "top"]
    assert store.children() == ["run", "run-2", "top"]
    assert store.children("run") == ["a.json", "x"]
    assert store.children("none") == store.list("none") == []
    assert store.children("top") == store.list("top") == []
    assert store.child("run").list() == ["a.json", "x/b.json"]


def test_marks_are_of_what_fits_the_pattern_and_change_when_it_is_written(store: Storage) -> None:
    fitting = ("a/end.json", "a/x/1/end.json", "a/x/2/end.json", "b[1]/end.json")
    for path in (*fitting, "a/x/end.json", "a/x/1/y/end.json", "end.json", "a/end.json.1", "a/append.json"):
        store.replace(path, path.encode())
    assert sorted(store.marks("*/end.json")) == ["a/end.json", "b[1]/end.json"]
    assert sorted(store.marks("*/x/*/end.json")) == ["a/x/1/end.json", "a/x/2/end.json"]
    assert sorted(store.marks("a/x/*/end.json")) == ["a/x/1/end.json", "a/x/2/end.json"]
    assert sorted(store.marks("a/e*.json")) == ["a/end.json"]
    assert sorted(store.marks("end.json")) == ["end.json"]
    assert sorted(store.child("b[1]").marks("*.json")) == ["end.json"]
    assert store.marks("none/*/end.json") == store.marks("none.json") == {}
    old = store.marks("*/end.json")
    store.replace("a/end.json", b"a/end.json")
    new = store.marks("*/end.json")
    assert [path for path in new if new[path] != old[path]] == ["a/end.json"]


def test_delete_is_idempotent(store: Storage) -> None:
    store.create("a", b"1")
    store.delete("a")
    store.delete("a")
    store.delete("never/was")
    assert store.list() == []


def test_empty_and_binary_objects_survive(store: Storage) -> None:
    store.create("empty", b"")
    store.create("binary", bytes(range(256)) * 1000)
    assert store.read("empty") == b""
    assert store.read("binary") == bytes(range(256)) * 1000


def test_a_log_grows_by_offset_and_twice_is_once(store: Storage) -> None:
    store.write_log("logs/s0-h0.log", 0, b"one\n")
    store.write_log("logs/s0-h0.log", 4, b"two\n")
    store.write_log("logs/s0-h0.log", 4, b"two\n")
    store.write_log("logs/s0-h0.log.old", 0, b"another log")
    assert store.read_log("logs/s0-h0.log") == b"one\ntwo\n"
    assert store.read_log("logs/s0-h0.log", 2) == b"e\ntwo\n"
    assert store.read_log("logs/s0-h0.log", 2, limit_bytes=3) == b"e\nt"
    assert store.read_log("logs/s0-h0.log", 8) == b""
    assert store.log_size("logs/s0-h0.log") == 8
    assert store.read_log("logs/none.log") == b""
    assert store.log_size("logs/none.log") == 0


@pytest.mark.parametrize("limit_bytes", range(1, 12))
def test_any_window_of_a_log_is_read_whatever_its_parts(store: Storage, limit_bytes: int) -> None:
    whole = b"0123456789"
    for start, end in ((0, 1), (1, 4), (4, 10)):
        store.write_log("logs/a.log", start, whole[start:end])
    assert store.read_log_tail("logs/a.log", limit_bytes) == (
        max(0, 10 - limit_bytes),
        whole[-limit_bytes:],
    )
    for offset in range(12):
        assert store.read_log("logs/a.log", offset) == whole[offset:]
        assert store.read_log("logs/a.log", offset, limit_bytes=limit_bytes) == whole[offset:][:limit_bytes]
    assert store.read_log_tail("logs/none.log", limit_bytes) == (0, b"")


def test_prepared_logs_are_as_any_and_only_once(store: Storage) -> None:
    hosts = ["s0-h0", "s0-h1", "s0-h10", "s1-h0"]
    paths = [f"logs/{host}.log" for host in hosts]
    for path in paths[:3]:
        # More parts than are looked at, of which those of s0-h1 are cut off.
        for offset in range(25):
            store.write_log(path, offset, b"%d" % (offset % 10))
    store.prepare_logs(paths)
    for path in paths:
        whole = b"0123456789012345678901234"
        assert store.read_log(path) == (b"" if path == paths[3] else whole)
    store.prepare_logs(paths)
    store.write_log(paths[0], 25, b"new")
    start, seen = store.read_log_tail(paths[0], 100)
    # What came after the look need not be in the first read.
    assert start == 0
    assert seen in (whole, whole + b"new")
    assert store.read_log(paths[0], 25) == b"new"
    store.prepare_logs([])


def test_many_parts_have_one_stem(store: Storage) -> None:
    assert store.stems("logs") == []
    for name in ("s1-h0.log", "s0-h0.log", "x/s2-h0.log"):
        for offset in (0, 4):
            store.write_log(f"logs/{name}", offset, b"one\n")
    store.replace("logs/none", b"")
    store.replace("logs-2/s3-h0.log", b"")
    assert store.stems("logs") == ["s0-h0", "s1-h0"]


def test_the_url_opens_the_same_store(store: Storage) -> None:
    store.create("x/a", b"1")
    assert open_storage(store.child("x").url).read("a") == b"1"


def test_a_missing_bucket_is_named_with_a_hint(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    store = open_storage("gs://no-such-bucket/runs")
    for act in (store.list, store.children, lambda: store.create("a", b"")):
        with pytest.raises(StorageError, match="bucket no-such-bucket does not exist") as caught:
            act()
        assert "gcloud storage buckets create gs://no-such-bucket" in caught.value.hint
        assert caught.value.exit_code == 2


@leaves_sockets
def test_refused_access_fails_at_once_with_a_hint(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_gcs(server.url) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        weather.plan(403, 403)
        began_s = time.monotonic()
        with pytest.raises(StorageError, match=r"no permission to read gs://bucket/p/a") as caught:
            open_storage("gs://bucket/p").read("a")
        assert weather.requests == 1
        assert time.monotonic() - began_s < 5
        assert "roles/storage.objectUser" in caught.value.hint
        assert caught.value.exit_code == 2


@leaves_sockets
def test_passing_trouble_is_waited_out(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_gcs(server.url) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        store = open_storage("gs://bucket/weather")
        weather.plan(503)
        version = store.create("a", b"1")
        weather.plan(429)
        assert store.read_versioned("a") == (b"1", version)


@leaves_sockets
def test_bytes_that_change_on_the_way_are_fetched_again(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_gcs(server.url) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        store = open_storage("gs://bucket/flipped")
        version = store.create("a", b"right")
        weather.plan(Fault.OTHER_BYTES, Fault.OTHER_BYTES)
        assert store.read_versioned("a") == (b"right", version)
        weather.damaged = "flipped/a"
        weather.requests = 0
        with pytest.raises(StorageError, match=r"gs://bucket/flipped/a is damaged or changed on the way"):
            store.read("a")
        assert weather.requests == storage_gcs.DOWNLOADS


@leaves_sockets
def test_a_part_of_a_log_that_changes_on_the_way_is_named(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_gcs(server.url) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        store = open_storage("gs://bucket/flipped-log")
        store.write_log("a.log", 0, b"one\n")
        store.write_log("a.log", 4, b"two\n")
        weather.damaged = "flipped-log/a.log.000000000000004?"
        assert store.read_log("a.log", limit_bytes=4) == b"one\n"
        with pytest.raises(StorageError, match=r"gs://bucket/flipped-log/a\.log\.000000000000004 is damaged"):
            store.read_log("a.log")


@leaves_sockets
def test_a_write_whose_answer_was_lost_is_known_as_ones_own(
    server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_gcs(server.url) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        store = open_storage("gs://bucket/lost")
        weather.plan(Fault.LOST_ANSWER)
        version = store.create("a", b"1")
        assert weather.requests > 1
        assert store.read_versioned("a") == (b"1", version)
        weather.plan(Fault.LOST_ANSWER)
        store.replace("a", b"2", if_version=version)
        with pytest.raises(Exists):
            store.create("a", b"1")


def test_no_server_at_all_is_not_the_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr(storage_gcs, "RETRY_TIMEOUT_S", 0.2)
    storage_gcs._retry.cache_clear()
    try:
        with pytest.raises(Unavailable) as caught:
            open_storage("gs://bucket/p").read("a")
    finally:
        storage_gcs._retry.cache_clear()
    assert caught.value.exit_code == 75


def test_the_cloud_library_is_imported_by_bucket_addresses_only(tmp_path: Path) -> None:
    code = (
        "import sys; from launcher.storage import open_storage; import launcher.rundir, launcher.summary;"
        f"open_storage({str(tmp_path)!r}).create('a', b''); open_storage('gs://bucket/p');"
        "print([name for name in sys.modules if name.startswith(('google.', 'jax', 'hydra', 'orbax'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.stdout.strip() == "[]"
