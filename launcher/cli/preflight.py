"""``muster preflight``: the train step compiled for TPUs that are not here, before anything is paid for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from launcher.cli.compiling import Ask, compiler, has_compiler, limit_options, refuse_cpu
from recipes.contract import ExitCode
from recipes.errors import UserError

if TYPE_CHECKING:
    from launcher.preflight.report import Remedy, Report
    from recipes.schema import Recipe


@click.command("preflight")
@recipe_arguments()
@json_option
@limit_options
@click.option("--no-remedy", is_flag=True, help="Do not look for changes that would make it fit.")
@click.option(
    "--quick",
    "is_quick",
    is_flag=True,
    help="Ask no compiler: at once, from the sizes of one layer, times all. So it is without libtpu.",
)
@click.option(
    "--timeline",
    "timeline_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what happens when: FILE.html is a page, FILE.json a trace for Perfetto or Chrome.",
)
@click.option("--fresh", is_flag=True, help="Compile even if the same step was compiled before.")
def command(
    recipe: str,
    overrides: Sequence[str],
    search: Sequence[Path],
    as_json: bool,
    time_limit_s: float,
    memory_limit_gib: float,
    no_remedy: bool,
    is_quick: bool,
    timeline_file: Path | None,
    fresh: bool,
) -> None:
    """Say whether a recipe's train step compiles and fits, and how fast and dear it will be.

    No TPU is needed: the TPU compiler itself compiles it. Exits with 0 if it fits and with 1 if it does not,
    after a search for the cheapest changes with which it would.
    """
    from launcher.preflight.report import estimated, render

    composed = compose_recipe(recipe, overrides, search).recipe
    refuse_cpu(composed, "preflight")
    ask: Ask = estimated
    if not is_quick and has_compiler():
        ask = compiler(time_limit_s=time_limit_s, memory_limit_gib=memory_limit_gib, fresh=fresh)
    report = ask(composed)
    if not (report.fits or no_remedy):
        report = dataclasses.replace(report, remedy=_remedy(composed, ask))
    if timeline_file is not None:
        _write_timeline(timeline_file, report)
    output.data_json(report.to_json()) if as_json else output.data(render(report))
    if not report.fits:
        raise click.exceptions.Exit(ExitCode.EXPERIMENT_FAILED)


def _write_timeline(path: Path, report: Report) -> None:
    from launcher.preflight.report import render
    from launcher.preflight.trace import write

    if report.prediction is None:
        output.note(f"{path} is not written: a step that does not fit has no timeline")
        return
    title = f"{report.recipe}: one predicted step of one device"
    write(path, report.prediction, title=title, summary=render(report))
    output.say(f"timeline: {path}")


def _remedy(recipe: Recipe, ask: Ask) -> Remedy | None:
    """The first changes with which the step fits; None if none do, or a limit ends the search."""
    from launcher.preflight.remedies import override_text, remedies
    from launcher.preflight.report import Remedy

    for changes, changed in remedies(recipe):
        overrides = list(override_text(changes))
        output.say(f"it does not fit; trying {' '.join(overrides)}")
        try:
            report = ask(changed)
        except UserError as error:
            output.note(error.message)
            return None
        if report.fits:
            return Remedy(overrides=overrides, hbm_bytes=report.hbm_bytes)
    return None
