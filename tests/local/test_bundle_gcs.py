"""Code bundles against the GCS stand-in: one upload, races, kills, damage, large archives."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.bundle import bundle_path, fetch, is_uploaded, make_bundle, upload
from launcher.storage import Storage, StorageError, open_storage
from recipes.errors import UserError
from tests.local.faulty_gcs import Fault, Weather, faulty_gcs, leaves_sockets
from tests.local.gcs_server import GcsServer, close_clients, running_gcs_server

WORKER = """
import sys
from pathlib import Path
from launcher.bundle import make_bundle, upload
from launcher.storage import open_storage
bundle, storage = make_bundle(Path(sys.argv[1])), open_storage(sys.argv[2])
storage.exists("warm")
print("ready", flush=True)
sys.stdin.readline()
print(upload(storage, bundle), flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(autouse=True)
def _closed_clients(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield
    close_clients()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"gs://bucket/{tmp_path.name}/team runs"


@pytest.fixture
def storage(root: str) -> Storage:
    return open_storage(root)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Half a megabyte that does not compress."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("print(1)\n")
    (folder / "noise").write_bytes(os.urandom(2**19))
    return folder


def test_there_and_back(code: Path, storage: Storage, tmp_path: Path) -> None:
    bundle = make_bundle(code)
    assert storage.exists(bundle_path(bundle.digest)) is False
    assert upload(storage, bundle) is True
    assert storage.exists(bundle_path(bundle.digest)) is True
    assert storage.children() == [".bundles"]
    fetched = fetch(storage, bundle.digest, tmp_path / "into")
    assert (fetched / "noise").read_bytes() == (code / "noise").read_bytes()
    assert fetch(storage, bundle.digest, tmp_path / "into") == fetched


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Iterator[Weather]:
    with faulty_gcs(os.environ["STORAGE_EMULATOR_HOST"]) as weather:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", weather.url)
        yield weather


def test_unchanged_code_costs_one_small_request(code: Path, weather: Weather, root: str) -> None:
    assert upload(open_storage(root), make_bundle(code)) is True
    before = weather.requests
    assert is_uploaded(open_storage(root), make_bundle(code).digest)
    assert weather.requests - before == 1


@leaves_sockets
def test_an_upload_whose_answer_is_lost_is_done(code: Path, weather: Weather, root: str) -> None:
    weather.plan(503, Fault.LOST_ANSWER, Fault.LOST_ANSWER)
    assert upload(open_storage(root), make_bundle(code)) is True
    assert len(open_storage(root).list()) == 1


@leaves_sockets
def test_a_fetch_through_bad_weather(code: Path, weather: Weather, root: str, tmp_path: Path) -> None:
    bundle = make_bundle(code)
    upload(open_storage(root), bundle)
    weather.plan(503, Fault.LOST_ANSWER, 429)
    assert fetch(open_storage(root), bundle.digest, tmp_path / "into").is_dir()


def test_an_archive_larger_than_one_upload_request(tmp_path: Path, storage: Storage) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "noise").write_bytes(os.urandom(20 * 2**20))
    bundle = make_bundle(tmp_path / "code")
    assert upload(storage, bundle) is True
    assert (fetch(storage, bundle.digest, tmp_path / "into") / "noise").stat().st_size == 20 * 2**20
    assert is_uploaded(storage, bundle.digest)


def workers(count: int, code: Path, root: str) -> list[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    argv = [sys.executable, "-c", WORKER, str(code), root]
    started = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    return started


def test_of_two_that_upload_at_once_one_does(code: Path, root: str, storage: Storage, tmp_path: Path) -> None:
    racers = workers(2, code, root)
    for process in racers:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    answers = sorted(process.communicate(timeout=60)[0] for process in racers)
    assert answers == ["False\n", "True\n"]
    assert [process.returncode for process in racers] == [0, 0]
    assert len(storage.list()) == 1
    assert fetch(storage, make_bundle(code).digest, tmp_path / "into").is_dir()


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_killed_upload_leaves_nothing_or_all(
    delay_s: float, code: Path, root: str, storage: Storage, tmp_path: Path
) -> None:
    (process,) = workers(1, code, root)
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    bundle = make_bundle(code)
    assert len(storage.list()) in (0, 1)
    upload(storage, bundle)
    assert (fetch(storage, bundle.digest, tmp_path / "into") / "a.py").read_text() == "print(1)\n"


def test_many_hosts_of_one_machine_fetch_at_once(code: Path, storage: Storage, tmp_path: Path) -> None:
    bundle = make_bundle(code)
    upload(storage, bundle)
    fetched: list[Path] = []
    threads = [
        threading.Thread(target=lambda: fetched.append(fetch(storage, bundle.digest, tmp_path / "into")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(fetched) == {tmp_path / "into" / bundle.sha256}
    assert len(fetched) == 6
    assert [path.name for path in (tmp_path / "into").iterdir()] == [bundle.sha256]


def test_another_archive_under_the_name_is_refused(code: Path, storage: Storage, tmp_path: Path) -> None:
    digest = make_bundle(code).digest
    storage.create(bundle_path(digest), gzip.compress(b"evil"))
    assert upload(storage, make_bundle(code)) is False
    with pytest.raises(UserError, match="is damaged or was replaced") as caught:
        fetch(storage, digest, tmp_path / "into")
    assert f"{storage.url}/.bundles/" in caught.value.message
    assert not (tmp_path / "into").exists()


def test_no_bucket(code: Path, tmp_path: Path) -> None:
    storage = open_storage("gs://no-such-bucket/runs")
    with pytest.raises(StorageError, match="bucket no-such-bucket does not exist"):
        upload(storage, make_bundle(code))
