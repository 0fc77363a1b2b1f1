"""What launching elsewhere takes whatever the place: code, run directory, and asking before it is dear."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from launcher.beside import beside
from launcher.bundle import Bundle, is_uploaded, make_bundle, upload
from launcher.cli import output
from launcher.cli.interrupts import INTERRUPTED
from launcher.plan import Plan, option_plan
from launcher.provenance import lock_info
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from recipes.check_target import launch_problems
from recipes.contract import ExitCode, Fork
from recipes.errors import RecipeError, UserError
from recipes.hardware import CPU
from recipes.options import choices
from recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch."""

    recipe: Recipe
    plan: Plan
    again: str
    """The command line that launches it again."""
    sent: Mapping[str, Any] | None = None
    """What a lock.json says of code that is in the bucket already; None: the working tree is sent."""
    fork: Fork | None = None
    assume_yes: bool = False
    wait: bool = False
    as_json: bool = False


def check_addresses(recipe: Recipe) -> None:
    """Hosts elsewhere see buckets and the code, nothing of this machine.

    Raises:
      UserError: the recipe names what they cannot see, or lacks what a launch needs.
    """
    if lacking := launch_problems(recipe):
        raise RecipeError(recipe.name, lacking)
    check_budget(recipe)
    for key, path in local_data(recipe).items():
        if Path(path).expanduser().is_absolute():
            raise UserError(
                f"data.{key}={path}: hosts elsewhere cannot read files of this machine",
                hint="copy it to a bucket and give its gs:// address, or a path within the code",
            )


def check_budget(recipe: Recipe) -> None:
    """Raises UserError when run.max_cost cannot be kept, for want of a price."""
    if recipe.run.max_cost is None:
        return
    for each in (option_plan(recipe, choice) for choice in choices(recipe)):
        if each.usd_per_hour is None:
            raise UserError(
                f"run.max_cost={recipe.run.max_cost:g}: no price is known for"
                f" {recipe.hardware.generation} {each.capacity}, so nobody can keep to it",
                hint="set hardware.price_per_chip_hour to your own price, or run.max_cost=null",
            )


def local_data(recipe: Recipe) -> dict[str, str]:
    """Paths of the recipe that are in no bucket."""
    data = recipe.data
    paths = {"path": data.path, "eval_path": data.eval_path, "tokenizer_path": data.tokenizer_path}
    return {key: path for key, path in paths.items() if path is not None and not path.startswith("gs://")}


def pack(recipe: Recipe) -> Bundle:
    """The working tree, with the recipe's data in it. Relative paths begin at its root.

    Raises:
      UserError: a file that the recipe names is not there, or the tree is too large.
    """
    code = make_bundle(Path.cwd())
    for key, path in local_data(recipe).items():
        if not (code.root / path).exists() and not any(code.root.glob(path)):
            raise UserError(
                f"data.{key}={path}: there is no such file in the code, which begins at {code.root}",
                hint="give a gs:// address, or a path from there",
            )
    return code


def confirm(plan: Plan, recipe: Recipe, *, assume_yes: bool) -> None:
    """Asks when a launch is larger than the recipe's limits.

    Raises:
      UserError: the answer is no, or there is no terminal to ask on.
    """
    over = _over_limits(plan, recipe)
    if not over:
        return
    text = f"{plan.run_name}: {size(plan)}: more than {' and '.join(over)}"
    if assume_yes:
        output.say(text)
        return
    if not sys.stdin.isatty():
        raise UserError(
            f"{text}, and there is no terminal to ask on",
            hint="give --yes, or raise that limit in the recipe",
        )
    output.say(text)
    if not click.confirm("Launch it?", err=True):
        raise UserError("not launched; nothing was changed", exit_code=INTERRUPTED)


def size(plan: Plan) -> str:
    """Chips and price, for people."""
    hardware, price = plan.hardware, plan.price
    shape = f"{hardware.num_slices} x {hardware.generation} {hardware.topology}"
    cost = f"USD {price.usd_per_hour:,.2f} an hour ({price.source})" if price else "price unknown"
    if hardware.generation == CPU:
        return f"{shape}, {hardware.num_hosts} hosts" + (f", {cost}" if price else "")
    return f"{shape}, {hardware.num_chips:,} chips, {cost}"


def _over_limits(plan: Plan, recipe: Recipe) -> list[str]:
    """An unknown price cannot be compared, and ``size`` says so: only chips count then."""
    target, price, over = recipe.target, plan.price, []
    if plan.hardware.generation != CPU and plan.hardware.num_chips > target.max_chips:
        over.append(f"target.max_chips={target.max_chips}")
    if price is not None and price.usd_per_hour > target.max_cost:
        over.append(f"target.max_cost={target.max_cost:g}")
    return over


def make_lock(
    recipe: Recipe, plan: Plan, *, code: Bundle | None, sent: Mapping[str, Any] | None, request_sha256: str
) -> Mapping[str, Any]:
    """What the run would be started from.

    Args:
      recipe: as launched.
      plan: its plan.
      code: the working tree, when it is sent.
      sent: what an earlier lock.json says of code that is in the bucket already.
      request_sha256: digest of what is asked of the place.
    """
    lock = lock_info(
        plan_sha256=hashlib.sha256(plan.to_json().encode()).hexdigest(),
        folder=Path.cwd(),
        bundle=code,
        image=recipe.target.image,
        manifest_sha256=request_sha256,
    )
    return lock if sent is None else lock | {"code": dict(sent), "git": None}


def missing_code(recipe: Recipe, code: Bundle | None) -> Bundle | None:
    """The code if it is not in the bucket yet."""
    if code is None or is_uploaded(open_storage(recipe.run.root), code.digest):
        return None
    return code


def open_run(recipe: Recipe, lock: Mapping[str, Any], fork: Fork | None) -> tuple[RunDir, bool]:
    """The run directory, made or opened; and whether the run is complete already."""
    opened = create_or_open(open_storage(recipe.run_dir), recipe, lock, fork=fork)
    for change in opened.changes:
        output.say(f"changed since this run began: {change.key}={change.new} ({change.effect})")
    if opened.created:
        return opened.run, False
    attempts = opened.run.attempts()
    end = opened.run.attempt_end(attempts[-1]) if attempts else None
    return opened.run, end is not None and end.exit_code == ExitCode.COMPLETE


def send(recipe: Recipe, code: Bundle | None, run: RunDir) -> None:
    """Code and recipe to where the hosts look for them."""
    path, body = launched_recipe(recipe)
    # Written again if it is there: the newest tells other verbs where the run is.
    recorded, cleared = beside(lambda: run.storage.replace(path, body)), beside(run.clear_stop)
    if code is not None and upload(open_storage(recipe.run.root), code):
        output.say(f"sent the code: {code.num_files} files, {code.size_bytes / 1e6:.1f} MB")
    recorded.result()
    cleared.result()


def complete_already(plan: Plan, run: RunDir, *, as_json: bool) -> int:
    """Says that nothing has to be done."""
    if as_json:
        output.data_json({"run": plan.run_name, "outcome": "complete", "directory": run.url})
    output.say(f"{plan.run_name}: complete already; nothing was submitted")
    output.say(f"  directory    {run.url}")
    return ExitCode.COMPLETE


def next_commands(run: RunDir) -> Sequence[str]:
    """What to type next about a run that goes on elsewhere."""
    address = shlex.quote(run.url)
    return [
        f"  status       muster status {address}",
        f"  read logs    muster logs {address} --follow",
        f"  stop         muster stop {address}",
    ]
