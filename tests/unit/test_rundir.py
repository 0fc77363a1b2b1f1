"""Creation, resumption, attempts and damage of a run directory."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from launcher.ledger import AttemptEnd, Heartbeat, HostRecord
from launcher.rundir import DamagedRecipe, RunDir, committed_step, create_or_open, encode_recipe, host_order
from launcher.storage import NotFound, StorageError, open_storage
from recipes.contract import Phase, Progress
from recipes.errors import UserError
from tests.unit.rundir_support import commit_checkpoint, make_recipe, make_run

BEAT = Heartbeat(
    host="s0-h1",
    attempt=1,
    progress=Progress(
        phase=Phase.TRAINING, step=3, num_steps=20, committed_step=-1, time_s=1.5, metrics={"train/loss": 2.0}
    ),
)


def test_a_new_run_is_written_and_read_back(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    opened = create_or_open(storage, make_recipe(), {"python": "3.12"})
    assert opened.created
    assert opened.run.recipe() == make_recipe()
    assert opened.run.lock() == {"python": "3.12"}
    assert opened.run.attempts() == []


def test_the_same_experiment_resumes_and_nothing_is_rewritten(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = run.storage.read_versioned("recipe.yaml"), run.storage.read_versioned("lock.json")
    opened = create_or_open(run.storage, make_recipe(grad_accum_steps=2), {"other": 1})
    assert not opened.created
    assert [change.key for change in opened.changes] == ["train.grad_accum_steps"]
    assert before == (run.storage.read_versioned("recipe.yaml"), run.storage.read_versioned("lock.json"))


def test_another_experiment_is_refused_with_every_key(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(UserError) as caught:
        create_or_open(run.storage, make_recipe(num_steps=30, seed=1, grad_accum_steps=2), {})
    lines = caught.value.message.splitlines()
    assert lines[1:] == [
        "  train.num_steps         20 -> 30  (changes the experiment)",
        "  train.grad_accum_steps  1 -> 2  (safe: same experiment, losses equal up to rounding)",
        "  train.seed              0 -> 1  (changes the experiment)",
    ]
    assert "run.name=NEW" in caught.value.hint
    assert "remove" not in caught.value.hint and "--fork" not in caught.value.hint
    commit_checkpoint(run.storage, 3)
    with pytest.raises(UserError) as caught:
        create_or_open(run.storage, make_recipe(num_steps=30), {})
    assert "--fork NEW" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_damaged_recipe_is_restored_from_the_newest_copy_that_can_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(2):
        run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0"])
    run.storage.replace("attempts/0002/recipe.yaml", b"{")
    run.storage.replace("recipe.yaml", b"{")
    with pytest.raises(DamagedRecipe) as caught:
        run.recipe()
    assert caught.value.hint == f"restore it: copy {run.url}/attempts/0001/recipe.yaml over it"
    # Only its recipe.yaml says what a fork began with.
    run.storage.create("fork.json", b"{}")
    with pytest.raises(DamagedRecipe) as caught:
        run.recipe()
    assert "attempts" not in caught.value.hint


def test_a_lock_that_was_never_written_is_written_by_the_next_launch(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    storage.create("recipe.yaml", encode_recipe(make_recipe()))
    assert RunDir(storage).lock() == {}
    create_or_open(storage, make_recipe(), {"python": "3.13"})
    assert RunDir(storage).lock() == {"python": "3.13"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no muster header"),
        (b"a: [", "is damaged"),
        (b"\x80", "is damaged"),
        (b"!!python/object/apply:os.system ['true']", "is damaged"),
        (b"[" * 1500, "is damaged"),
        (b"muster: {schema_version: 99, fingerprint: x}", "written by a newer Muster"),
        (b"muster: {schema_version: 1, fingerprint: x}\nname: x\nnonsense: 1\n", "is damaged"),
        (encode_recipe(make_recipe()).replace(b"seed: 0", b"seed: 1"), "it was edited"),
    ],
)
def test_a_damaged_recipe_is_one_error_that_names_it(content: bytes, message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.storage.replace("recipe.yaml", content)
    with pytest.raises(StorageError, match=message) as caught:
        run.recipe()
    assert str(tmp_path / "tiny" / "recipe.yaml") in caught.value.message
    assert caught.value.hint


def test_attempts_count_up_and_keep_the_recipe_in_effect(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    changed = make_recipe(grad_accum_steps=2)
    assert run.next_attempt(10.0, recipe=make_recipe(), hosts=["s0-h0"]) == 1
    commit_checkpoint(run.storage, 5)
    assert run.next_attempt(20.0, recipe=changed, hosts=["s0-h0", "s1-h0"], lock={"a": 1}) == 2
    assert run.attempts() == [1, 2]
    start = run.attempt_start(2)
    assert start is not None
    assert (start.from_step, start.hosts, start.started_s, start.lock) == (
        5,
        ("s0-h0", "s1-h0"),
        20.0,
        {"a": 1},
    )
    assert run.attempt_end(2) is None
    assert run.recipe() == make_recipe()
    assert b"grad_accum_steps: 2" in run.storage.read(run.attempt_recipe_path(2))


def test_an_attempt_number_whose_claimer_died_is_not_used_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.storage.create("attempts/0001/recipe.yaml", b"")
    assert run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0"]) == 2
    assert run.attempt_start(1) is None


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    progress = Progress(
        phase=Phase.TRAINING, step=3, num_steps=20, committed_step=-1, time_s=1.5, metrics={"train/loss": 2.0}
    )
    beats = [Heartbeat(host=f"s0-h{index}", attempt=1, progress=progress) for index in (10, 2)]
    for beat in beats:
        run.write_heartbeat(beat)
    assert list(run.heartbeats()) == beats[::-1]
    host = HostRecord(host="s0-h0", hostname="vm", pid=7, start_s=1.0)
    run.write_host(1, host)
    ended = dataclasses.replace(
        host, end_s=2.0, exit_code=75, status=134, reason="lost a peer", collateral=True
    )
    run.write_host(1, ended)
    assert list(run.hosts(1)) == [ended]
    end = AttemptEnd(
        end_s=3.0, exit_code=75, first_failing_host="s1-h0", message="m", hint="", from_step=-1, to_step=5
    )
    run.write_attempt_end(1, end)
    assert run.attempt_end(1) == end


def test_a_loss_that_is_not_a_number_survives_the_heartbeat(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    progress = Progress(
        phase=Phase.TRAINING,
        step=3,
        num_steps=20,
        committed_step=-1,
        time_s=1.5,
        metrics={"train/loss": math.nan},
    )
    run.write_heartbeat(Heartbeat(host="s0-h0", attempt=1, progress=progress))
    assert math.isnan(run.heartbeats()[0].progress.metrics["train/loss"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "the whole is not an object"),
        (b'{"host": 3, "attempt": 1}', "host is not a text"),
        (b'{"host": "a", "attempt": true}', "attempt is not a whole number"),
        (
            b'{"host": "a", "attempt": 1, "progress": {"phase": "lunch"}}',
            "progress.phase is not one of starting",
        ),
        (
            b'{"host": "a", "attempt": 1, "progress": {"phase": ["x"]}}',
            "progress.phase is not one of starting",
        ),
        (
            b'{"host": "a", "attempt": 1, "progress": {"phase": "done", "step": 1, "num_steps": 1,'
            b' "committed_step": 1, "time_s": 1, "metrics": {"x": "y"}}}',
            "progress.metrics.x is not a number",
        ),
        (
            b'{"host": "a", "attempt": 1, "progress": {"phase": "done", "step": 1, "num_steps": 1,'
            b' "committed_step": 1, "time_s": -Infinity, "metrics": {}}}',
            "progress.time_s is not a finite number",
        ),
        (
            b'{"host": "a", "attempt": 1, "progress": {"phase": "done", "step": 1, "num_steps": 1,'
            b' "committed_step": 1, "time_s": 1' + b"0" * 400 + b', "metrics": {}}}',
            "progress.time_s is not a finite number",
        ),
        (b"[" * 100_000, "not JSON"),
        (b"\x80", "not JSON"),
    ],
)
def test_a_damaged_record_is_named_and_passed_over(content: bytes, message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.storage.create("heartbeat/s0-h0.json", content)
    run.write_heartbeat(BEAT)
    damaged: list[str] = []
    assert run.heartbeats(damaged) == [BEAT]
    assert len(damaged) == 1
    assert "heartbeat/s0-h0.json is damaged" in damaged[0]
    assert message in damaged[0]


def test_a_damaged_host_or_end_is_named_and_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.storage.create("attempts/0001/hosts/s0-h0.json", b"{")
    run.storage.create("attempts/0001/hosts/s0-h1.json/not-an-object", b"")
    run.storage.create("attempts/0001/end.json", b"\0")
    damaged: list[str] = []
    assert run.hosts(1, damaged) == []
    assert run.attempt_end(1, damaged) is None
    assert [name in line for name, line in zip(("s0-h0", "s0-h1", "end.json"), damaged, strict=True)] == [
        True
    ] * 3


def test_a_damaged_request_for_a_stop_is_a_request(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.storage.create("stop.json", b"{")
    request = run.stop_request()
    assert request is not None
    assert request.by == "somebody"


@pytest.mark.parametrize(
    ("objects", "step"),
    [
        ([], -1),
        (["checkpoints/5/commit_success.txt"], 5),
        (["checkpoints/5/commit_success.txt", "checkpoints/10/commit_success.txt"], 10),
        (["checkpoints/5/commit_success.txt", "checkpoints/10/state/data"], 5),
        (["checkpoints/9/commit_success.txt", "checkpoints/10/commit_success.txt"], 10),
        (["checkpoints/0/commit_success.txt"], 0),
        (["checkpoints/10.orbax-checkpoint-tmp/commit_success.txt"], -1),
        (["checkpoints/x/commit_success.txt", "checkpoints/5/state/commit_success.txt"], -1),
    ],
)
def test_the_newest_committed_step(objects: list[str], step: int, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for path in objects:
        storage.create(path, b"")
    assert committed_step(storage) == step


def test_stop_requests_stay_until_cleared(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.stop_request() is None
    run.request_stop(5.0, "me")
    request = run.stop_request()
    assert request is not None
    assert (request.requested_s, request.by) == (5.0, "me")
    run.clear_stop()
    run.clear_stop()
    assert run.stop_request() is None


def test_hosts_sort_by_number() -> None:
    names = ["s0-h10", "odd", "s1-h0", "s0-h2"]
    assert sorted(names, key=host_order) == ["s0-h2", "s0-h10", "s1-h0", "odd"]


def test_what_is_no_run_is_not_one(tmp_path: Path) -> None:
    run = RunDir(open_storage(str(tmp_path / "none")))
    assert not run.exists()
    with pytest.raises(NotFound):
        run.recipe()
