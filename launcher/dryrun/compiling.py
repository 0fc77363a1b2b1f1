"""The preflight of a rehearsal: `muster preflight` as a child, and its verdict as a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.dryrun.checks import Seen
from launcher.dryrun.children import child
from launcher.text import size_text, time_text
from recipes.contract import ExitCode
from recipes.errors import UserError


def preflight_stage(
    words: Sequence[str], *, directory: Path, env: Mapping[str, str], say: Callable[[str], None]
) -> Seen:
    """Whether the recipe compiles and fits.

    Args:
      words: recipe, overrides and options of `muster preflight`.
      directory: for its answer.
      env: of the child.
      say: hears its progress.

    Raises:
      UserError: it does not fit, or cannot be compiled.
    """
    argv = ["preflight", *words, "--json", "--no-remedy"]
    with child(argv, directory=directory, name="preflight", env=env) as asked:
        code = asked.wait(say)
    answer = asked.answer()
    if not answer or code not in (ExitCode.COMPLETE, ExitCode.EXPERIMENT_FAILED):
        raise asked.error()
    needed, usable = answer["hbm_bytes"], answer["usable_hbm_bytes"]
    of = f" of {size_text(usable)}" if usable else ""
    by = "estimated from sizes" if answer["is_estimate"] else "by the TPU compiler"
    memory = f"{size_text(needed)}{of} of HBM on each device, {by}"
    if code != ExitCode.COMPLETE:
        hint = "`muster preflight` with the same words looks for the cheapest changes with which it fits"
        raise UserError(f"does not fit: {memory}", hint=hint, exit_code=code)
    prediction = answer["prediction"]
    step = f"a step of {time_text(prediction['step_s'])} (to {time_text(prediction['high_s'])}) predicted"
    return Seen(detail=f"fits: {memory}; {step}")
