"""Checkpoints on real processes: what is saved comes back bit for bit, on any number of devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


@pytest.fixture(scope="module")
def saver(nursery: Nursery, storage: Storage) -> Job:
    """One process with 8 devices."""
    return nursery.start(env=storage.env)


@pytest.fixture(scope="module")
def alone(nursery: Nursery) -> Job:
    """One process with 8 devices, for tests on a local disk."""
    return nursery.start()


def test_there_is_no_checkpoint_in_a_new_run(saver: Job, storage: Storage) -> None:
    saver.one("open", run=storage.run("new"))
    answer = saver.one("restore")
    assert (answer["step"], answer["committed"]) == (None, -1)


def test_what_is_restored_is_what_was_saved(saver: Job, storage: Storage) -> None:
    saver.one("open", run=storage.run("same"))
    assert saver.one("train", begin=1, end=3, last=True)["committed"] == 3
    saver.one("open", run=storage.run("same"))
    answer = saver.one("restore")
    assert (answer["step"], answer["exact"], answer["placed"], answer["committed"]) == (3, True, True, 3)
    assert answer["warnings"] == []


def test_any_number_of_devices_restores_the_same_bits(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=5, end=5, last=True)
    for devices in (8, 4, 2, 1):
        alone.one("open", run=str(tmp_path))
        answer = alone.one("restore", devices=devices)
        assert (answer["step"], answer["exact"], answer["placed"]) == (5, True, True), devices


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_any_number_of_processes_restores_the_same_bits(
    nursery: Nursery, storage: Storage, before: int, after: int
) -> None:
    run = storage.run(f"processes-{before}-{after}")
    first = nursery.start(before, env=storage.env)
    first.ask("open", run=run)
    assert [answer["committed"] for answer in first.ask("train", begin=7, end=8, last=True)] == [8] * before
    first.kill()
    second = nursery.start(after, env=storage.env)
    second.ask("open", run=run)
    assert [(answer["step"], answer["exact"]) for answer in second.ask("restore")] == [(8, True)] * after
    second.ask("train", begin=9, end=9, last=True)
    second.kill()


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("wider", ["params/embedding: the recipe has float32[64, 48], the checkpoint has float32[64, 32]"]),
        ("half", ["params/blocks/w: the recipe has bfloat16", "the checkpoint has float32"]),
        ("deeper", ["params/extra: the recipe has float32[8], the checkpoint has nothing"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    alone: Job, tmp_path: Path, model: str, names: list[str]
) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=1, end=1, last=True)
    alone.one("open", run=str(tmp_path))
    answer = alone.one("restore", model=model)
    assert answer["code"] == 2
    assert "is of another model" in answer["error"] and answer["hint"]
    assert all(name in answer["error"] for name in names)
    assert answer["error"].count("the checkpoint has") <= 5
    assert (tmp_path / "checkpoints" / "1").exists()


@pytest.mark.parametrize(
    ("argument", "text"), [("data", "the data changed"), ("recipe", "another experiment")]
)
def test_a_checkpoint_of_other_data_or_another_recipe_is_refused(
    alone: Job, tmp_path: Path, argument: str, text: str
) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=1, end=1, last=True)
    alone.one("open", run=str(tmp_path), **{argument: "other"})
    answer = alone.one("restore")
    assert answer["code"] == 2 and text in answer["error"]


def test_the_newest_are_kept_and_the_last_step_is_forced(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path), save_interval_steps=3, keep=2)
    assert alone.one("train", begin=1, end=11, last=True)["committed"] == 11
    assert _steps(tmp_path) == ["11", "9"]


def test_what_killed_saves_left_goes_after_the_next_commit(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=1, end=1, last=True)
    for name in ("2.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp", "mine"):
        (tmp_path / "checkpoints" / name / "state").mkdir(parents=True)
    alone.one("open", run=str(tmp_path), attempt=2)
    alone.one("restore")
    assert _steps(tmp_path) == ["1", "2.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp", "mine"]
    alone.one("train", begin=2, end=2, last=True)
    assert _steps(tmp_path) == ["1", "2", "mine"]


def test_a_step_that_is_committed_is_not_saved_again(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=4, end=4, last=True)
    commit = tmp_path / "checkpoints" / "4" / "commit_success.txt"
    before = commit.stat().st_mtime_ns
    alone.one("open", run=str(tmp_path), attempt=2)
    alone.one("restore")
    assert alone.one("train", begin=4, end=4, last=True)["committed"] == 4
    assert commit.stat().st_mtime_ns == before


def test_two_writers_do_not_overwrite_a_commit(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=4, end=4, last=True)
    alone.one("open", run=str(tmp_path), attempt=2)
    answer = alone.one("train", begin=4, end=4, last=True)
    assert answer["type"] == "SaveFailed" and "exists already" in answer["error"]


def test_minutes_are_those_of_process_0_and_all_save_the_same_steps(nursery: Nursery, tmp_path: Path) -> None:
    job = nursery.start(2)
    job.ask("open", run=str(tmp_path), save_interval_steps=None, save_interval_minutes=1.0, keep=9)
    # The clock of process 1 is 50 times faster; steps take 7 s by that of process 0.
    answers = job.ask("train", begin=1, end=40, clock_s=(7.0, 350.0))
    assert [answer["step"] for answer in answers] == [40, 40]
    job.ask("wait")
    steps = sorted(int(step) for step in _steps(tmp_path))
    assert [later - earlier for earlier, later in zip([0, *steps], steps, strict=False)] == [9, 9, 9, 9]
    job.kill()


def test_without_jax_distributed_nothing_starts(nursery: Nursery, tmp_path: Path) -> None:
    job = nursery.start(distributed=False)
    answer = job.one("open", run=str(tmp_path))
    assert answer["type"] == "RuntimeError" and "jax.distributed.initialize" in answer["error"]
    job.kill()


def test_without_the_preemption_service_nothing_starts(nursery: Nursery, tmp_path: Path) -> None:
    """A notice would otherwise be swallowed, and everything since the last save lost."""
    job = nursery.start(notices=False)
    answer = job.one("open", run=str(tmp_path))
    assert answer["type"] == "RuntimeError" and "reemption sync manager" in answer["error"]
    job.kill()


def test_no_array_is_kept_after_a_save(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path), keep=2)
    sizes = alone.one("grow", saves=4, megabytes=8)["array_bytes"]
    assert len(set(sizes)) == 1


@pytest.mark.long
def test_memory_is_flat_over_50_saves(nursery: Nursery, tmp_path: Path) -> None:
    job = nursery.start(devices=2)
    job.one("open", run=str(tmp_path), keep=2)
    sizes = job.one("grow", saves=50, megabytes=64)["resident_bytes"]
    assert sizes[-1] < sizes[9] * 1.05, sizes
    job.kill()


def test_a_slow_process_0_does_not_break_the_restore(nursery: Nursery, tmp_path: Path) -> None:
    job = nursery.start(2)
    job.ask("open", run=str(tmp_path))
    job.ask("train", begin=1, end=1, last=True)
    job.ask("open", run=str(tmp_path), attempt=2)
    first, second = job.children
    first.kill(signal.SIGSTOP)
    for child in job.children:
        child.send("restore")
    with pytest.raises(TimeoutError):
        second.answer(timeout_s=1.0)
    first.kill(signal.SIGCONT)
    assert [(answer["step"], answer["exact"]) for answer in (first.answer(), second.answer())] == [
        (1, True)
    ] * 2
    job.kill()


def test_orbax_alone_can_read_a_checkpoint(alone: Job, tmp_path: Path) -> None:
    alone.one("open", run=str(tmp_path))
    alone.one("train", begin=2, end=2, last=True)
    program = (
        "import json, sys, orbax.checkpoint as ocp\n"
        "tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])\n"
        "print(json.dumps([int(tree['step']), list(tree['params']['embedding'].shape)]))"
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    argv = [sys.executable, "-c", program, str(tmp_path / "checkpoints" / "2" / "state")]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2, [64, 32]]


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "float8_e4m3fn", "bool", "key"],
)
def test_fingerprints_ignore_the_sharding_and_see_every_bit(alone: Job, dtype: str) -> None:
    answer = alone.one("fingerprints", dtype=dtype, changes=40)
    assert len(set(answer["values"])) == 1
    assert answer["unseen"] == 0
    assert answer["swap_seen"]


def _steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())
