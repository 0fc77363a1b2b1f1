"""``muster tune``: a faster way to run the same experiment, found without a TPU."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from launcher.cli.compiling import Ask, compiler, has_compiler, limit_options, refuse_cpu
from recipes.contract import ExitCode, cache_dir
from recipes.errors import UserError

if TYPE_CHECKING:
    from launcher.preflight.report import Report
    from launcher.tune.search import Ranking, Trial
    from recipes.schema import Recipe

HEADER = ("RANK", "STEP", "BAND", "TOK/S/CHIP", "MFU", "HBM", "RUN USD", "VS OWN", "BY", "CHANGES")


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
@click.option("--fresh", is_flag=True, help="Compile even what was compiled before.")
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
    fresh: bool,
    time_limit_s: float,
    memory_limit_gib: float,
) -> None:
    """Search mesh, remat, offload, accumulation and flags for a faster way to run the same experiment.

    All candidates are predicted from sizes, the best are compiled. What does not fit is never proposed. What
    was compiled is kept, so an interrupted search goes on where it was.
    """
    from launcher.tune.recipe_file import target_of, write_recipe
    from launcher.tune.search import fastest

    composed = compose_recipe(recipe, overrides, search).recipe
    refuse_cpu(composed, "tune")
    target = None
    if name is not None:
        target = target_of(name, recipe, composed, search=search, is_forced=is_forced)
    ask = None
    if not is_quick and has_compiler():
        ask = compiler(time_limit_s=time_limit_s, memory_limit_gib=memory_limit_gib, fresh=fresh)
    ranking = _ranking(composed, is_final=ask is None)
    tried = ranking.trials
    if ask is not None:
        tried = compile_best(ranking, ask, num_wanted=num_wanted, tries_flags=tries_flags, fresh=fresh)
    found = fastest(tried)
    if not found:
        nearest = min(tried, key=lambda trial: trial.hbm_bytes or math.inf, default=ranking.least)
        raise _nothing_fits(composed, nearest)
    own = _own(composed, found, is_compiled=ask is not None)
    _print(composed, ranking, found, own, limit=limit, as_json=as_json)
    if target is not None:
        path = write_recipe(target, found[0])
        output.say(f"wrote {path}: `muster plan {name}` shows it")


def _ranking(recipe: Recipe, *, is_final: bool) -> Ranking:
    from launcher.tune.search import MARGIN, ranked
    from launcher.tune.space import candidates

    start_s = time.monotonic()
    ranking = ranked(candidates(recipe), margin=1 / MARGIN if is_final else MARGIN)
    fits = "fit by their sizes with a fifth to spare" if is_final else "may fit by their sizes"
    took = f"in {time.monotonic() - start_s:.0f} s"
    output.say(f"{ranking.num_candidates} candidates, {len(ranking.trials)} {fits}, {took}")
    return ranking


def compile_best(
    ranking: Ranking, ask: Ask, *, num_wanted: int, tries_flags: bool, fresh: bool
) -> Sequence[Trial]:
    """What the compiler was asked, whatever it said."""
    from launcher.tune.search import compiled, confirmed, fastest
    from launcher.tune.space import with_other_flags

    def asked(recipe: Recipe) -> Report:
        if not fresh and _is_kept(recipe):
            output.say("compiled before, and read again:")
        return ask(recipe)

    tried: list[Trial] = []
    for trial in confirmed(ranking.trials, asked, num_wanted=num_wanted):
        _say(trial)
        tried.append(trial)
    for best in fastest(tried)[:1] if tries_flags else ():
        for other in with_other_flags(best.candidate):
            tried.append(compiled(other, asked))
            _say(tried[-1])
    return tried


def _is_kept(recipe: Recipe) -> bool:
    from launcher.preflight.compiler import content_key

    return (cache_dir(os.environ) / "preflight" / content_key(recipe)).exists()


def _nothing_fits(recipe: Recipe, nearest: Trial) -> UserError:
    from launcher.text import size_text

    words = " ".join(nearest.candidate.overrides) or "the recipe itself"
    usable = f" of {size_text(nearest.usable_hbm_bytes)}" if nearest.usable_hbm_bytes else ""
    needs = (
        f"needs {size_text(nearest.hbm_bytes)}{usable} on each device" if nearest.hbm_bytes else "is refused"
    )
    said_by = "the compiler" if nearest.is_compiled else "its sizes"
    return UserError(
        f"no way to run {recipe.name} on {recipe.hardware.generation} {recipe.hardware.topology} fits;"
        f" the nearest {needs} by {said_by}: {words}",
        hint="use more chips or a smaller train.global_batch_size; see `muster preflight` for the need",
        exit_code=ExitCode.EXPERIMENT_FAILED,
    )


def _own(recipe: Recipe, found: Sequence[Trial], *, is_compiled: bool) -> Trial | None:
    """What the others are held against, by the same method; None if the recipe itself does not compile."""
    from launcher.tune.search import estimated
    from launcher.tune.space import Candidate

    own = next((trial for trial in found if not trial.candidate.changes), None)
    return own if own or is_compiled else estimated(Candidate(changes={}, recipe=recipe))


def _print(
    recipe: Recipe, ranking: Ranking, found: Sequence[Trial], own: Trial | None, *, limit: int, as_json: bool
) -> None:
    if as_json:
        answer = {
            "recipe": recipe.name,
            "num_candidates": ranking.num_candidates,
            "num_may_fit": len(ranking.trials),
            "own": None if own is None else own.to_json(),
            "trials": [trial.to_json() for trial in found[:limit]],
        }
        output.data_json(answer)
        return
    rows = [(str(rank), *_row(trial, own)) for rank, trial in enumerate(found[:limit], start=1)]
    if own is not None and all(trial.candidate.changes for trial in found[:limit]):
        rank = str(found.index(own) + 1) if own in found else ""
        rows.append((rank, *_row(own, own, fits=own in found)))
    output.data(output.table(rows, header=HEADER))


def _say(trial: Trial) -> None:
    from launcher.text import time_text

    words = " ".join(trial.candidate.overrides) or "the recipe itself"
    said = trial.problem if trial.prediction is None else time_text(trial.prediction.step_s)
    with output.not_essential():
        output.say(f"compiled {words}: {said}")


def _row(trial: Trial, own: Trial | None, *, fits: bool = True) -> tuple[str, ...]:
    from launcher.text import size_text, time_text

    prediction, usable = trial.prediction, trial.usable_hbm_bytes
    assert prediction is not None
    faster = own.prediction.step_s / prediction.step_s - 1 if own and own.prediction else None
    itself = "none: the recipe itself" if fits else "none: the recipe itself, which may not fit"
    return (
        time_text(prediction.step_s),
        f"{time_text(prediction.low_s)} to {time_text(prediction.high_s)}",
        f"{prediction.tokens_per_s_per_chip:,.0f}",
        "" if prediction.mfu is None else f"{100 * prediction.mfu:.1f} %",
        f"{size_text(trial.hbm_bytes)} of {size_text(usable)}" if usable else size_text(trial.hbm_bytes),
        "unknown" if prediction.run_cost_usd is None else f"{prediction.run_cost_usd:,.0f}",
        "" if faster is None or not trial.candidate.changes else f"{100 * faster:+.1f} %",
        "compiler" if trial.is_compiled else "sizes",
        " ".join(trial.candidate.overrides) or itself,
    )
