"""When to save: every so many steps, or every so many minutes by the clock of process 0.

All processes must save the same step, and their clocks differ, so process 0 decides and tells the
others through the coordination service. They ask only at steps that were agreed on before, about
halfway to the time the save is due, so most steps cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from recipes.schema import CheckpointConfig
from trainer.coordination import Peers

_MOST_STEPS_AHEAD = 1024


class Schedule:
    """Says at which steps to save, alike on every process."""

    def __init__(self, config: CheckpointConfig, peers: Peers, now: Callable[[], float]) -> None:
        self._every_steps = config.save_interval_steps
        minutes = config.save_interval_minutes
        self._every_s = None if minutes is None else minutes * 60.0
        self._peers = peers
        self._now = now
        self._saved_time_s = now()
        self._check_at = 0
        self._asked: list[int] = []
        self._previous: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` is to be saved."""
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        if self._every_s is None or step < self._check_at:
            return by_steps
        answer = self._decide(step, self._every_s) if self._peers.rank == 0 else None
        by_time, self._check_at = json.loads(self._peers.share(f"due/{step}", answer))
        self._asked.append(step)
        return by_steps or by_time

    def saved(self, step: int) -> None:
        """The state after ``step`` is saved or was restored; every process is past ``step``."""
        self._saved_time_s = self._now()
        for asked in [asked for asked in self._asked if asked < step]:
            self._peers.forget(f"due/{asked}")
            self._asked.remove(asked)

    def _decide(self, step: int, every_s: float) -> str:
        now_s = self._now()
        left_s = self._saved_time_s + every_s - now_s
        ahead = 1
        if self._previous is not None:
            previous_step, previous_s = self._previous
            step_s = max((now_s - previous_s) / (step - previous_step), 1e-6)
            until_s = left_s if left_s > 0 else every_s
            ahead = min(max(int(until_s / step_s / 2), 1), _MOST_STEPS_AHEAD)
        self._previous = (step, now_s)
        return json.dumps([left_s <= 0, step + ahead])
