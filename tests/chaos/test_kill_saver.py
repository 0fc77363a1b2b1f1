"""Any kill is safe: SIGKILL at seeded moments, named ones among them, and every restore is exact.

A process without a model saves every step; it is killed, started again on the same run directory and
must find what it had committed, bit for bit. The seed of a failing cycle is in the failure's text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.local.checkpoint_lab import Child, Gone, Nursery, Storage, nursery_in, storage_of

POINTS = ("opening", "saving", "writing", "committing", "any")
"""When to kill: while it lists and reads; before the blocking copy; while the arrays are written in the
background; when a commit was just seen and old steps are deleted; or by the clock alone."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@dataclass(kw_only=True, slots=True)
class Known:
    """What the killed processes had said."""

    committed: int = -1
    begun: int = 0


def test_killed_20_times_on_a_local_disk(nursery: Nursery, tmp_path: Path) -> None:
    with storage_of("local", tmp_path) as storage:
        _kill_again_and_again(nursery, storage, range(20))


def test_killed_5_times_on_a_bucket(nursery: Nursery, tmp_path: Path) -> None:
    with storage_of("gs", tmp_path) as storage:
        _kill_again_and_again(nursery, storage, range(100, 105))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "seeds"), [("local", range(1000, 1160)), ("gs", range(2000, 2040))])
def test_killed_200_times(nursery: Nursery, tmp_path: Path, kind: str, seeds: range) -> None:
    with storage_of(kind, tmp_path) as storage:
        _kill_again_and_again(nursery, storage, seeds)


def _kill_again_and_again(nursery: Nursery, storage: Storage, seeds: range) -> None:
    known = Known()
    for number, seed in enumerate(seeds):
        point = POINTS[number % len(POINTS)]
        _live_and_die(nursery, storage, known, random.Random(seed), point)
    job = nursery.start(devices=2, env=storage.env)
    reached = _restored(job.children[0], storage, known, "after all")
    assert reached >= len(seeds) / 2, "the processes hardly ran"
    job.kill()


def _live_and_die(
    nursery: Nursery, storage: Storage, known: Known, chance: random.Random, point: str
) -> None:
    job = nursery.start(devices=2, env=storage.env)
    (child,) = job.children
    if point == "opening":
        child.send("open", run=storage.run("run"), keep=2)
        child.send("restore")
        time.sleep(chance.uniform(0.0, 0.5))
        job.kill()
        return
    first = 1 + _restored(child, storage, known, f"before {point}")
    child.send("train", begin=first, end=first + 10_000, step_s=0.02)
    _follow_until(child, known, chance, point)
    job.children[0].kill()
    _hear_the_rest(child, known)
    job.kill()


def _restored(child: Child, storage: Storage, known: Known, when: str) -> int:
    """Restore, compare with what is known, and give the step; 0 when there is none."""
    child.send("open", run=storage.run("run"), keep=2)
    assert child.answer().get("done") == "open", when
    child.send("restore")
    answer = child.answer()
    step = answer.get("step", "an error")
    assert not (storage.folder / "run" / "quarantine").exists(), (when, answer)
    # What was reported as committed is there; at most the save under way and the one before are lost.
    at_least = max(known.committed, known.begun - 2, 0)
    assert at_least <= (step or 0) <= known.begun, (when, answer, known)
    assert step is None or answer["exact"], (when, answer)
    known.committed, known.begun = (-1, 0) if step is None else (step, step)
    return step or 0


def _follow_until(child: Child, known: Known, chance: random.Random, point: str) -> None:
    """Listen until it is time to kill."""
    patience = chance.randint(1, 4)
    end_s = time.monotonic() + chance.uniform(0.1, 2.0)
    event = {"saving": "saving", "writing": "step", "committing": "committed", "any": "none"}[point]
    while patience > 0 and (point != "any" or time.monotonic() < end_s):
        before = known.committed
        what = _hear(child, known)
        if what == event or (event == "committed" and known.committed > before):
            patience -= 1
    time.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 0.08)]))


def _hear(child: Child, known: Known) -> str:
    line = child.read()
    assert "event" in line, line
    known.begun = max(known.begun, line["step"])
    known.committed = max(known.committed, line.get("committed", -1))
    return str(line["event"])


def _hear_the_rest(child: Child, known: Known) -> None:
    try:
        while True:
            _hear(child, known)
    except Gone:
        pass
