"""``muster tune``: a faster way to run the same experiment, found without a TPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from launcher.cli.compiling import Ask, compiler, has_compiler, limit_options, refuse_cpu
from recipes.contract import ExitCode
from recipes.errors import UserError

if TYPE_CHECKING:
    from launcher.tune.search import Trial
    from recipes.schema import Recipe

HEADER = ("STEP", "BAND", "TOK/S/CHIP", "MFU", "HBM", "RUN USD", "VS OWN", "BY", "CHANGES")


@click.command("tune")
@recipe_arguments()
@json_option
@click.option(
    "--confirm",
    "num_wanted",
    metavar="N",
    type=click.IntRange(min=1, max=50),
    default=3,
    show_default=True,
    help="Compile until so many candidates have been found to fit, the recipe itself besides.",
)
@click.option("--flags", "tries_flags", is_flag=True, help="Compile the winner without each tuned flag too.")
@click.option("--quick", "is_quick", is_flag=True, help="Ask no compiler: from sizes alone, in seconds.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), default=10, show_default=True, help="Rows to show."
)
@click.option("--write", "name", metavar="NAME", help="Write the winner as recipes/NAME.yaml.")
@click.option("--force", "is_forced", is_flag=True, help="Let --write replace recipes/NAME.yaml.")
@limit_options
def command(
    recipe: str,
    overrides: Sequence[str],
    search: Sequence[Path],
    as_json: bool,
    num_wanted: int,
    tries_flags: bool,
    is_quick: bool,
    limit: int,
    name: str | None,
    is_forced: bool,
    time_limit_s: float,
    memory_limit_gib: float,
) -> None:
    """Search mesh, remat, offload, accumulation and flags for a faster way to run the same experiment.

    All candidates are predicted from sizes, the best are compiled. What does not fit is never proposed. What
    was compiled is kept, so an interrupted search goes on where it was.
    """
    from launcher.tune.recipe_file import check_name

    composed = compose_recipe(recipe, overrides, search).recipe
    refuse_cpu(composed, "tune")
    if name is not None:
        check_name(name, composed.name, search=search, is_forced=is_forced)
    ask = None
    if not is_quick and has_compiler():
        ask = compiler(time_limit_s=time_limit_s, memory_limit_gib=memory_limit_gib, fresh=False)
    trials = _search(composed, ask, num_wanted=num_wanted, tries_flags=tries_flags)
    own = next((trial for trial in trials if not trial.candidate.changes), None)
    if as_json:
        output.data_json({"recipe": composed.name, "trials": [trial.to_json() for trial in trials[:limit]]})
    else:
        output.data("\n".join(_table(trials[:limit], own)))
    if name is not None:
        _write(name, composed.name, trials[0], search=search, is_forced=is_forced)


def _search(recipe: Recipe, ask: Ask | None, *, num_wanted: int, tries_flags: bool) -> Sequence[Trial]:
    """Fastest first; at least one."""
    from launcher.tune.search import MARGIN, fastest, ranked
    from launcher.tune.space import candidates

    start_s = time.monotonic()
    found = list(candidates(recipe))
    trials = ranked(found, margin=1 / MARGIN if ask is None else MARGIN)
    took = f"in {time.monotonic() - start_s:.0f} s"
    output.say(f"{len(found)} candidates, {len(trials)} may fit by their sizes, {took}")
    if ask is not None:
        trials = fastest(_confirmed(trials, ask, num_wanted=num_wanted, tries_flags=tries_flags))
    if not trials:
        raise UserError(
            f"no way to run {recipe.name} on {recipe.hardware.generation} {recipe.hardware.topology} fits",
            hint="use more chips or a smaller train.global_batch_size; see `muster preflight` for the need",
            exit_code=ExitCode.EXPERIMENT_FAILED,
        )
    return trials


def _confirmed(trials: Sequence[Trial], ask: Ask, *, num_wanted: int, tries_flags: bool) -> Iterator[Trial]:
    from launcher.tune.search import compiled, confirmed, fastest
    from launcher.tune.space import with_other_flags

    seen: list[Trial] = []
    for trial in confirmed(trials, ask, num_wanted=num_wanted):
        _say(trial)
        seen.append(trial)
        yield trial
    best = fastest(seen)[:1] if tries_flags else ()
    for trial in best:
        for other in with_other_flags(trial.candidate):
            tried = compiled(other, ask)
            _say(tried)
            yield tried


def _say(trial: Trial) -> None:
    from launcher.text import time_text

    words = " ".join(trial.candidate.overrides) or "the recipe itself"
    said = trial.problem if trial.prediction is None else time_text(trial.prediction.step_s)
    with output.not_essential():
        output.say(f"compiled {words}: {said}")


def _table(trials: Sequence[Trial], own: Trial | None) -> Iterator[str]:
    rows = [HEADER, *(_row(trial, own) for trial in trials)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADER))]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def _row(trial: Trial, own: Trial | None) -> tuple[str, ...]:
    from launcher.text import size_text, time_text

    prediction = trial.prediction
    assert prediction is not None
    mine = own.prediction.step_s / prediction.step_s - 1 if own and own.prediction else None
    return (
        time_text(prediction.step_s),
        f"{time_text(prediction.low_s)} to {time_text(prediction.high_s)}",
        f"{prediction.tokens_per_s_per_chip:,.0f}",
        "" if prediction.mfu is None else f"{100 * prediction.mfu:.1f} %",
        size_text(trial.hbm_bytes),
        "unknown" if prediction.run_cost_usd is None else f"{prediction.run_cost_usd:,.0f}",
        "" if mine is None or not trial.candidate.changes else f"{100 * mine:+.0f} %",
        "compiler" if trial.is_compiled else "sizes",
        " ".join(trial.candidate.overrides) or "none: the recipe itself",
    )


def _write(name: str, base: str, trial: Trial, *, search: Sequence[Path], is_forced: bool) -> None:
    from launcher.tune.recipe_file import write_recipe

    path = write_recipe(name, base, trial, search=search, is_forced=is_forced)
    output.say(f"wrote {path}: `muster plan {name}` shows it")
