"""Half a save is never restored, and nothing of it stops the run: every state that a kill can leave."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.checkpoint_lab import Job, Storage, nursery_in, storage_of


@pytest.fixture(scope="module", params=["local", "gs"])
def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with storage_of(request.param, tmp_path_factory.mktemp("storage")) as storage:
        yield storage


@pytest.fixture(scope="module")
def saver(storage: Storage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery.start(devices=2, env=storage.env)


@pytest.fixture(scope="module")
def pristine(saver: Job, storage: Storage) -> Path:
    """A run with steps 1 and 2 committed."""
    saver.one("open", run=storage.run("pristine"))
    saver.one("train", begin=1, end=2, last=True)
    return storage.folder / "pristine"


def _nothing(step: Path) -> None:
    pass


def _no_commit_file(step: Path) -> None:
    (step / "commit_success.txt").unlink()


def _only_commit_file(step: Path) -> None:
    for path in [*step.iterdir()]:
        if path.name != "commit_success.txt":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _empty_commit_file(step: Path) -> None:
    (step / "commit_success.txt").write_bytes(b"")


def _no_state(step: Path) -> None:
    shutil.rmtree(step / "state")


def _no_arrays(step: Path) -> None:
    shutil.rmtree(step / "state" / "d")
    shutil.rmtree(step / "state" / "ocdbt.process_0")


def _no_array_index(step: Path) -> None:
    (step / "state" / "manifest.ocdbt").unlink()


def _no_manifest(step: Path) -> None:
    shutil.rmtree(step / "manifest")


def _half_a_manifest(step: Path) -> None:
    file = step / "manifest" / "metadata"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _temporary_name(step: Path) -> None:
    step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp"))


def _renamed_from_an_older_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("1"), step)


def _state_of_an_older_step(step: Path) -> None:
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name("1") / "state", step / "state")


def _strange_neighbours(step: Path) -> None:
    for name in ("03", "4.5", "-7", "latest", "9e9", "5.orbax-checkpoint-tmp"):
        shutil.copytree(step, step.with_name(name))


ROWS: list[tuple[Callable[[Path], None], int, bool]] = [
    # what is wrong with step 2, the step that is restored, whether step 2 goes to quarantine
    (_nothing, 2, False),
    (_empty_commit_file, 2, False),
    (_strange_neighbours, 2, False),
    (_no_commit_file, 1, False),
    (_temporary_name, 1, False),
    (_only_commit_file, 1, True),
    (_no_state, 1, True),
    (_no_arrays, 1, True),
    (_no_array_index, 1, True),
    (_no_manifest, 1, True),
    (_half_a_manifest, 1, True),
    (_renamed_from_an_older_step, 1, True),
    (_state_of_an_older_step, 1, True),
]


@pytest.mark.parametrize(
    ("damage", "step", "quarantined"), ROWS, ids=lambda value: getattr(value, "__name__", None)
)
def test_only_whole_commits_are_restored(
    saver: Job,
    storage: Storage,
    pristine: Path,
    damage: Callable[[Path], None],
    step: int,
    quarantined: bool,
) -> None:
    name = damage.__name__.strip("_")
    shutil.copytree(pristine, storage.folder / name)
    damage(storage.step(name, 2))
    left = _files(storage.folder / name)

    saver.one("open", run=storage.run(name), attempt=3)
    answer = saver.one("restore")
    assert (answer["step"], answer["exact"]) == (step, True)
    moved = storage.folder / name / "quarantine" / "checkpoint-2-attempt-3"
    assert moved.exists() == quarantined
    assert bool(answer["warnings"]) == quarantined
    assert len(_files(storage.folder / name)) == len(left) + quarantined  # the note; nothing is deleted

    # Whatever was left, the same step can be saved again, and is then the one restored.
    if step == 1:
        assert saver.one("train", begin=2, end=2, last=True)["committed"] == 2
        saver.one("open", run=storage.run(name), attempt=4)
        answer = saver.one("restore")
        assert (answer["step"], answer["exact"], answer["warnings"]) == (2, True, [])


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
