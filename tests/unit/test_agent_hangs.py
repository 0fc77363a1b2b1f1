"""When a trainer counts as hung."""

from __future__ import annotations

import pytest

from launcher.hangs import HangWatch
from recipes.contract import Phase, Progress


def _progress(phase: Phase, step: int) -> Progress:
    return Progress(phase=phase, step=step, num_steps=100, committed_step=-1, time_s=0.0, metrics={})


def _watch(*seen: tuple[float, Phase, int]) -> HangWatch:
    """A watch (factor 10, minimum 20 s) that saw these reports from second 0 on."""
    watch = HangWatch(factor=10.0, minimum_s=20.0, now_s=0.0)
    for now_s, phase, step in seen:
        assert watch.observe(_progress(phase, step), now_s) == ""
    return watch


TRAIN, EVAL = Phase.TRAINING, Phase.EVALUATING


@pytest.mark.parametrize(
    ("seen", "limit_s"),
    [
        # Before the first step anything may take ten times as long: it compiles in it.
        ([], 200),
        ([(1, Phase.COMPILING, 0)], 200),
        ([(1, TRAIN, 0)], 200),
        # A restored step count is no step that was made.
        ([(1, Phase.RESTORING, 0), (2, TRAIN, 50)], 200),
        # The first step's own time, which compiles, does not count.
        ([(1, TRAIN, 0), (90, TRAIN, 1)], 20),
        ([(1, TRAIN, 0), (90, TRAIN, 1), (91, TRAIN, 2)], 20),
        # Ten times the median of 3 s.
        ([(1, TRAIN, 0), (90, TRAIN, 1), (93, TRAIN, 2), (96, TRAIN, 3), (110, TRAIN, 4)], 30),
        # Several steps between two looks.
        ([(1, TRAIN, 0), (90, TRAIN, 1), (98, TRAIN, 3)], 40),
        # Evaluating and saving may take long, and do not spoil the median.
        ([(1, TRAIN, 0), (90, TRAIN, 1), (93, TRAIN, 2), (94, EVAL, 2)], 300),
        ([(1, TRAIN, 0), (90, TRAIN, 1), (93, TRAIN, 2), (94, EVAL, 2), (150, TRAIN, 2)], 30),
        ([(1, TRAIN, 0), (90, TRAIN, 1), (93, TRAIN, 2), (94, Phase.SAVING, 2)], 300),
    ],
)
def test_limits(seen: list[tuple[float, Phase, int]], limit_s: float) -> None:
    watch = _watch(*seen)
    newest = seen[-1] if seen else (0.0, Phase.STARTING, 0)
    report = _progress(newest[1], newest[2]) if seen else None
    assert watch.observe(report, newest[0] + limit_s) == ""
    assert watch.observe(report, newest[0] + limit_s + 1).startswith("hung: nothing moved")


def test_reports_that_say_the_same_are_no_movement() -> None:
    watch = _watch((1, TRAIN, 0), (2, TRAIN, 1), *[(second, TRAIN, 1) for second in range(3, 22)])
    assert "after step 1, training" in watch.observe(_progress(TRAIN, 1), 23)
