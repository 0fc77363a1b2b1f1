"""Altered weights are never trained on: bit flips, truncation, zeroing, swapped and missing files."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.checkpoint_lab import Job, Nursery, Storage, nursery_in, storage_of

KINDS = ("flip", "truncate", "zero", "delete", "swap")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def saver(nursery: Nursery) -> Job:
    return nursery.start(devices=2)


@pytest.fixture(scope="module")
def pristine(saver: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1, 2 and 3 committed."""
    run = tmp_path_factory.mktemp("pristine")
    saver.one("open", run=str(run))
    saver.one("train", begin=1, end=3, last=True)
    return run


@pytest.fixture(scope="module")
def live(saver: Job, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Array files of step 3 that are read at all; merged checkpoints keep some that are not."""
    found = []
    step = pristine / "checkpoints" / "3"
    for number, file in enumerate(sorted(step.rglob("d/*"))):
        run = tmp_path_factory.mktemp("live") / str(number)
        shutil.copytree(pristine, run)
        (run / "checkpoints" / "3" / file.relative_to(step)).unlink()
        saver.one("open", run=str(run), attempt=2)
        if saver.one("restore")["step"] == 2:
            found.append(file.relative_to(step))
    assert found
    return found


def test_no_alteration_is_trained_on(saver: Job, pristine: Path, live: list[Path], tmp_path: Path) -> None:
    _alter(saver, pristine, live, tmp_path, range(50))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_alteration_is_trained_on_in_200(
    saver: Job, pristine: Path, live: list[Path], tmp_path: Path
) -> None:
    _alter(saver, pristine, live, tmp_path, range(1000, 1200))


def _alter(saver: Job, pristine: Path, live: list[Path], folder: Path, seeds: range) -> None:
    harmless = []
    for seed in seeds:
        run = folder / str(seed)
        shutil.copytree(pristine, run)
        what = _damage(run / "checkpoints" / "3", live, random.Random(seed))
        saver.one("open", run=str(run), attempt=2)
        answer = saver.one("restore")
        assert answer.get("exact"), (what, answer)
        quarantined = (run / "quarantine" / "checkpoint-3-attempt-2").exists()
        assert (answer["step"], quarantined) in [(2, True), (3, False)], (what, answer)
        if answer["step"] == 3:
            harmless.append(what)
        shutil.rmtree(run)
    # Some bytes are never read; but the test must not pass because its damage does nothing.
    assert len(harmless) <= len(seeds) * 0.3, harmless


def _damage(step: Path, live: list[Path], chance: random.Random) -> str:
    """Alter one file of the arrays or the manifest; gives a description."""
    files = sorted(path for path in step.rglob("*") if path.is_file() and path.parent != step)
    file = step / chance.choice(live) if chance.random() < 0.8 else chance.choice(files)
    content = bytearray(file.read_bytes())
    kind = chance.choice(KINDS)
    place = chance.randrange(len(content)) if content else 0
    if kind == "flip":
        content[place] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del content[place:]
    elif kind == "zero":
        length = min(chance.randrange(1, 4096), len(content) - place)
        content[place : place + length] = bytes(length)
    elif kind == "swap":
        others = [
            path for path in (step.parent / "2" / file.relative_to(step).parent).iterdir() if path.is_file()
        ]
        content[:] = chance.choice(others).read_bytes()
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(content)
    return f"{kind} at {place} of {file.relative_to(step)}"


def test_every_flip_of_a_bit_in_an_array_is_seen(saver: Job, pristine: Path, tmp_path: Path) -> None:
    """Flips in the stored bytes of one array, which the checkpoint library loads without a word."""
    for seed in range(8):
        run = tmp_path / str(seed)
        shutil.copytree(pristine, run)
        largest = max(
            (run / "checkpoints" / "3" / "state").rglob("d/*"), key=lambda path: path.stat().st_size
        )
        content = bytearray(largest.read_bytes())
        content[len(content) // 4 + seed * 101] ^= 1 << seed
        largest.write_bytes(content)
        saver.one("open", run=str(run), attempt=2)
        assert saver.one("restore")["step"] == 2


def test_two_damaged_steps_are_walked_past_and_kept(saver: Job, pristine: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    for step in ("2", "3"):
        shutil.rmtree(run / "checkpoints" / step / "state" / "d")
    saver.one("open", run=str(run), attempt=5)
    answer = saver.one("restore")
    assert (answer["step"], answer["exact"], answer["committed"]) == (1, True, 1)
    assert [text.split(" is damaged")[0] for text in answer["warnings"]] == ["checkpoint 3", "checkpoint 2"]
    assert sorted(path.name for path in (run / "quarantine").iterdir()) == [
        "checkpoint-2-attempt-5",
        "checkpoint-2-attempt-5.json",
        "checkpoint-3-attempt-5",
        "checkpoint-3-attempt-5.json",
    ]
    note = json.loads((run / "quarantine" / "checkpoint-3-attempt-5.json").read_text())
    assert note["step"] == 3 and note["found_by_attempt"] == 5 and note["reason"]


def test_a_step_damaged_twice_keeps_both(saver: Job, pristine: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    for _ in range(2):
        shutil.rmtree(run / "checkpoints" / "3" / "state")
        saver.one("open", run=str(run), attempt=2)
        assert saver.one("restore")["step"] == 2
        saver.one("train", begin=3, end=3, last=True)
    names = sorted(path.name for path in (run / "quarantine").iterdir() if path.is_dir())
    assert names == ["checkpoint-3-attempt-2", "checkpoint-3-attempt-2-2"]


def test_when_all_are_damaged_the_run_does_not_start_from_scratch(
    saver: Job, pristine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    for step in (run / "checkpoints").iterdir():
        shutil.rmtree(step / "state" / "d")
    saver.one("open", run=str(run), attempt=2)
    answer = saver.one("restore")
    assert answer["code"] == 2
    assert "3 were damaged" in answer["error"] and str(run / "quarantine") in answer["error"]
    # Nor does the next attempt.
    saver.one("open", run=str(run), attempt=3)
    answer = saver.one("restore")
    assert answer["code"] == 2 and str(run / "quarantine") in answer["error"]


@pytest.mark.parametrize("how", ["missing", "altered"])
def test_damage_that_one_process_sees_is_damage_for_all(nursery: Nursery, tmp_path: Path, how: str) -> None:
    """Process 1 reads from a copy of the run directory, and only that copy is damaged."""
    job = nursery.start(2)
    job.ask("open", run=str(tmp_path / "run"))
    job.ask("train", begin=1, end=2, last=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    state = tmp_path / "copy" / "checkpoints" / "2" / "state"
    if how == "missing":
        shutil.rmtree(state / "ocdbt.process_0")
        shutil.rmtree(state / "d")
    else:
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "copy" / "checkpoints" / "1" / "state", state)
    job.ask("open", run=(str(tmp_path / "run"), str(tmp_path / "copy")), attempt=2)
    answers = job.ask("restore")
    assert [(answer["step"], answer["exact"]) for answer in answers] == [(1, True), (1, True)]
    job.kill()


@pytest.fixture(scope="module")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with storage_of("gs", tmp_path_factory.mktemp("gs")) as storage:
        yield storage


def test_altered_objects_in_a_bucket_are_moved_and_the_step_saved_again(
    nursery: Nursery, gs: Storage
) -> None:
    job = nursery.start(devices=2, env=gs.env)
    job.one("open", run=gs.run("run"))
    job.one("train", begin=1, end=2, last=True)
    largest = max((gs.step("run", 2) / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 4
    with largest.open("r+b") as file:  # in place, as the server keeps the object's metadata with the file
        file.write(content)
    job.one("open", run=gs.run("run"), attempt=2)
    answer = job.one("restore")
    assert (answer["step"], answer["exact"]) == (1, True)
    moved = gs.folder / "run" / "quarantine" / "checkpoint-2-attempt-2"
    assert (moved / "commit_success.txt").exists() and any((moved / "state").rglob("d/*"))
    assert job.one("train", begin=2, end=2, last=True)["committed"] == 2
    assert os.listdir(moved)
