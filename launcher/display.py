"""What a launch shows on stderr: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from launcher.ledger import Heartbeat
from launcher.text import printable
from recipes.contract import Phase

PLAIN_PERIOD_S = 10.0
PLAIN_UNCHANGED_S = 60.0
"""A line that says nothing new comes this seldom: a sign of life."""

BEFORE_STEPS = (Phase.STARTING, Phase.CONNECTING, Phase.COMPILING, Phase.RESTORING)
"""In this order; a trainer knows its step only after them."""


def progress_text(beats: Sequence[Heartbeat], *, step_time_s: float | None) -> str:
    """One line about a running attempt: phase, steps, loss, speed, time left."""
    if not beats:
        return Phase.STARTING.value
    newest = min(beats, key=_rank).progress
    metrics = next((beat.progress.metrics for beat in beats if beat.progress.metrics), {})
    parts = [newest.phase.value]
    if newest.phase not in BEFORE_STEPS:
        parts.append(f"step {newest.step}/{newest.num_steps}")
    if (loss := metrics.get("train/loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    if (eval_loss := metrics.get("eval/loss")) is not None:
        parts.append(f"held-out {eval_loss:.3f}")
    if (speed := metrics.get("perf/tokens_per_s")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if newest.committed_step >= 0:
        parts.append(f"saved {newest.committed_step}")
    if step_time_s is not None and newest.phase not in (Phase.DONE, *BEFORE_STEPS):
        parts.append(f"{_clock((newest.num_steps - newest.step) * step_time_s)} left")
    return "  ".join(parts)


def _rank(beat: Heartbeat) -> tuple[int, int, str]:
    """The host that is furthest behind comes first, so that the line only ever moves on."""
    phase = beat.progress.phase
    order = BEFORE_STEPS.index(phase) if phase in BEFORE_STEPS else len(BEFORE_STEPS)
    return order, beat.progress.step, beat.host


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class StepClock:
    """Mean time of a step over one attempt: steadier than the newest step's."""

    def __init__(self) -> None:
        self._attempt = 0
        self._first: tuple[int, float] | None = None

    def step_time_s(self, attempt: int, beats: Sequence[Heartbeat]) -> float | None:
        """Seconds a step, once some have been made."""
        if attempt != self._attempt:
            self._attempt, self._first = attempt, None
        moving = [beat.progress for beat in beats if beat.progress.metrics]
        if not moving:
            return None
        newest = moving[0]
        if self._first is None:
            self._first = (newest.step, newest.time_s)
        steps, seconds = newest.step - self._first[0], newest.time_s - self._first[1]
        return seconds / steps if steps > 0 else None


class Display(Protocol):
    """A watcher (see :mod:`launcher.restarts`) that is opened and closed."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None: ...

    def show(self, attempt: int, beats: Sequence[Heartbeat]) -> None: ...


def open_display() -> Display:
    """The live one on a terminal, else the plain one."""
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return LiveDisplay() if live else PlainDisplay()


class PlainDisplay:
    """Lines: when the phase changes, and every ten seconds that brought news."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._clock = monotonic, StepClock()
        self._shown_s, self._phase, self._text = 0.0, "", ""

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, text: str) -> None:
        # A reader that went away must not end the run.
        with contextlib.suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)

    def show(self, attempt: int, beats: Sequence[Heartbeat]) -> None:
        step_time_s = self._clock.step_time_s(attempt, beats)
        text = progress_text(beats, step_time_s=step_time_s)
        phase = f"{attempt} {text.partition('  ')[0]}"
        period_s = PLAIN_UNCHANGED_S if text == self._text else PLAIN_PERIOD_S
        if phase == self._phase and self._monotonic() < self._shown_s + period_s:
            return
        self._phase, self._text, self._shown_s = phase, text, self._monotonic()
        self.say(f"  {text}")


class LiveDisplay:
    """One line that is redrawn, below the news."""

    def __init__(self) -> None:
        # Only a launch on a terminal pays for rich.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._clock = StepClock()
        self._progress = Progress(
            TextColumn("{task.fields[attempt]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=4,
        )
        self._task: Any = self._progress.add_task("starting", total=None, attempt="")

    def __enter__(self) -> LiveDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._progress.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def show(self, attempt: int, beats: Sequence[Heartbeat]) -> None:
        text = progress_text(beats, step_time_s=self._clock.step_time_s(attempt, beats))
        step = min((beat.progress.step for beat in beats), default=0)
        total = max((beat.progress.num_steps for beat in beats), default=None)
        with contextlib.suppress(OSError):
            self._progress.update(
                self._task, description=text, completed=step, total=total, attempt=f"attempt {attempt}"
            )
