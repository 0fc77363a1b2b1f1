"""Attempt after attempt until a run is done: one pure decision, and the loop that carries it out.

``decide`` knows no clock and no processes; its table is tests/unit/test_restarts.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launcher.backends import Attempt, Backend
from launcher.cost import HOUR_S
from launcher.exits import AttemptOutcome
from launcher.ledger import Heartbeat
from launcher.lookout import Seen
from launcher.plan import price_of
from launcher.rundir import RunDir, committed_step
from launcher.supervise.limits import reached
from recipes.contract import ExitCode
from recipes.deadline import parse_deadline
from recipes.errors import UserError
from recipes.schema import Recipe

TICK_S = 0.1
LOOK_PERIOD_S = 1.0
"""Between two looks at the run directory: heartbeats and stop.json."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a run may still spend on restarts, counted over one launch."""

    max_restarts: int
    max_attempts_without_progress: int
    failures: int = 0
    """Attempts that failed and were counted."""
    without_progress: int = 0
    """Attempts in a row that committed no new step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One ended attempt."""

    exit_code: ExitCode
    reason: str
    progressed: bool
    """It committed a step that was not committed before."""
    stop_requested: bool = False
    """The launcher itself was asked to stop."""
    limit: str = ""
    """Which of the run's limits asked; empty when people did."""
    restart_allowed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Restart, or end with an exit code; and the budget that is left."""

    restart: bool
    exit_code: ExitCode
    """What the command ends with when it does not restart."""
    reason: str
    budget: Budget
    backoff_s: float = 0.0


def decide(observed: Observed, budget: Budget) -> Decision:
    """What to do after an attempt.

    Preemptions are restarted and not counted; failures are counted; the user's errors end the run at
    once. Whatever they were, attempts in a row that commit nothing end it too: a crash loop must not
    burn money.
    """
    code = observed.exit_code
    counted = code == ExitCode.INFRASTRUCTURE
    spent = dataclasses.replace(
        budget,
        failures=budget.failures + counted,
        without_progress=0 if observed.progressed else budget.without_progress + 1,
    )
    refusal = _refusal(observed, spent)
    if refusal is not None:
        return Decision(restart=False, exit_code=code, reason=refusal, budget=spent)
    return Decision(
        restart=True,
        exit_code=code,
        reason=observed.reason,
        budget=spent,
        backoff_s=_backoff_s(spent) if counted else 0.0,
    )


def _refusal(observed: Observed, spent: Budget) -> str | None:
    """Why there is no restart, or None."""
    last = observed.reason
    if observed.exit_code in (ExitCode.COMPLETE, ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT):
        return last
    if observed.stop_requested:
        stopped = observed.limit or "stopped as asked"
        return stopped if observed.exit_code == ExitCode.PREEMPTED else f"{stopped}; {last}"
    if not observed.restart_allowed:
        return f"{last} (and --no-restart was given)"
    if spent.failures > spent.max_restarts:
        return f"{spent.failures} attempts failed (run.max_restarts={spent.max_restarts}); the last: {last}"
    if spent.without_progress >= spent.max_attempts_without_progress:
        limit = f"run.max_attempts_without_progress={spent.max_attempts_without_progress}"
        return f"{spent.without_progress} attempts in a row committed no new step ({limit}); the last: {last}"
    return None


def _backoff_s(spent: Budget) -> float:
    """Nothing after progress, else doubling."""
    if spent.without_progress == 0:
        return 0.0
    return float(min(FIRST_BACKOFF_S * 2 ** (spent.without_progress - 1), MAX_BACKOFF_S))


class Watcher(Protocol):
    """Who looks on: the terminal."""

    def say(self, text: str) -> None:
        """One line of news."""

    def show(self, attempt: int, beats: Sequence[Heartbeat]) -> None:
        """The newest heartbeats of the attempt under way; called each second."""


class Asked:
    """How often, and by what, a stop was asked for; signal handlers add to it."""

    def __init__(self) -> None:
        self.count = 0
        self.by = ""

    def ask(self, by: str) -> None:
        self.count += 1
        self.by = self.by or by


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How a launch ended."""

    exit_code: ExitCode
    reason: str
    hint: str
    host: str
    attempt: int
    """Number of the last attempt."""
    num_attempts: int
    """Attempts of this launch."""
    committed_step: int


class Limits:
    """The deadline and the budget of a run on this machine."""

    def __init__(self, run: RunDir, recipe: Recipe, now: Callable[[], float]) -> None:
        config, price = recipe.run, price_of(recipe)
        self._now, self._began_s = now, now()
        self._deadline_s = None if config.deadline is None else parse_deadline(config.deadline)
        self._max_cost_usd = config.max_cost
        self._usd_per_hour = price.usd_per_hour if price else None
        self._earlier_s = _used_s(run) if price and config.max_cost is not None else 0.0

    def reached(self) -> str | None:
        """See :func:`launcher.supervise.limits.reached`; this launch costs from its beginning."""
        now = self._now()
        hours = (self._earlier_s + now - self._began_s) / HOUR_S
        return reached(
            now=now,
            spent_usd=None if self._usd_per_hour is None else hours * self._usd_per_hour,
            deadline_s=self._deadline_s,
            max_cost_usd=self._max_cost_usd,
        )


def _used_s(run: RunDir) -> float:
    """Seconds of all attempts before this launch, as far as their ends are known."""
    spans = ((run.attempt_start(number), run.attempt_end(number)) for number in run.attempts())
    return sum(max(0.0, end.end_s - start.started_s) for start, end in spans if start and end)


class Supervisor:
    """Runs attempts of one run until ``decide`` ends it."""

    def __init__(
        self,
        *,
        run: RunDir,
        recipe: Recipe,
        backend: Backend,
        watcher: Watcher,
        asked: Asked,
        lease_lost: Callable[[], UserError | None],
        look: Callable[[], Seen],
        restart_allowed: bool = True,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run, self._recipe, self._backend = run, recipe, backend
        self._watcher, self._asked, self._lease_lost = watcher, asked, lease_lost
        self._restart_allowed, self._monotonic, self._sleep = restart_allowed, monotonic, sleep
        self._look_at_run, self._look_s = look, 0.0
        self._limits, self._limit = Limits(run, recipe, now), ""

    def run(self, hosts: Sequence[str], lock: Mapping[str, Any]) -> Finish:
        """Attempts until the end.

        Raises:
          UserError: the lease was lost, or the run directory failed between two attempts.
        """
        config = self._recipe.run
        budget = Budget(
            max_restarts=config.max_restarts,
            max_attempts_without_progress=config.max_attempts_without_progress,
        )
        num_attempts = 0
        while True:
            num_attempts += 1
            number, outcome, progressed = self._attempt(hosts, lock)
            observed = Observed(
                exit_code=outcome.exit_code,
                reason=f"{outcome.host}: {outcome.reason}" if outcome.host else outcome.reason,
                progressed=progressed,
                stop_requested=self._asked.count > 0,
                limit=self._limit,
                restart_allowed=self._restart_allowed,
            )
            decision = decide(observed, budget)
            budget = decision.budget
            if decision.restart:
                self._watcher.say(f"attempt {number} ended ({decision.reason}); restarting")
                self._wait(decision.backoff_s)
                if self._asked.count:
                    decision = dataclasses.replace(
                        decision,
                        restart=False,
                        exit_code=ExitCode.PREEMPTED,
                        reason=self._limit or "stopped as asked",
                    )
            if not decision.restart:
                return Finish(
                    exit_code=decision.exit_code,
                    reason=decision.reason,
                    hint=outcome.hint,
                    host=outcome.host,
                    attempt=number,
                    num_attempts=num_attempts,
                    committed_step=committed_step(self._run.storage),
                )

    def _attempt(self, hosts: Sequence[str], lock: Mapping[str, Any]) -> tuple[int, AttemptOutcome, bool]:
        before = committed_step(self._run.storage)
        number = self._run.next_attempt(time.time(), recipe=self._recipe, hosts=hosts, lock=lock)
        noun = "host" if len(hosts) == 1 else "hosts"
        self._watcher.say(f"attempt {number}: {len(hosts)} {noun}, from {self._start(before)}")
        outcome = self._see_through(number, self._backend.begin(number))
        after = committed_step(self._run.storage)
        end = outcome.end(now=time.time(), from_step=before, to_step=after)
        self._run.write_attempt_end(number, end)
        return number, outcome, after > before

    def _start(self, committed: int) -> str:
        if committed >= 0:
            return f"step {committed}"
        fork = self._run.fork()
        return f"step {fork.step} of {fork.source_run}" if fork else "the beginning"

    def _see_through(self, number: int, attempt: Attempt) -> AttemptOutcome:
        heeded = 0
        try:
            while (outcome := attempt.poll()) is None:
                self._look(number)
                if self._asked.count > heeded:
                    heeded = self._heed(attempt, heeded)
                if lost := self._lease_lost():
                    raise lost
                self._sleep(TICK_S)
        except BaseException:
            # Nobody else ends these processes, and the next writer may be waiting.
            attempt.hurry()
            while attempt.poll() is None:
                time.sleep(TICK_S)
            raise
        return outcome

    def _heed(self, attempt: Attempt, heeded: int) -> int:
        if heeded == 0:
            grace_s = self._recipe.target.grace_period_s
            self._watcher.say(
                f"{self._asked.by}: saving and stopping, at most {grace_s:.0f} s (again: stop without saving)"
            )
            attempt.stop()
            return 1
        self._watcher.say("stopping at once")
        attempt.hurry()
        return self._asked.count

    def _look(self, number: int) -> None:
        """Each second: show heartbeats, heed stop.json."""
        if self._monotonic() < self._look_s:
            return
        self._look_s = self._monotonic() + LOOK_PERIOD_S
        seen = self._look_at_run()
        if seen.stop and not self._asked.count:
            self._asked.ask(f"muster stop ({seen.stop.by})")
        self._heed_limits()
        self._watcher.show(number, [beat for beat in seen.beats if beat.attempt == number])

    def _heed_limits(self) -> None:
        """A deadline or budget that is reached asks for a stop, as a person would."""
        if not self._asked.count and (limit := self._limits.reached()):
            self._limit = limit
            self._asked.ask(limit)

    def _wait(self, backoff_s: float) -> None:
        until_s = self._monotonic() + backoff_s
        while self._monotonic() < until_s and not self._asked.count:
            self._sleep(TICK_S)
        self._heed_limits()
