"""P14: of processes that race for a run exactly one gets it, and no two share an attempt number."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from launcher import lease
from launcher.storage import open_storage
from tests.local.gcs_server import GcsServer, running_gcs_server

NUM_WORKERS = 4
NOW_S = 1_000_000.0

type Race = Callable[[str, str, int], Sequence[str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def race(server: GcsServer) -> Iterator[Race]:
    """Lets all workers do one thing at once and gives their answers."""
    environ = {**os.environ, **server.env, "PYTHONPATH": os.getcwd()}
    argv = [sys.executable, "-m", "tests.local.race_worker"]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
            )
            for _ in range(NUM_WORKERS)
        ]

        def run(what: str, url: str, seed: int) -> Sequence[str]:
            for index, worker in enumerate(workers):
                assert worker.stdin
                worker.stdin.write(f"{what} {url} {seed}-{index} {NOW_S}\n")
                worker.stdin.flush()
            return [_answer(worker) for worker in workers]

        assert [_answer(worker) for worker in workers] == ["ready"] * NUM_WORKERS
        yield run
        for worker in workers:
            assert worker.stdin
            worker.stdin.close()


def _answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout
    return worker.stdout.readline().strip()


@pytest.fixture(params=["local", "gs"])
def root(
    request: pytest.FixtureRequest, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path)
        return
    from launcher import storage_gcs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield f"gs://bucket/{tmp_path.name}"
    storage_gcs._client_of(server.url).close()
    storage_gcs._client_of.cache_clear()


def _prepare(url: str, seed: int) -> None:
    """A third of the races each: nobody had the lease, it was released, it expired."""
    if seed % 3 == 0:
        return
    store = open_storage(url)
    held = lease.acquire(store, lease.this_process("before"), NOW_S - 1000)
    if seed % 3 == 1:
        lease.release(store, held)


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.long)])
def test_one_winner_of_the_lease(count: int, root: str, race: Race) -> None:
    for seed in range(count):
        url = f"{root}/run-{seed}"
        _prepare(url, seed)
        answers = race("lease", url, seed)
        assert sorted(answers) == ["lost"] * (NUM_WORKERS - 1) + ["won"], f"race {seed}"


@pytest.mark.parametrize("count", [4, pytest.param(25, marks=pytest.mark.long)])
def test_no_attempt_number_twice(count: int, root: str, race: Race) -> None:
    numbers = [int(answer) for seed in range(count) for answer in race("attempt", f"{root}/run", seed)]
    assert sorted(numbers) == list(range(1, count * NUM_WORKERS + 1))
