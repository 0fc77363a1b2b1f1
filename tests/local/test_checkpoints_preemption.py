"""A notice to one process makes all of them save the same step, whatever they were doing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.checkpoint_lab import Job, Nursery, Storage, nursery_in, storage_of


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture(scope="module", params=["local", "gs"])
def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with storage_of(request.param, tmp_path_factory.mktemp("storage")) as storage:
        yield storage


def _notice(job: Job, rank: int) -> None:
    job.children[rank].kill(signal.SIGTERM)


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_notice_to_one_process_saves_one_step_on_all(
    nursery: Nursery, storage: Storage, count: int, rank: int
) -> None:
    run = storage.run(f"notice-{count}-{rank}")
    job = nursery.start(count, env=storage.env)
    job.ask("open", run=run, save_interval_steps=1000)
    for child in job.children:
        child.send("train", begin=1, end=1000, step_s=0.1)
    job.children[rank].read()
    begin_s = time.monotonic()
    _notice(job, rank)
    answers = [child.answer() for child in job.children]
    assert time.monotonic() - begin_s < 15.0
    (step,) = {answer["step"] for answer in answers}
    assert all(answer["preempted"] for answer in answers)
    assert [answer["committed"] for answer in answers] == [step] * count
    job.kill()
    again = nursery.start(env=storage.env)
    again.one("open", run=run, attempt=2)
    answer = again.one("restore")
    assert (answer["step"], answer["exact"]) == (step, True)
    again.kill()


def test_a_notice_during_restore_of_a_later_step_is_not_missed(nursery: Nursery, tmp_path: Path) -> None:
    """JAX's meeting point is one call after the highest number heard of, and before the first call
    that is 0: counted in steps, a run resumed at step 100 would never get there."""
    run = str(tmp_path)
    job = nursery.start(2)
    job.ask("open", run=run)
    job.ask("train", begin=100, end=100, last=True)
    job.kill()
    job = nursery.start(2)
    job.ask("open", run=run, save_interval_steps=1000)
    _notice(job, 1)
    job.ask("restore")
    answers = job.ask("train", begin=101, end=200, step_s=0.1)
    (step,) = {answer["step"] for answer in answers}
    assert 101 <= step < 150 and all(answer["preempted"] for answer in answers)
    assert [answer["committed"] for answer in answers] == [step] * 2
    job.kill()


def test_a_notice_before_the_first_step_needs_no_save(nursery: Nursery, tmp_path: Path) -> None:
    run = str(tmp_path)
    job = nursery.start(1)
    job.one("open", run=run)
    job.one("train", begin=5, end=5, last=True)
    job.kill()
    commit = tmp_path / "checkpoints" / "5" / "commit_success.txt"
    before = commit.stat().st_mtime_ns
    job = nursery.start(2)
    job.ask("open", run=run, attempt=2)
    job.ask("restore")
    _notice(job, 0)
    deadline_s = time.monotonic() + 15.0
    while not (answers := [answer["preempted"] for answer in job.ask("preempted")])[0]:
        assert time.monotonic() < deadline_s
    assert answers == [True, True]
    # It stays so, and the same step is not written a second time.
    answers = [(answer["preempted"], answer["committed"]) for answer in job.ask("train", begin=5, end=5)]
    assert answers == [(True, 5), (True, 5)]
    assert commit.stat().st_mtime_ns == before
    job.kill()
