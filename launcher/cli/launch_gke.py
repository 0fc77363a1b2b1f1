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
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.beside import beside
from launcher.bundle import Bundle, is_uploaded, left_out, make_bundle, upload
from launcher.cli import output
from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.quick import quick_start
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
from launcher.provenance import lock_info
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from launcher.supervise.limits import refuse_passed_deadline
from launcher.supervise.records import Order
from recipes.check_target import launch_problems
from recipes.contract import ExitCode, Fork
from recipes.elastic import possible_slices, with_slices
from recipes.errors import RecipeError, UserError
from recipes.hardware import CPU
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launcher.gke.follow import Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeLaunch:
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


def launch(asked: GkeLaunch) -> int:
    """Submits, and follows if asked; gives the exit code.

    Raises:
      UserError: something is wrong or refused; the message says what was left behind, if anything.
    """
    began_s = time.monotonic()
    with quick_start():
        launched = _launch(asked)
    if launched.submitted is None:
        return _complete(asked, launched.run)
    _report(asked, launched, launched.submitted, time.monotonic() - began_s)
    if not asked.wait:
        return ExitCode.COMPLETE
    return _supervise(asked, launched) if _is_watched(asked.recipe) else _follow(asked, launched)


def _launch(asked: GkeLaunch) -> _Launched:
    """All steps."""
    recipe = asked.recipe
    refuse_passed_deadline(recipe, time.time())
    _check_addresses(recipe)
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
    lock, to_send = _lock(asked, prepared), _to_send(asked, prepared)
    if rehearsing is not None:
        rehearsing.result()
    alone.result()
    for line in left_out(prepared.code.skipped if prepared.code else ()):
        output.say(line)
    if kind is not Standing.SAME:
        confirm(asked.plan, recipe, assume_yes=asked.assume_yes)
    run, done = _open_run(asked, lock)
    submitted = None
    if not done:
        _send(asked, to_send, run)
        _write_order(asked, run, prepared.bundle, found if kind is Standing.SAME else None)
        submitted = submission.submit()
    return _Launched(cluster=seen.cluster, run=run, submitted=submitted, left_out=prepared.left_out)


def _look(asked: GkeLaunch) -> _Seen:
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


def _check_addresses(recipe: Recipe) -> None:
    """Hosts of a cluster see buckets and the code, nothing of this machine."""
    if lacking := launch_problems(recipe):
        raise RecipeError(recipe.name, lacking)
    for key, path in _local_data(recipe).items():
        if Path(path).expanduser().is_absolute():
            raise UserError(
                f"data.{key}={path}: hosts on GKE cannot read files of this machine",
                hint="copy it to a bucket and give its gs:// address, or a path within the code",
            )


def _check_files(recipe: Recipe, root: Path) -> None:
    """Relative paths begin at the root of the code there."""
    for key, path in _local_data(recipe).items():
        if not (root / path).exists() and not any(root.glob(path)):
            raise UserError(
                f"data.{key}={path}: there is no such file in the code, which begins at {root}",
                hint="give a gs:// address, or a path from there",
            )


def _local_data(recipe: Recipe) -> dict[str, str]:
    """Paths of the recipe that are in no bucket."""
    data = recipe.data
    paths = {"path": data.path, "eval_path": data.eval_path, "tokenizer_path": data.tokenizer_path}
    return {key: path for key, path in paths.items() if path is not None and not path.startswith("gs://")}


def _prepare(asked: GkeLaunch) -> _Prepared:
    """The manifest and the code in it, from this machine alone."""
    recipe, plan, code, digest = asked.recipe, asked.plan, None, None
    if asked.sent is not None:
        digest = str(asked.sent["bundle"])
    elif recipe.target.ship_code:
        code = make_bundle(Path.cwd())
        digest = code.digest
        _check_files(recipe, code.root)
    wanted = wanted_jobset(recipe, plan, digest)
    if found := problems(wanted.manifest):
        raise RecipeError(plan.recipe, found)
    return _Prepared(wanted=wanted, code=code, bundle=digest)


def _as_it_goes_on(asked: GkeLaunch, prepared: _Prepared, jobset: Object | None) -> _Prepared:
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


def _write_order(asked: GkeLaunch, run: RunDir, bundle: str | None, same: Object | None) -> None:
    """What a supervisor is to keep running; of a JobSet that is there already, since it is."""
    path = launched_recipe(asked.recipe)[0]
    if same is not None and (known := run.order()) and (known.recipe, known.bundle) == (path, bundle):
        return
    # Whole seconds, as those of the JobSet's creation, which comes after it.
    launched_s = created_s(same) if same is not None else math.floor(time.time())
    order = Order(id=secrets.token_hex(8), recipe=path, bundle=bundle, launched_s=launched_s, by=asked.again)
    run.write_order(order)


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


def _lock(asked: GkeLaunch, prepared: _Prepared) -> Mapping[str, Any]:
    """What the run would be started from."""
    lock = lock_info(
        plan_sha256=hashlib.sha256(asked.plan.to_json().encode()).hexdigest(),
        folder=Path.cwd(),
        bundle=prepared.code,
        image=asked.recipe.target.image,
        manifest_sha256=prepared.manifest_sha256,
    )
    if asked.sent is not None:
        lock |= {"code": dict(asked.sent), "git": None}
    return lock


def _to_send(asked: GkeLaunch, prepared: _Prepared) -> Bundle | None:
    """The code that is not in the bucket yet."""
    code = prepared.code
    if code is None or is_uploaded(open_storage(asked.recipe.run.root), code.digest):
        return None
    return code


def _open_run(asked: GkeLaunch, lock: Mapping[str, Any]) -> tuple[RunDir, bool]:
    """The run directory, made or opened; and whether the run is complete already."""
    opened = create_or_open(open_storage(asked.recipe.run_dir), asked.recipe, lock, fork=asked.fork)
    for change in opened.changes:
        output.say(f"changed since this run began: {change.key}={change.new} ({change.effect})")
    if opened.created:
        return opened.run, False
    attempts = opened.run.attempts()
    end = opened.run.attempt_end(attempts[-1]) if attempts else None
    return opened.run, end is not None and end.exit_code == ExitCode.COMPLETE


def _send(asked: GkeLaunch, code: Bundle | None, run: RunDir) -> None:
    """Code and recipe to where the hosts look for them."""
    path, body = launched_recipe(asked.recipe)
    # Written again if it is there: the newest tells other verbs which cluster the run is on.
    recorded, cleared = beside(lambda: run.storage.replace(path, body)), beside(run.clear_stop)
    if code is not None and upload(open_storage(asked.recipe.run.root), code):
        output.say(f"sent the code: {code.num_files} files, {code.size_bytes / 1e6:.1f} MB")
    recorded.result()
    cleared.result()


def _complete(asked: GkeLaunch, run: RunDir) -> int:
    if asked.as_json:
        output.data_json({"run": asked.plan.run_name, "outcome": "complete", "directory": run.url})
    output.say(f"{asked.plan.run_name}: complete already; nothing was submitted")
    output.say(f"  directory    {run.url}")
    return ExitCode.COMPLETE


def _report(asked: GkeLaunch, launched: _Launched, submitted: Submitted, took_s: float) -> None:
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
        output.say(f"{plan.run_name}: submitted to {where} in {took_s:.1f} s: {size(plan)}")
    else:
        output.say(f"{plan.run_name}: there already, the same, in {where}; nothing was changed")
    if not asked.wait:
        for line in _next(run):
            output.say(line)


def _next(run: RunDir) -> list[str]:
    address = shlex.quote(run.url)
    return [
        f"  status       muster status {address}",
        f"  read logs    muster logs {address} --follow",
        f"  stop         muster stop {address}",
    ]


def _is_watched(recipe: Recipe) -> bool:
    """Whether it needs more than JobSet does by itself."""
    config = recipe.run
    return config.deadline is not None or config.max_cost is not None or len(possible_slices(recipe)) > 1


def _supervise(asked: GkeLaunch, launched: _Launched) -> int:
    from launcher.cli.places import Places
    from launcher.cli.supervising import Foreground, held, report
    from launcher.display import open_display

    run, finish = launched.run, None
    try:
        with (
            held(run, asked.again) as keeper,
            open_display() as display,
            contextlib.suppress(KeyboardInterrupt),
        ):
            finish = Foreground(run, keeper, Places(), display).follow()
    except LeaseHeld as error:
        output.say(f"{error.message}; only followed from here")
        return _follow(asked, launched)
    if finish is not None:
        report(run, finish, as_json=asked.as_json, again=asked.again)
        return int(finish.exit_code)
    output.say(f"{asked.plan.run_name}: no longer supervised from here; the run goes on")
    output.say("  meanwhile    JobSet restarts it; nobody heeds its deadline or cost, or changes its slices")
    output.say(f"  go on        muster supervise {shlex.quote(run.url)}")
    for line in _next(run):
        output.say(line)
    return INTERRUPTED


def _follow(asked: GkeLaunch, launched: _Launched) -> int:
    # Once the JobSet is there: it does not wait for these.
    from launcher.display import open_display
    from launcher.gke.follow import Follower

    name, run = asked.plan.run_name, launched.run
    try:
        with open_display() as display:
            ended = Follower(launched.cluster, run, name, display).follow()
    except (KeyboardInterrupt, ClusterError) as error:
        output.say(f"{name}: no longer followed; the run goes on")
        for line in _next(run):
            output.say(line)
        if isinstance(error, ClusterError):
            raise
        return INTERRUPTED
    _report_end(asked, launched, ended)
    return ended.exit_code


def _report_end(asked: GkeLaunch, launched: _Launched, ended: Ended) -> None:
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
