"""The loop around decide, with a real run directory and attempts that end as they are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launcher.exits import AttemptOutcome
from launcher.lease import LeaseLost
from launcher.ledger import Heartbeat, StopRequest
from launcher.lookout import Seen
from launcher.restarts import Asked, Supervisor
from launcher.rundir import create_or_open
from launcher.storage import open_storage
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.load import recipe_from_dict
from recipes.schema import Recipe

RECIPE = recipe_from_dict(
    {
        "name": "tiny",
        "run": {"max_restarts": 2},
        "hardware": {"generation": "cpu", "topology": "1x1"},
        "model": {
            "vocab_size": 256,
            "num_layers": 1,
            "embed_dim": 8,
            "mlp_dim": 8,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 8,
        },
        "data": {"source": "synthetic"},
        "optimizer": {"learning_rate": 0.1},
        "target": {"kind": "local"},
        "train": {"num_steps": 10, "global_batch_size": 1, "sequence_length": 8},
    }
)
FAILED = AttemptOutcome(exit_code=ExitCode.INFRASTRUCTURE, reason="why", host="s0-h0")
PREEMPTED = AttemptOutcome(exit_code=ExitCode.PREEMPTED, reason="notice", host="s0-h0")
COMPLETE = AttemptOutcome(exit_code=ExitCode.COMPLETE, reason="complete")


class World:
    """A run, a clock, and a back end whose attempts follow a script."""

    def __init__(self, path: Path, recipe: Recipe, script: Sequence[tuple[int, AttemptOutcome]]) -> None:
        """``script``: for each attempt, the step that it commits (0: none) and how it ends."""
        self.run = create_or_open(open_storage(str(path)), recipe, {}).run
        self.path, self.recipe, self.script = path, recipe, list(script)
        self.now_s, self.said = 1000.0, list[str]()
        self.shown: list[int] = []
        self.stopped: list[str] = []
        self.asked, self.lost = Asked(), list[LeaseLost]()
        self.polls_left = 0
        self.stop_request: StopRequest | None = None
        self.during: Callable[[], None] = lambda: None

    def begin(self, attempt: int) -> World:
        self.polls_left = 30
        return self

    def poll(self) -> AttemptOutcome | None:
        self.polls_left -= 1
        self.during()
        if self.polls_left > 0 and not self.stopped:
            return None
        step, outcome = self.script.pop(0)
        if step:
            marker = self.path / "checkpoints" / str(step) / "commit_success.txt"
            marker.parent.mkdir(parents=True)
            marker.touch()
        return PREEMPTED if self.stopped else outcome

    def stop(self) -> None:
        self.stopped.append("stop")

    def hurry(self) -> None:
        self.stopped.append("hurry")

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, attempt: int, beats: Sequence[Heartbeat]) -> None:
        self.shown.append(attempt)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def supervisor(self, *, restart_allowed: bool = True) -> Supervisor:
        return Supervisor(
            run=self.run,
            recipe=self.recipe,
            backend=self,
            watcher=self,
            asked=self.asked,
            lease_lost=lambda: self.lost[0] if self.lost else None,
            look=lambda: Seen(stop=self.stop_request),
            restart_allowed=restart_allowed,
            now=lambda: self.now_s,
            monotonic=lambda: self.now_s,
            sleep=self.sleep,
        )


def _world(tmp_path: Path, *script: tuple[int, AttemptOutcome]) -> World:
    return World(tmp_path / "run", RECIPE, script)


def test_attempts_until_complete(tmp_path: Path) -> None:
    world = _world(tmp_path, (4, PREEMPTED), (0, FAILED), (10, COMPLETE))
    finish = world.supervisor().run(["s0-h0"], {"plan": "x"})
    assert (finish.exit_code, finish.num_attempts, finish.attempt) == (0, 3, 3)
    assert finish.committed_step == 10
    ends = [world.run.attempt_end(number) for number in world.run.attempts()]
    steps = [(end.exit_code, end.from_step, end.to_step, end.message) for end in ends if end]
    assert steps == [(42, -1, 4, "notice"), (75, 4, 4, "why"), (0, 4, 10, "")]
    start = world.run.attempt_start(2)
    assert start is not None
    assert (start.from_step, start.hosts, start.lock) == (4, ("s0-h0",), {"plan": "x"})
    # Each attempt takes 3 s of polls and is looked at each second.
    assert world.shown.count(1) == 3
    assert "attempt 1 ended (s0-h0: notice); restarting" in world.said


def test_a_stop_while_waiting_to_restart(tmp_path: Path) -> None:
    world = _world(tmp_path, (0, FAILED), (10, COMPLETE))
    waited = world.now_s + 3.5

    def sleep(seconds: float) -> None:
        world.now_s += seconds
        if world.now_s > waited:
            world.asked.ask("Ctrl-C")

    world.sleep = sleep  # type: ignore[method-assign]
    finish = world.supervisor().run(["s0-h0"], {})
    assert (finish.exit_code, finish.num_attempts, finish.reason) == (42, 1, "stopped as asked")


def test_the_first_ask_stops_and_the_second_hurries(tmp_path: Path) -> None:
    world = _world(tmp_path, (4, PREEMPTED))

    def ask() -> None:
        if world.polls_left == 20:
            world.asked.ask("Ctrl-C")

    world.during = ask
    finish = world.supervisor().run(["s0-h0"], {})
    assert world.stopped == ["stop"]
    assert (finish.exit_code, finish.reason) == (42, "stopped as asked")
    assert any(line.startswith("Ctrl-C: saving and stopping, at most 30 s") for line in world.said)


def test_a_lost_lease_ends_everything_at_once(tmp_path: Path) -> None:
    world = _world(tmp_path, (4, PREEMPTED))

    def lose() -> None:
        if world.polls_left == 20:
            world.lost.append(LeaseLost("the run"))

    world.during = lose
    with pytest.raises(UserError, match="took over"):
        world.supervisor().run(["s0-h0"], {})
    assert world.stopped == ["hurry"]
    # The new holder writes the ledger now.
    assert world.run.attempt_end(1) is None


def test_a_stop_request_counts_as_asked_once(tmp_path: Path) -> None:
    world = _world(tmp_path, (4, PREEMPTED))
    world.stop_request = StopRequest(requested_s=1.0, by="somebody@elsewhere")
    finish = world.supervisor().run(["s0-h0"], {})
    assert (finish.exit_code, finish.reason) == (42, "stopped as asked")
    assert world.stopped == ["stop"]
    assert world.said[1].startswith("muster stop (somebody@elsewhere): saving and stopping")


def test_without_restarts(tmp_path: Path) -> None:
    world = _world(tmp_path, (4, PREEMPTED))
    finish = world.supervisor(restart_allowed=False).run(["s0-h0"], {})
    assert (finish.exit_code, finish.num_attempts) == (42, 1)


def _limited(tmp_path: Path, *script: tuple[int, AttemptOutcome], **limits: object) -> World:
    """Its clock begins at 1000 s."""
    hardware = dataclasses.replace(RECIPE.hardware, price_per_chip_hour=3600.0)
    run = dataclasses.replace(RECIPE.run, **limits)  # type: ignore[arg-type]
    return World(tmp_path / "run", dataclasses.replace(RECIPE, run=run, hardware=hardware), script)


def test_the_deadline_stops_it_cleanly(tmp_path: Path) -> None:
    world = _limited(tmp_path, (4, COMPLETE), (8, COMPLETE), deadline="1970-01-01T00:16:42Z")
    finish = world.supervisor().run(["s0-h0"], {})
    reason = "run.deadline=1970-01-01T00:16:42Z is reached"
    assert (finish.exit_code, finish.reason, finish.committed_step) == (42, reason, 4)
    assert world.stopped == ["stop"]
    assert 1002.0 <= world.now_s < 1003.5


def test_what_is_spent_counts_over_all_launches(tmp_path: Path) -> None:
    world = _limited(tmp_path, (4, PREEMPTED), (8, COMPLETE), max_cost=8.0)
    number = world.run.next_attempt(990.0, recipe=RECIPE, hosts=["s0-h0"])
    world.run.write_attempt_end(number, FAILED.end(now=994.0, from_step=-1, to_step=-1))
    # A dollar a second: 4 before; the first attempt of this launch ends after 3 s, the second is stopped.
    finish = world.supervisor().run(["s0-h0"], {})
    assert (finish.exit_code, finish.num_attempts) == (42, 2)
    assert finish.reason.endswith(" of run.max_cost=8 are spent")


def test_a_limit_is_heeded_between_attempts(tmp_path: Path) -> None:
    world = _limited(tmp_path, (0, FAILED), (8, COMPLETE), deadline="1970-01-01T00:16:43Z")
    finish = world.supervisor().run(["s0-h0"], {})
    assert (finish.exit_code, finish.num_attempts) == (42, 1)
    assert finish.reason == "run.deadline=1970-01-01T00:16:43Z is reached"
