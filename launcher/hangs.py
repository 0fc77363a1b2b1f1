"""When a trainer counts as hung: pure, fed with progress reports and a clock.

A step may take ``factor`` times the median step, but never less than ``minimum_s``; anything that is not
a plain training step (start, restore, compile, evaluation, save) may take SLOW_PHASE_FACTOR times as long.
"""

from __future__ import annotations

import statistics
from collections import deque

from recipes.contract import Phase, Progress

SLOW_PHASE_FACTOR = 10.0
STEPS_REMEMBERED = 64


class HangWatch:
    """Watches one trainer; times are of one monotonic clock, in seconds."""

    def __init__(self, *, factor: float, minimum_s: float, now_s: float) -> None:
        self._factor = factor
        self._minimum_s = minimum_s
        self._step_times_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._newest: Progress | None = None
        self._steps_seen = 0
        self._moved_s = now_s

    def observe(self, progress: Progress | None, now_s: float) -> str:
        """Takes the newest report; returns why the trainer is hung, or an empty text."""
        if progress is not None:
            self._take(progress, now_s)
        still_s, limit_s = now_s - self._moved_s, self.limit_s()
        if still_s <= limit_s:
            return ""
        where = (
            f"after step {self._newest.step}, {self._newest.phase}" if self._newest else "before any report"
        )
        return f"hung: nothing moved for {still_s:.0f} s ({where}; the limit is {limit_s:.0f} s)"

    def limit_s(self) -> float:
        """How long nothing may move in the present phase."""
        median_s = statistics.median(self._step_times_s) if self._step_times_s else 0.0
        limit_s = max(self._factor * median_s, self._minimum_s)
        plain_step = (
            self._newest is not None and self._newest.phase == Phase.TRAINING and self._steps_seen > 0
        )
        return limit_s if plain_step else SLOW_PHASE_FACTOR * limit_s

    def _take(self, progress: Progress, now_s: float) -> None:
        before, self._newest = self._newest, progress
        if before is None or (before.step == progress.step and before.phase == progress.phase):
            self._moved_s = now_s if before is None else self._moved_s
            return
        steps = progress.step - before.step
        # A step count that jumps in another phase is a restored one, not a step that was made.
        if steps > 0 and before.phase == Phase.TRAINING:
            if self._steps_seen and progress.phase == Phase.TRAINING:
                self._step_times_s.append((now_s - self._moved_s) / steps)
            self._steps_seen += steps
        self._moved_s = now_s
