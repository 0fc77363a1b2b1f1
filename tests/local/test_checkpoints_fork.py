"""The first checkpoint of a fork is its source's, bit for bit; the source is only read."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import ledger
from launcher.storage import open_storage
from recipes.contract import Fork, RunPath
from tests.local.checkpoint_lab import Job, Nursery, nursery_in, storage_of


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def alone(nursery: Nursery) -> Job:
    return nursery.start(devices=2)


@pytest.fixture(scope="module")
def pristine(alone: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1, 2 and 3 committed."""
    run = tmp_path_factory.mktemp("pristine")
    alone.one("open", run=str(run))
    alone.one("train", begin=1, end=3, last=True)
    return run


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    """A new run that is forked from step 3 of ``source``."""
    _write(tmp_path / "run", _fork(source))
    return tmp_path / "run"


def _fork(source: Path | str) -> Fork:
    return Fork(
        source_url=str(source), source_run="source", step=3, source_fingerprint="r", changed_keys=["x.y"]
    )


def _write(run: Path, fork: Fork) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / RunPath.FORK).write_bytes(ledger.encode(fork))


def _files(folder: Path) -> dict[str, str]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_a_fork_begins_with_its_source_and_then_stands_alone(alone: Job, source: Path, run: Path) -> None:
    before = _files(source)
    alone.one("open", run=str(run), recipe="another", data="other")
    answer = alone.one("restore", devices=1)
    assert (answer["step"], answer["exact"], answer["placed"], answer["committed"]) == (3, True, True, 3)
    assert _files(source) == before
    shutil.rmtree(source)
    assert alone.one("train", begin=4, end=5, last=True)["committed"] == 5
    for newest in (5, 3):
        alone.one("open", run=str(run), recipe="another", data="other", attempt=2)
        answer = alone.one("restore")
        assert (answer["step"], answer["exact"]) == (newest, True)
        for step in (4, 5):
            shutil.rmtree(run / RunPath.CHECKPOINTS / str(step), ignore_errors=True)


def test_what_a_killed_first_save_left_does_not_count(alone: Job, run: Path) -> None:
    (run / RunPath.CHECKPOINTS / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    alone.one("open", run=str(run), recipe="another")
    answer = alone.one("restore")
    assert (answer["step"], answer["exact"], answer["committed"]) == (3, True, 3)


def test_two_processes_begin_a_fork_together(nursery: Nursery, run: Path) -> None:
    job = nursery.start(2, devices=4)
    job.ask("open", run=str(run), recipe="another")
    answers = job.ask("restore")
    assert [(answer["step"], answer["exact"], answer["committed"]) for answer in answers] == [
        (3, True, 3)
    ] * 2
    job.kill()


def test_a_fork_in_a_bucket(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with storage_of("gs", tmp_path / "gs") as storage:
        for name, value in storage.env.items():
            monkeypatch.setenv(name, value)
        job = nursery.start(devices=2, env=storage.env)
        job.one("open", run=storage.run("source"))
        job.one("train", begin=3, end=3, last=True)
        fork = ledger.encode(_fork(storage.run("source")))
        open_storage(storage.run("run")).create(RunPath.FORK, fork)
        job.one("open", run=storage.run("run"), recipe="another")
        answer = job.one("restore")
        assert (answer["step"], answer["exact"], answer["committed"]) == (3, True, 3)
        job.kill()


@pytest.mark.parametrize(
    ("harm", "message", "hint"),
    [
        ("gone", "is not there any more", "fork again under another name"),
        ("uncommitted", "is not there any more", "fork again under another name"),
        ("altered", "which this run begins with, is damaged", "launch source once more"),
        ("another run", "is of another experiment", "fork again under another name"),
        ("another model", "is of another model", "keeps the arrays of model and optimizer"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused_and_left_alone(
    harm: str, message: str, hint: str, alone: Job, source: Path, run: Path
) -> None:
    step = source / RunPath.CHECKPOINTS / "3"
    if harm == "gone":
        shutil.rmtree(step)
    elif harm == "uncommitted":
        (step / "commit_success.txt").unlink()
    elif harm == "altered":
        (step / "manifest" / "metadata").write_text("{}")
    elif harm == "another run":
        _write(run, dataclasses.replace(_fork(source), source_fingerprint="later"))
    before = _files(source)
    alone.one("open", run=str(run), recipe="another")
    answer = alone.one("restore", model="wider" if harm == "another model" else "")
    assert (answer.get("code"), message in answer.get("error", "")) == (2, True), answer
    assert hint in answer["hint"]
    assert _files(source) == before
    assert not list((run / RunPath.CHECKPOINTS).glob("[0-9]*"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": "3"}', "null"])
def test_a_damaged_fork_file_is_one_error(text: str, alone: Job, run: Path) -> None:
    (run / RunPath.FORK).write_text(text)
    alone.one("open", run=str(run), recipe="another")
    answer = alone.one("restore")
    assert (answer.get("code"), answer.get("error")) == (2, "fork.json in the run directory is damaged")
