"""PID 1 of a pod: fetches the code, meets the other hosts, runs the agent, and leaves last words.

    python -P -m launcher.pod            # everything else comes by environment (recipes/contract.py)

It runs twice: first as the image has it, to fetch the code that was launched; then, by exec, from that
code. Process 0 also keeps the run's books: lease, attempt number, and how the attempt ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import attempts, lease, member
from launcher.exits import HostEnd
from launcher.gang import NeverMet
from launcher.lookout import Lookout
from launcher.member import Leader, Member, Notice, say
from launcher.rundir import RunDir, read_recipe
from launcher.storage import open_storage
from recipes.contract import Env, ExitCode, HostContext, PodEnv
from recipes.errors import UserError

CODE = "MUSTER_CODE"
"""Set by the first run for the second: where the fetched code is."""
LAST_WORDS_BYTES = 4000
"""Kubernetes shows 4096."""
COLLATERAL_S = 5.0
REPLACED_S, REMOVED_S = 900.0, 30.0
"""How long to wait for the supervisor to replace this JobSet by one with other slices; to remove it."""
STOPPED_POLL_S = 2.0


def member_of(environ: Mapping[str, str]) -> Member:
    """Who this pod is.

    Raises:
      UserError: the environment is not what a manifest of Muster's gives.
    """
    needed = [name.value for name in PodEnv if name is not PodEnv.BUNDLE]
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        raise UserError(f"{', '.join(missing)} is not set", hint="pods are started by `muster launch`")
    try:
        context = HostContext.from_env({**environ, Env.ATTEMPT: "0"})
    except ValueError as error:
        raise UserError(str(error), hint="pods are started by `muster launch`") from error
    if context is None:
        raise UserError(f"{Env.RUN_DIR.value} is not set", hint="pods are started by `muster launch`")
    job, restart = environ[PodEnv.JOBSET_UID], environ[PodEnv.RESTART_ATTEMPT]
    name = context.run_dir.rpartition("/")[2]
    return Member(
        context=context,
        recipe_path=environ[PodEnv.RECIPE],
        job=job,
        incarnation=f"{job}.{restart}",
        uid=environ[PodEnv.POD_UID],
        address=environ[PodEnv.POD_IP],
        bundle=environ.get(PodEnv.BUNDLE, ""),
        # Whoever led this JobSet before certainly runs no more: its pods are replaced after they are gone.
        owner=lease.this_process(f"JobSet {name}", owner_id=lease.job_owner(job)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a pod ends."""

    exit_code: int
    words: str = ""
    """For Kubernetes to show; empty when there is nothing to say."""


def main() -> int:
    notice = Notice()
    notice.listen()
    try:
        end = _run(os.environ, notice)
    except UserError as error:
        end = End(exit_code=error.exit_code, words=f"{error.message}; {error.hint}")
    except OSError as error:
        end = End(exit_code=ExitCode.INFRASTRUCTURE, words=str(error))
    code = end.exit_code
    if notice.came and code in (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT):
        # A suspended job that leaves so would fail for good.
        code = ExitCode.PREEMPTED
    if end.words:
        say(end.words)
        _leave_words(end.words, os.environ)
    return code


def _run(environ: Mapping[str, str], notice: Notice) -> End:
    pod = member_of(environ)
    if pod.bundle and CODE not in environ:
        _become_the_launched_code(pod, environ)
    try:
        return _lead(pod, notice) if pod.leads else _follow(pod, notice)
    except NeverMet as error:
        return End(exit_code=ExitCode.INFRASTRUCTURE, words=str(error))


def _become_the_launched_code(pod: Member, environ: Mapping[str, str]) -> None:
    """Fetches the bundle and begins again from it; does not return."""
    from launcher.bundle import fetch

    root = pod.context.run_dir.rpartition("/")[0]
    code = fetch(open_storage(root), pod.bundle, Path(pod.context.scratch_dir) / "code")
    os.chdir(code)
    path = os.pathsep.join(part for part in (str(code), environ.get("PYTHONPATH", "")) if part)
    env = {**environ, CODE: str(code), "PYTHONPATH": path}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execve(sys.executable, [sys.executable, "-P", "-m", "launcher.pod"], env)


def _follow(pod: Member, notice: Notice) -> End:
    """Any process but 0."""
    ended = member.follow(pod, notice)
    if ended is None:
        return _left_before_it_began()
    _let_the_cause_come_first(ended.own, notice)
    return _words(ended.own)


def _lead(pod: Member, notice: Notice) -> End:
    """Process 0."""
    run = RunDir(open_storage(pod.context.run_dir))
    leader = Leader(pod, notice)
    leader.start()
    if not _wait_to_be_removed(run, notice) or not leader.meet():
        return _left_before_it_began()
    with member.hold(run, pod.owner, notice) as keeper, Lookout(run) as lookout:
        stop = run.stop_request()
        if stop and stop.resumes:
            say("nobody replaces this JobSet: going on with it")
            run.clear_stop()
        elif stop:
            # JobSet would restart whatever else this ended with.
            words = f"stopped as asked by {stop.by}; launch it again to go on"
            return End(exit_code=ExitCode.EXPERIMENT_FAILED, words=words)
        opening = attempts.Opening(
            recipe=read_recipe(run.storage, pod.recipe_path),
            hosts=pod.hosts,
            job=pod.job,
            lock={"bundle": pod.bundle or None, "incarnation": pod.incarnation},
        )
        attempt = attempts.open_attempt(run, opening, time.time())
        return _words(leader.lead(run, attempt, keeper, lookout).own)


def _wait_to_be_removed(run: RunDir, notice: Notice) -> bool:
    """Waits while somebody may be about to remove this JobSet; False when asked to leave.

    JobSet restarts what left to make room, and any other end of these pods would be counted or fail it.
    The lease is not held meanwhile: that is how the supervisor sees that the hosts have left.
    """
    began_s, told = time.monotonic(), False
    while not notice.came and (stop := run.stop_request()) is not None:
        if time.monotonic() - began_s >= (REPLACED_S if stop.resumes else REMOVED_S):
            break
        if not told:
            say(f"asked to stop: {stop.by}; waiting for this JobSet to be removed")
            told = True
        time.sleep(STOPPED_POLL_S)
    return not notice.came


def _let_the_cause_come_first(own: HostEnd, notice: Notice) -> None:
    """JobSet judges by the Jobs that have failed so far: a host that died of another's end stays a while.

    Else a preemption during compilation would be counted, because the peers of the preempted host die of
    it before that one is gone. JobSet's SIGTERM ends the wait.
    """
    notice.listen()
    if own.exit_code == ExitCode.INFRASTRUCTURE and own.collateral:
        deadline_s = time.monotonic() + COLLATERAL_S
        while not notice.came and time.monotonic() < deadline_s:
            time.sleep(0.05)


def _words(own: HostEnd) -> End:
    if own.exit_code == ExitCode.COMPLETE:
        return End(exit_code=own.exit_code)
    hint = f"; {own.hint}" if own.hint else ""
    return End(exit_code=own.exit_code, words=f"{own.host}: {own.reason}{hint}")


def _left_before_it_began() -> End:
    return End(exit_code=ExitCode.PREEMPTED, words="asked to stop before the attempt began")


def _leave_words(words: str, environ: Mapping[str, str]) -> None:
    path = environ.get(PodEnv.TERMINATION_LOG)
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_bytes(words.encode(errors="replace")[:LAST_WORDS_BYTES])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A storage client may still wait for an answer in its thread; nothing is left to be done.
    os._exit(code)
