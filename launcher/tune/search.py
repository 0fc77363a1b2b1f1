"""Ranks candidates by what is predicted of them, and has the best ones compiled."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.preflight.estimate import Estimate, estimate
from launcher.preflight.outline import outline
from launcher.preflight.prediction import OUTLINE, Prediction, predict
from launcher.preflight.report import Report
from launcher.tune.space import Candidate, thriftier
from recipes.errors import UserError
from recipes.schema import Recipe

MARGIN = 1.2
"""Memory from sizes is up to a fifth off (docs/preflight.md): what needs this much more than there is cannot
fit, and what needs this much less does."""
_LEARNED_MARGIN = 1.05
"""The same once the compiler has said how far off sizes are for this recipe."""
_SIZED = ("full", "named")
"""Policies of which it is known what they keep. What minimal and none keep is JAX's and XLA's choice."""
_TRIES = 3
"""Candidates compiled for each one that is wanted, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is known of one candidate."""

    candidate: Candidate
    is_compiled: bool
    hbm_bytes: int
    usable_hbm_bytes: int | None
    prediction: Prediction | None
    """None where it does not compile or fit."""
    problem: str = ""
    """Why not."""

    def to_json(self) -> dict[str, Any]:
        return {
            "overrides": list(self.candidate.overrides),
            "is_compiled": self.is_compiled,
            "hbm_bytes": self.hbm_bytes,
            "usable_hbm_bytes": self.usable_hbm_bytes,
            "problem": self.problem,
            "prediction": None if self.prediction is None else self.prediction.to_json(),
        }


def estimated(candidate: Candidate) -> Trial:
    """From sizes alone."""
    memory = estimate(candidate.recipe)
    prediction = predict(candidate.recipe, outline(candidate.recipe), method=OUTLINE)
    return Trial(
        candidate=candidate,
        is_compiled=False,
        hbm_bytes=memory.hbm_bytes,
        usable_hbm_bytes=memory.usable_hbm_bytes,
        prediction=prediction,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """All candidates by what their sizes say."""

    num_candidates: int
    trials: Sequence[Trial]
    """Those that may fit, fastest first."""
    least: Trial
    """What needs least memory, whether it fits or not."""


def ranked(found: Iterable[Candidate], *, margin: float) -> Ranking:
    """The same order every time, whatever that of ``found``, which is not empty.

    Args:
      margin: how many times usable HBM a candidate may need by its sizes. Up to 1 nobody else is asked, so
        only those are ranked whose sizes are known.
    """
    trials, count = [], 0
    least: tuple[int, tuple[str, ...]] | None = None
    for count, candidate in enumerate(found, start=1):  # noqa: B007  # the last count is the number
        chosen, memory = _thrifty_enough(candidate, margin)
        need = memory.hbm_bytes, chosen.overrides
        if least is None or need < least:
            least, smallest = need, chosen
        is_known = margin > 1 or chosen.recipe.train.remat_policy in _SIZED
        if is_known and memory.hbm_bytes <= margin * memory.usable_hbm_bytes:
            trials.append(estimated(chosen))
    return Ranking(num_candidates=count, trials=sorted(trials, key=_speed), least=estimated(smallest))


def _thrifty_enough(candidate: Candidate, margin: float) -> tuple[Candidate, Estimate]:
    """As it is where it fits without doubt; else in as little less memory as it takes, or in the least."""
    memory = estimate(candidate.recipe)
    if not candidate.changes:
        return candidate, memory
    for other in thriftier(candidate):
        if memory.hbm_bytes <= min(margin, 1 / MARGIN) * memory.usable_hbm_bytes:
            break
        less = estimate(other.recipe)
        if less.hbm_bytes < memory.hbm_bytes:
            candidate, memory = other, less
    return candidate, memory


def confirmed(
    trials: Sequence[Trial], ask: Callable[[Recipe], Report], *, num_wanted: int
) -> Iterator[Trial]:
    """Compiles one after another until so many have been found to fit, the recipe's own first and besides.

    What the compiler says of memory is held against what sizes said: those that would not fit, were sizes as
    far off for them, are passed over.

    Raises:
      UserError: a limit of the compiler was reached, or there is none; those before it were yielded.
    """
    own = [trial for trial in trials if not trial.candidate.changes]
    others = [trial for trial in trials if trial.candidate.changes]
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    num_found = num_tried = 0
    for trial in (*own, *others):
        is_own = not trial.candidate.changes
        if num_found == num_wanted or num_tried == _TRIES * num_wanted:
            return
        known = ratios[_kind(trial.candidate.recipe)]
        if not is_own and not _may_fit(trial, known):
            continue
        tried = compiled(trial.candidate, ask)
        if tried.hbm_bytes:
            known.append(tried.hbm_bytes / trial.hbm_bytes)
        num_tried += not is_own
        num_found += tried.prediction is not None and not is_own
        yield tried


def _kind(recipe: Recipe) -> str:
    """Candidates of a kind are told alike by their sizes."""
    policy = recipe.train.remat_policy
    return "sized" if policy in _SIZED else policy


def _may_fit(trial: Trial, ratios: Sequence[float]) -> bool:
    if not ratios or trial.usable_hbm_bytes is None:
        return True
    return statistics.median(ratios) * trial.hbm_bytes <= _LEARNED_MARGIN * trial.usable_hbm_bytes


def compiled(candidate: Candidate, ask: Callable[[Recipe], Report]) -> Trial:
    """What the compiler says of one candidate; that it refuses it is an answer too."""
    try:
        report = ask(candidate.recipe)
    except UserError as error:
        if error.exit_code != 1:
            raise
        return Trial(
            candidate=candidate,
            is_compiled=True,
            hbm_bytes=0,
            usable_hbm_bytes=None,
            prediction=None,
            problem=error.message,
        )
    return Trial(
        candidate=candidate,
        is_compiled=True,
        hbm_bytes=report.hbm_bytes,
        usable_hbm_bytes=report.usable_hbm_bytes,
        prediction=report.prediction if report.fits else None,
        problem="" if report.fits else "does not fit",
    )


def fastest(trials: Iterable[Trial]) -> Sequence[Trial]:
    """Those with a prediction, fastest first."""
    return sorted((trial for trial in trials if trial.prediction is not None), key=_speed)


def _speed(trial: Trial) -> tuple[float, int, tuple[str, ...]]:
    """Of candidates that are alike, the one that needs less memory, then the one that changes less."""
    assert trial.prediction is not None
    overrides = trial.candidate.overrides
    return round(trial.prediction.step_s, 6), trial.hbm_bytes, (str(len(overrides)).zfill(3), *overrides)
