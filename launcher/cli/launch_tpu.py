"""``muster launch RECIPE target=tpu``: asks for TPU VMs and, if asked to wait, brings the run to its end.

Before anything is asked of the cloud the order is in the run directory; from then on any supervisor can go
on. A second launch of the same changes nothing while the first one's machines are there.
"""

from __future__ import annotations

import hashlib
import secrets
import time

from launcher.bundle import Bundle, left_out
from launcher.cli import output, sending
from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.places import Places
from launcher.cli.quick import quick_start
from launcher.cli.sending import Launch
from launcher.cli.supervising import Foreground, held, left_behind, report
from launcher.display import open_display
from launcher.lease import LeaseHeld
from launcher.rundir import RunDir, launched_recipe, safe_changes
from launcher.storage import open_storage
from launcher.supervise.actions import Finish, Wait
from launcher.supervise.limits import refuse_passed_deadline
from launcher.supervise.records import Order
from launcher.tpu.client import check_endpoint
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.schema import Recipe

PACKAGES = ("launcher", "recipes", "trainer")
"""What the hosts run; it comes with the code."""


def launch(asked: Launch) -> int:
    """Asks for the machines, and follows if asked; gives the exit code.

    Raises:
      UserError: something is wrong or refused; the message says what was left behind, if anything.
    """
    recipe = asked.recipe
    with quick_start():
        sending.check_addresses(recipe)
        check_endpoint(recipe)
        refuse_passed_deadline(recipe, time.time())
        code = None if asked.sent is not None else _pack(recipe)
    bundle = code.digest if code else str((asked.sent or {})["bundle"])
    run = RunDir(open_storage(recipe.run_dir))
    same = _same_order(run, recipe, bundle)
    for line in left_out(code.skipped if code else ()):
        output.say(line)
    if same is None:
        sending.confirm(asked.plan, recipe, assume_yes=asked.assume_yes)
    lock = sending.make_lock(
        recipe, asked.plan, code=code, sent=asked.sent, request_sha256=_request_digest(recipe, bundle)
    )
    run, done = sending.open_run(recipe, lock, asked.fork)
    if done:
        return sending.complete_already(asked.plan, run, as_json=asked.as_json)
    try:
        with held(run, asked.again) as keeper, open_display() as display:
            if same is None:
                sending.send(recipe, sending.missing_code(recipe, code), run)
                run.write_order(_order(recipe, bundle, asked.again))
            else:
                output.say(f"{asked.plan.run_name}: launched already, the same; nothing was changed")
            foreground = Foreground(run, keeper, Places(), display)
            try:
                result = _see_asked(foreground)
                finish = foreground.follow() if asked.wait and not isinstance(result, Finish) else result
            except KeyboardInterrupt:
                finish = None
    except LeaseHeld as error:
        if same is None:
            raise
        output.say(f"{error.message}; {error.hint}")
        return ExitCode.COMPLETE
    if isinstance(finish, Finish):
        report(run, finish, as_json=asked.as_json, again=asked.again)
        return int(finish.exit_code)
    _report_asked(asked, run, foreground, finish)
    if finish is None:
        return INTERRUPTED
    is_asked = any(each.ended_s is None for each in run.provisions())
    return ExitCode.COMPLETE if is_asked else ExitCode.INFRASTRUCTURE


def _see_asked(foreground: Foreground) -> Finish | Wait:
    """Acts until the machines are asked for, or cannot be now."""
    while not isinstance(result := foreground.step(), Finish | Wait):
        pass
    return result


def _pack(recipe: Recipe) -> Bundle:
    code = sending.pack(recipe)
    missing = [name for name in PACKAGES if not (code.root / name / "__init__.py").is_file()]
    if missing:
        raise UserError(
            f"the code that is sent, {code.root}, has no package {', '.join(missing)}: the hosts run it",
            hint="launch from a checkout of Muster, with your own files in it",
        )
    if recipe.target.python is None:
        for path in recipe.target.requirements:
            if not (code.root / path).is_file():
                raise UserError(
                    f"target.requirements: there is no {path} in {code.root}",
                    hint="give lock files within the code, or target.python for an interpreter that has all",
                )
    return code


def _same_order(run: RunDir, recipe: Recipe, bundle: str) -> Order | None:
    """The order under way when it is this very one; None when there is none.

    Raises:
      UserError: machines of another launch of this run are still there.
    """
    if not run.exists():
        return None
    safe_changes(run, recipe)
    order = run.order()
    live = [each for each in run.provisions() if each.ended_s is None]
    if order is None or not live:
        return None
    stop = run.stop_request()
    if (order.recipe, order.bundle) == (launched_recipe(recipe)[0], bundle) and stop is None:
        return order
    what = "is being stopped" if stop is not None else "has other settings or code"
    raise UserError(
        f"{live[-1].name} in {live[-1].place} is still there, and {what}",
        hint=f"stop it first: `muster stop {run.url}`, then launch again; it resumes from its checkpoint",
    )


def _order(recipe: Recipe, bundle: str, by: str) -> Order:
    return Order(
        id=secrets.token_hex(8),
        recipe=launched_recipe(recipe)[0],
        bundle=bundle,
        launched_s=time.time(),
        by=by,
    )


def _request_digest(recipe: Recipe, bundle: str) -> str:
    from launcher.tpu.request import preview_bytes

    return hashlib.sha256(preview_bytes(recipe, bundle)).hexdigest()


def _report_asked(asked: Launch, run: RunDir, foreground: Foreground, result: Wait | None) -> None:
    if asked.as_json:
        output.data_json(
            {
                "run": asked.plan.run_name,
                "outcome": "asked" if result is not None else "interrupted",
                "directory": run.url,
                "machines": [
                    {"name": each.name, "place": each.place, "state": each.state}
                    for each in (foreground.observation.machines if foreground.observation else ())
                ],
            }
        )
    if result is not None:
        output.say(f"{asked.plan.run_name}: {result.why}: {sending.size(asked.plan)}")
    for line in left_behind(run, foreground.observation):
        output.say(line)
    for line in sending.next_commands(run)[:2]:
        output.say(line)
