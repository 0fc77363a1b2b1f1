"""``muster dryrun``: the whole rehearsal of a recipe on this machine, without a TPU."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from recipes.errors import UserError

if TYPE_CHECKING:
    from launcher.dryrun.report import Report
    from launcher.dryrun.stages import Wanted


@click.command("dryrun")
@recipe_arguments()
@json_option
@click.option("--no-preflight", is_flag=True, help="Do not ask the TPU compiler.")
@click.option("--quick", is_flag=True, help="Preflight from sizes alone, at once.")
@click.option("--synthetic-data", is_flag=True, help="Random tokens instead of the recipe's data.")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep all that is written in this new folder. Without it only a failure is kept.",
)
def command(
    recipe: str,
    overrides: Sequence[str],
    search: Sequence[Path],
    as_json: bool,
    no_preflight: bool,
    quick: bool,
    synthetic_data: bool,
    folder: Path | None,
) -> None:
    """Rehearse RECIPE on this machine: plan, manifest, preflight, and a run in miniature.

    The run has the recipe's axes, slices and features on CPU devices, for a few steps; a second one loses
    a host and has to end bit for bit like the first. Exits with 0 only if all is well.
    """
    from launcher.dryrun.report import render
    from launcher.dryrun.stages import Wanted

    if no_preflight and quick:
        raise UserError("--no-preflight and --quick exclude each other", hint="give one of them")
    began_s = time.monotonic()
    composed = compose_recipe(recipe, overrides, search).recipe
    compose_s = time.monotonic() - began_s
    searched = [word for each in search for word in ("--recipes", str(each))]
    words = [recipe, *overrides, *searched, *(["--quick"] if quick else [])]
    wanted = Wanted(recipe=composed, preflight=None if no_preflight else words, synthetic_data=synthetic_data)
    with _stopped_by_signals(), _directory(folder) as place:
        report = _rehearse(wanted, place, compose_s)
    output.data_json(report.to_json()) if as_json else output.data(render(report))
    click.get_current_context().exit(report.exit_code)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Place:
    path: Path
    kept: bool


def _rehearse(wanted: Wanted, place: _Place, compose_s: float) -> Report:
    from launcher.dryrun.checks import Seen, passed
    from launcher.dryrun.report import Report, describe, line
    from launcher.dryrun.stages import stages
    from recipes.miniature import miniature

    found = [passed("compose", Seen(detail="every check passed"), compose_s)]
    # Closed before the folder is removed, and with it what still runs there.
    with contextlib.closing(stages(wanted, place.path, output.say)) as ended:
        for stage in ended:
            found.append(stage)
            output.say(f"{stage.name}: {line(stage)}")
    report = Report(
        recipe=wanted.recipe.name,
        stages=found,
        miniature=describe(miniature(wanted.recipe)),
        directory=str(place.path),
    )
    place.kept = place.kept or not report.ok
    return report if place.kept else dataclasses.replace(report, directory=None)


@contextlib.contextmanager
def _directory(folder: Path | None) -> Iterator[_Place]:
    """A folder for all that is written; removed unless it is to be kept.

    Raises:
      UserError: it cannot be made, or has something in it.
    """
    try:
        if folder is None:
            place = _Place(path=Path(tempfile.mkdtemp(prefix="muster-dryrun-")).resolve(), kept=False)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            place = _Place(path=folder.resolve(), kept=True)
        is_empty = not any(place.path.iterdir())
    except OSError as error:
        raise UserError(
            f"no folder {folder or 'for temporary files'}: {error.strerror}",
            hint="free some space, or name another place with --dir",
        ) from error
    if not is_empty:
        raise UserError(f"--dir {folder}: there is something in it", hint="name a new folder")
    try:
        yield place
    finally:
        if not place.kept:
            shutil.rmtree(place.path, ignore_errors=True)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """What ends a job of CI is heeded like Ctrl-C, so that no process is left behind."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if _is_heeded(number)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_heeded(number: signal.Signals) -> bool:
    """Not what nohup and the like ignore."""
    return signal.getsignal(number) is not signal.SIG_IGN
