"""``muster launch RECIPE target=gke``: submits a run's JobSet, once, and returns; ``--wait`` follows it.

Everything that can be wrong is found before anything is written: the manifest offline, then the cluster
and what is there under the run's name, then the user's consent to the price. Then come the run directory,
the code, and last the JobSet. Killed anywhere between, the same line goes on from there. What waits for
the cluster runs beside what waits for git or the bucket; the two client libraries are imported in turn.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.beside import beside
from launcher.bundle import Bundle, left_out
from launcher.cli import output, sending
from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.quick import quick_start
from launcher.cli.sending import Launch
from launcher.gke.alone import check_alone
from launcher.gke.api_errors import ClusterError
from launcher.gke.blockers import blockers
from launcher.gke.client import Cluster, connect
from launcher.gke.differing import what_differs
from launcher.gke.doctor_checks import Result
from launcher.gke.manifest import manifest_bytes
from launcher.gke.objects import JOBSETS, Object, created_s
from launcher.gke.of_run import num_slices
from launcher.gke.submit import Standing, Submission, Submitted, Wanted, refuse, standing, wanted_jobset
from launcher.gke.validate import problems
from launcher.lease import LeaseHeld
from launcher.plan import Plan, make_plan
from launcher.rundir import RunDir, launched_recipe
from launcher.storage import open_storage
from launcher.supervise.limits import refuse_passed_deadline
from launcher.supervise.records import Order
from recipes.contract import ExitCode
from recipes.elastic import possible_slices, with_slices
from recipes.errors import RecipeError, UserError
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launcher.gke.follow import Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What is known before anything is touched."""

    wanted: Wanted
    code: Bundle | None
    """To upload."""
    bundle: str | None
    """Its digest; None when the image has the code."""

    @property
    def left_out(self) -> Sequence[str]:
        """Files that hosts will not have."""
        return [str(each) for each in self.code.skipped] if self.code else []

    @property
    def manifest_sha256(self) -> str:
        return hashlib.sha256(manifest_bytes(self.wanted.manifest)).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A first look at the cluster."""

    cluster: Cluster
    jobset: Object | None
    """Under the run's name."""
    blockers: Sequence[Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launched:
    """What a launch came to."""

    cluster: Cluster
    run: RunDir
    submitted: Submitted | None
    """None: the run is complete already."""
    left_out: Sequence[str]


def launch(asked: Launch) -> int:
    """Submits, and follows if asked; gives the exit code.

    Raises:
      UserError: something is wrong or refused; the message says what was left behind, if anything.
    """
    began_s = time.monotonic()
    with quick_start():
        launched = _launch(asked)
    if launched.submitted is None:
        return sending.complete_already(asked.plan, launched.run, as_json=asked.as_json)
    _report(asked, launched, launched.submitted, time.monotonic() - began_s)
    if not asked.wait:
        return ExitCode.COMPLETE
    return _supervise(asked, launched) if _is_watched(asked.recipe) else _follow(asked, launched)


def _launch(asked: Launch) -> _Launched:
    """All steps."""
    recipe = asked.recipe
    refuse_passed_deadline(recipe, time.time())
    sending.check_addresses(recipe)
    looking = beside(lambda: _look(asked))
    prepared = _prepare(asked)
    seen = looking.result()
    prepared = _as_it_goes_on(asked, prepared, seen.jobset)
    found, kind = seen.jobset, standing(seen.jobset, prepared.wanted)
    run = RunDir(open_storage(recipe.run_dir))

    def differing(jobset: Object) -> Sequence[str]:
        return what_differs(run, recipe, prepared.wanted, jobset)

    if found is not None:
        refuse(kind, found, prepared.wanted, seen.cluster, differing)
    if kind is not Standing.SAME and seen.blockers:
        raise _blocked(asked.plan, seen)
    submission = Submission(
        seen.cluster, prepared.wanted, differing, say=output.say, sleep=time.sleep, monotonic=time.monotonic
    )
    rehearsing = beside(submission.rehearse) if found is None else None
    is_same = kind is Standing.SAME
    alone = beside(lambda: check_alone(run, recipe, seen.cluster, found, adopts=is_same, note=output.note))
    lock = sending.make_lock(
        recipe,
        asked.plan,
        code=prepared.code,
        sent=asked.sent,
        request_sha256=prepared.manifest_sha256,
    )
    to_send = sending.missing_code(recipe, prepared.code)
    if rehearsing is not None:
        rehearsing.result()
    alone.result()
    for line in left_out(prepared.code.skipped if prepared.code else ()):
        output.say(line)
    if kind is not Standing.SAME:
        sending.confirm(asked.plan, recipe, assume_yes=asked.assume_yes)
    run, done = sending.open_run(recipe, lock, asked.fork)
    submitted = None
    if not done:
        sending.send(recipe, to_send, run)
        _write_order(asked, run, prepared.bundle, found if kind is Standing.SAME else None)
        submitted = submission.submit()
    return _Launched(cluster=seen.cluster, run=run, submitted=submitted, left_out=prepared.left_out)


def _look(asked: Launch) -> _Seen:
    target = asked.recipe.target
    cluster = connect(target.cluster, target.namespace)
    jobset = beside(lambda: cluster.get(JOBSETS, asked.plan.run_name))
    return _Seen(cluster=cluster, blockers=blockers(cluster, asked.recipe), jobset=jobset.result())


def _blocked(plan: Plan, seen: _Seen) -> UserError:
    """What no pod of this run would get past."""
    where = f"{plan.run_name} cannot start in namespace {seen.cluster.namespace} of {seen.cluster.context}"
    first, *others = seen.blockers
    if not others:
        return UserError(f"{where}: {first.message}", hint=first.fix)
    lines = [f"\n  {each.message}: {each.fix}" for each in seen.blockers]
    return UserError(f"{where}:{''.join(lines)}", hint="`muster doctor` with the same arguments checks more")


def _prepare(asked: Launch) -> _Prepared:
    """The manifest and the code in it, from this machine alone."""
    recipe, plan, code, digest = asked.recipe, asked.plan, None, None
    if asked.sent is not None:
        digest = str(asked.sent["bundle"])
    elif recipe.target.ship_code:
        code = sending.pack(recipe)
        digest = code.digest
    wanted = wanted_jobset(recipe, plan, digest)
    if found := problems(wanted.manifest):
        raise RecipeError(plan.recipe, found)
    return _Prepared(wanted=wanted, code=code, bundle=digest)


def _as_it_goes_on(asked: Launch, prepared: _Prepared, jobset: Object | None) -> _Prepared:
    """The same launch on fewer slices, when a supervisor has brought it to that."""
    number, recipe = num_slices(jobset) if jobset is not None else 0, asked.recipe
    if number == recipe.multislice.num_slices or number not in possible_slices(recipe):
        return prepared
    effective = with_slices(recipe, number)
    fewer = wanted_jobset(effective, make_plan(effective), prepared.bundle)
    if standing(jobset, fewer) is not Standing.SAME:
        return prepared
    output.say(f"{asked.plan.run_name}: goes on with {number} of {recipe.multislice.num_slices} slices")
    return replace(prepared, wanted=fewer)


def _write_order(asked: Launch, run: RunDir, bundle: str | None, same: Object | None) -> None:
    """What a supervisor is to keep running; of a JobSet that is there already, since it is."""
    path = launched_recipe(asked.recipe)[0]
    if same is not None and (known := run.order()) and (known.recipe, known.bundle) == (path, bundle):
        return
    # Whole seconds, as those of the JobSet's creation, which comes after it.
    launched_s = created_s(same) if same is not None else math.floor(time.time())
    order = Order(id=secrets.token_hex(8), recipe=path, bundle=bundle, launched_s=launched_s, by=asked.again)
    run.write_order(order)


def _report(asked: Launch, launched: _Launched, submitted: Submitted, took_s: float) -> None:
    run, cluster = launched.run, launched.cluster
    plan, where = asked.plan, f"namespace {cluster.namespace} of cluster {cluster.context}"
    if asked.as_json and not asked.wait:
        output.data_json(
            {
                "run": plan.run_name,
                "outcome": "submitted" if submitted.created else "adopted",
                "directory": run.url,
                "cluster": cluster.context,
                "namespace": cluster.namespace,
                "message_patterns": not submitted.degraded,
                "left_out": launched.left_out,
                "took_s": round(took_s, 3),
            }
        )
    if submitted.degraded:
        output.note(
            "this cluster's JobSet is older than 0.10: preemptions count as restarts (run.max_restarts)"
        )
    if submitted.created:
        output.say(f"{plan.run_name}: submitted to {where} in {took_s:.1f} s: {sending.size(plan)}")
    else:
        output.say(f"{plan.run_name}: there already, the same, in {where}; nothing was changed")
    if not asked.wait:
        for line in sending.next_commands(run):
            output.say(line)


def _is_watched(recipe: Recipe) -> bool:
    """Whether it needs more than JobSet does by itself."""
    config = recipe.run
    return config.deadline is not None or config.max_cost is not None or len(possible_slices(recipe)) > 1


def _supervise(asked: Launch, launched: _Launched) -> int:
    from launcher.cli.places import Places
    from launcher.cli.supervising import Foreground, held, left_behind, report
    from launcher.display import open_display

    run, finish, foreground = launched.run, None, None
    try:
        with (
            held(run, asked.again) as keeper,
            open_display() as display,
            contextlib.suppress(KeyboardInterrupt),
        ):
            foreground = Foreground(run, keeper, Places(), display)
            finish = foreground.follow()
    except LeaseHeld as error:
        output.say(f"{error.message}; only followed from here")
        return _follow(asked, launched)
    if finish is not None:
        report(run, finish, as_json=asked.as_json, again=asked.again)
        return int(finish.exit_code)
    for line in left_behind(run, foreground.observation if foreground else None):
        output.say(line)
    return INTERRUPTED


def _follow(asked: Launch, launched: _Launched) -> int:
    # Once the JobSet is there: it does not wait for these.
    from launcher.display import open_display
    from launcher.gke.follow import Follower

    name, run = asked.plan.run_name, launched.run
    try:
        with open_display() as display:
            ended = Follower(launched.cluster, run, name, display).follow()
    except (KeyboardInterrupt, ClusterError) as error:
        output.say(f"{name}: no longer followed; the run goes on")
        for line in sending.next_commands(run):
            output.say(line)
        if isinstance(error, ClusterError):
            raise
        return INTERRUPTED
    _report_end(asked, launched, ended)
    return ended.exit_code


def _report_end(asked: Launch, launched: _Launched, ended: Ended) -> None:
    name, run = asked.plan.run_name, launched.run
    if asked.as_json:
        output.data_json(
            {
                "run": name,
                "exit_code": int(ended.exit_code),
                "outcome": ended.exit_code.name.lower(),
                "reason": ended.reason,
                "hint": ended.hint,
                "directory": run.url,
                "left_out": launched.left_out,
            }
        )
    if ended.exit_code in (ExitCode.COMPLETE, ExitCode.PREEMPTED):
        output.say(f"{name}: {ended.reason}" + (f"; {ended.hint}" if ended.hint else ""))
    else:
        output.error(f"{name}: {ended.reason}", ended.hint)
        output.say(f"  read logs    muster logs {shlex.quote(run.url)}")
        output.say(f"once that is mended: {asked.again}")
