"""``muster launch RECIPE``: from one line to a finished run; the same line again resumes it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, recipe_arguments
from launcher.cli.quick import quick_start
from launcher.plan import make_plan
from recipes.errors import UserError
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launcher.cli.sending import Launch


@click.command()
@recipe_arguments()
@click.option("--fork", "fork_name", metavar="NEW", help="Start run NEW from this run's newest checkpoint.")
@click.option("--no-restart", is_flag=True, help="End with the first attempt, however it ends.")
@click.option("--dry-run", is_flag=True, help="Print the plan and touch nothing.")
@click.option("--wait", is_flag=True, help="Elsewhere: supervise the run to its end; Ctrl-C lets it go on.")
@click.option("--yes", "assume_yes", is_flag=True, help="Launch above target.max_chips or max_cost unasked.")
@click.option("--json", "as_json", is_flag=True, help="How it ended, as JSON on stdout.")
def command(
    recipe: str,
    overrides: Sequence[str],
    search: Sequence[Path],
    fork_name: str | None,
    no_restart: bool,
    dry_run: bool,
    wait: bool,
    assume_yes: bool,
    as_json: bool,
) -> None:
    """Run RECIPE to its end, or resume it.

    Here, Ctrl-C once saves and stops; launching again goes on from there. On a cluster (target=gke) the
    run is submitted and goes on by itself. On TPU VMs (target=tpu) it takes a supervisor: --wait, or
    `muster supervise`.
    """
    with quick_start():
        resolved = compose_recipe(recipe, overrides, search).recipe
    fork = None
    if fork_name is not None:
        from launcher.fork import find_fork, renamed

        fork, resolved = find_fork(resolved, fork_name), renamed(resolved, fork_name)
        overrides = [
            *(text for text in overrides if not text.startswith("run.name=")),
            f"run.name={fork_name}",
        ]
    plan = make_plan(resolved)
    if dry_run:
        output.data(plan.to_json().rstrip("\n"))
        return
    _check_target(resolved, no_restart=no_restart, wait=wait)
    searched = [word for folder in search for word in ("--recipes", str(folder))]
    again = shlex.join(["muster", "launch", recipe, *overrides, *searched])
    if resolved.target.kind != "local":
        from launcher.cli import sending

        launch = _launch_gke if resolved.target.kind == "gke" else _launch_tpu
        asked = sending.Launch(
            recipe=resolved,
            plan=plan,
            again=again,
            fork=fork,
            assume_yes=assume_yes,
            wait=wait,
            as_json=as_json,
        )
        click.get_current_context().exit(launch(asked))
    from launcher.cli import launch_local
    from launcher.inputs import check_inputs

    check_inputs(resolved)
    finish = launch_local.launch(resolved, plan, restart_allowed=not no_restart, what=again, fork=fork)
    # The terminal may be gone; the exit code must not be lost with it.
    with output.not_essential():
        launch_local.report(plan, finish, again=again, as_json=as_json)
    click.get_current_context().exit(int(finish.exit_code))


# Each kind's imports are for those who need them.


def _launch_gke(asked: Launch) -> int:
    from launcher.cli import launch_gke

    return int(launch_gke.launch(asked))


def _launch_tpu(asked: Launch) -> int:
    from launcher.cli import launch_tpu

    return int(launch_tpu.launch(asked))


def _check_target(recipe: Recipe, *, no_restart: bool, wait: bool) -> None:
    kind = recipe.target.kind
    if kind != "local" and no_restart:
        raise UserError("--no-restart is for local runs", hint="elsewhere, give run.max_restarts=0")
    if kind == "local" and wait:
        raise UserError("--wait is for runs elsewhere", hint="a local run is always followed to its end")
