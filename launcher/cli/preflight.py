"""``muster preflight``: the train step compiled for TPUs that are not here, before anything is paid for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.hardware import CPU

if TYPE_CHECKING:
    from launcher.preflight.compiler import Limits, Usage
    from launcher.preflight.report import Remedy, Report
    from recipes.schema import Recipe

_PLAIN_PERIOD_S = 10.0
_GIB = 2**30


@click.command("preflight")
@recipe_arguments()
@json_option
@click.option(
    "--time-limit",
    "time_limit_s",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=3600,
    show_default=True,
    help="Stop the compiler after this long.",
)
@click.option(
    "--memory-limit",
    "memory_limit_gib",
    metavar="GIB",
    type=click.FloatRange(min=0.25),
    default=8,
    show_default=True,
    help="Stop the compiler when it takes more memory than this.",
)
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
    from launcher.preflight.compiler import Limits
    from launcher.preflight.report import estimated, render

    composed = compose_recipe(recipe, overrides, search).recipe
    if composed.hardware.generation == CPU:
        raise UserError(
            f"{composed.name} is for CPU devices, and preflight is for TPUs",
            hint="choose a recipe with a TPU generation: `muster recipes` lists them",
        )
    ask: Ask = estimated
    if not is_quick and importlib.util.find_spec("libtpu") is not None:
        limits = Limits(time_s=time_limit_s, memory_bytes=round(memory_limit_gib * _GIB))
        ask = functools.partial(_compiled, limits=limits, fresh=fresh)
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


type Ask = Callable[[Recipe], Report]
"""What says whether a recipe fits."""


def _remedy(recipe: Recipe, ask: Ask) -> Remedy | None:
    """The first changes with which the step fits; None if none do, or a limit ends the search."""
    from launcher.preflight.remedies import remedies
    from launcher.preflight.report import Remedy

    for changes, changed in remedies(recipe):
        overrides = [f"{key}={_value(value)}" for key, value in changes.items()]
        output.say(f"it does not fit; trying {' '.join(overrides)}")
        try:
            report = ask(changed)
        except UserError as error:
            output.note(error.message)
            return None
        if report.fits:
            return Remedy(overrides=overrides, hbm_bytes=report.hbm_bytes)
    return None


def _value(value: object) -> str:
    """As an override has it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _compiled(recipe: Recipe, *, limits: Limits, fresh: bool) -> Report:
    from launcher.preflight.compiled import analyze
    from launcher.preflight.compiler import CompileError, compile_step
    from launcher.preflight.report import fitting, not_fitting

    try:
        with _progress(recipe) as watch:
            compiled = compile_step(recipe, limits=limits, watch=watch, fresh=fresh)
    except CompileError as refused:
        if refused.problem.needed_bytes is None:
            raise
        return not_fitting(recipe, refused.problem)
    return fitting(recipe, compiled, analyze(compiled))


@contextlib.contextmanager
def _progress(recipe: Recipe) -> Iterator[Callable[[Usage], None]]:
    """One live line on a terminal, else a line every ten seconds."""
    what = f"compiling {recipe.name} for {recipe.hardware.generation} {recipe.hardware.topology}"
    if output.use_color(sys.stderr):
        from rich.console import Console

        with Console(stderr=True).status(what, spinner="line") as status:
            yield lambda usage: status.update(f"{what}: {_text(usage)}")
        return
    last_s = time.monotonic()

    def say(usage: Usage) -> None:
        nonlocal last_s
        if time.monotonic() >= last_s + _PLAIN_PERIOD_S:
            last_s = time.monotonic()
            with output.not_essential():
                output.say(f"{what}: {_text(usage)}")

    yield say


def _text(usage: Usage) -> str:
    return f"{usage.time_s:.0f} s, {usage.memory_bytes / _GIB:.1f} GiB"
