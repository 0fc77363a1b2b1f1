"""What `muster dryrun` says: one line a stage, as text or as JSON. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.text import one_line
from recipes.contract import ExitCode
from recipes.parallelism import recipe_mesh
from recipes.schema import Recipe

_MOST_CHARACTERS = 600
"""Of a line."""


class Outcome(enum.StrEnum):
    """How a stage ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a rehearsal."""

    name: str
    outcome: Outcome
    duration_s: float = 0.0
    detail: str
    """What was seen, or why it failed or was skipped."""
    hint: str = ""
    """What to do about a failure."""
    exit_code: int = ExitCode.COMPLETE
    """What the command would end with for this stage alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A whole rehearsal."""

    recipe: str
    stages: Sequence[Stage]
    miniature: str
    """Hardware, mesh and model of the run in miniature, in words."""
    directory: str | None
    """Where runs, logs and recipes of the rehearsal are; None when they were removed."""

    @property
    def ok(self) -> bool:
        return self.exit_code == ExitCode.COMPLETE

    @property
    def exit_code(self) -> int:
        """Of the first stage that failed."""
        failed = (stage.exit_code for stage in self.stages if stage.outcome == Outcome.FAILED)
        return next(failed, ExitCode.COMPLETE)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "exit_code": int(self.exit_code)} | dataclasses.asdict(self)


def describe(miniature: Recipe) -> str:
    """A run in miniature in one line."""
    shape, slices, train = recipe_mesh(miniature), miniature.multislice.num_slices, miniature.train
    over = {"ICI": shape.ici, "DCN": shape.dcn}
    degrees = [
        f"{axis} {degree} over {link}"
        for link, degrees in over.items()
        for axis, degree in degrees.items()
        if degree > 1
    ]
    return "; ".join(
        [
            f"{slices} slice{'s' * (slices > 1)} of {miniature.hardware.topology} CPU devices",
            ", ".join(degrees) or "one device",
            f"{miniature.model.num_layers} layers",
            f"{train.num_steps} steps of {train.global_batch_size} x {train.sequence_length} tokens",
        ]
    )


def render(report: Report) -> str:
    """As lines of text."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield _row("recipe", report.recipe)
    yield _row("miniature", report.miniature)
    for stage in report.stages:
        yield _row(stage.name, line(stage))
        if stage.hint:
            yield _row("", f"to do: {one_line(stage.hint, _MOST_CHARACTERS)}")
    if report.directory:
        yield _row("directory", report.directory)
    failed = [stage.name for stage in report.stages if stage.outcome == Outcome.FAILED]
    skipped = [stage.name for stage in report.stages if stage.outcome == Outcome.SKIPPED]
    without = f" (skipped: {', '.join(skipped)})" if skipped else ""
    yield f"{'failed: ' + ', '.join(failed) if failed else 'all is well'}{without}"


def _row(name: str, text: str) -> str:
    return f"{name:<9}  {text}"


def line(stage: Stage) -> str:
    """One stage without its name."""
    took = f"{stage.duration_s:.1f} s" if stage.outcome != Outcome.SKIPPED else ""
    return f"{stage.outcome:<7}  {took:>7}  {one_line(stage.detail, _MOST_CHARACTERS)}".rstrip()
