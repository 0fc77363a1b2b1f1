"""PID 1 of a pod: fetches the code, meets the other hosts, runs the agent, and leaves last words.

    python -P -m launcher.pod            # everything else comes by environment (recipes/contract.py)

It runs twice: first as the image has it, to fetch the code that was launched; then, by exec, from that
code. Process 0 also keeps the run's books: lease, attempt number, and how the attempt ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launcher import attempts, gang, lease
from launcher.agent import Orders, run_agent
from launcher.exits import HostEnd
from launcher.gang import Answer, Call, Gang, GangServer, NeverMet
from launcher.lease import LeaseHeld
from launcher.lease_keeper import LeaseKeeper
from launcher.lookout import Lookout
from launcher.rundir import RunDir, read_recipe
from launcher.storage import StorageError, open_storage
from launcher.tee import marked
from recipes.contract import (
    COORDINATOR_PORT,
    GANG_PORT,
    Env,
    ExitCode,
    HostContext,
    PodEnv,
    host_names,
)
from recipes.errors import UserError

CODE = "MUSTER_CODE"
"""Set by the first run for the second: where the fetched code is."""
LAST_WORDS_BYTES = 4000
"""Kubernetes shows 4096."""
TELL_S = 2.0
"""How long to try to tell process 0 how this host ended."""
LISTEN_S, LISTEN_NOTICED_S = 5.0, 0.5
"""How long process 0 waits for the others to say how they ended; after a notice."""
COLLATERAL_S = 5.0
LEASE_RETRY_S = 2.0


class Notice:
    """Whether a stop was asked for before there was an agent to heed it."""

    def __init__(self) -> None:
        self.came = False

    def listen(self) -> None:
        """A signal during the exec before this stayed pending: PID 1 without a handler would lose it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def stopping(self) -> bool:
        return self.came

    def order(self) -> signal.Signals | None:
        return signal.SIGTERM if self.came else None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """Who this pod is."""

    context: HostContext
    """With attempt 0 until the hosts have met."""
    recipe_path: str
    job: str
    incarnation: str
    uid: str
    address: str
    bundle: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Pod:
        """Raises UserError when the environment is not what a manifest of Muster's gives."""
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
        return cls(
            context=context,
            recipe_path=environ[PodEnv.RECIPE],
            job=job,
            incarnation=f"{job}.{restart}",
            uid=environ[PodEnv.POD_UID],
            address=environ[PodEnv.POD_IP],
            bundle=environ.get(PodEnv.BUNDLE, ""),
        )

    @property
    def hosts(self) -> Sequence[str]:
        """All hosts, in the order of their ranks."""
        return host_names(self.context.num_slices, self.context.hosts_per_slice)

    def during(self, attempt: int) -> HostContext:
        """This host in one attempt."""
        # The coordinator listens on its own address, whatever its name resolves to by then.
        leads = self.context.process_id == 0
        return dataclasses.replace(
            self.context,
            attempt=attempt,
            scratch_dir=f"{self.context.scratch_dir}/{attempt:04d}",
            coordinator=f"{self.address}:{COORDINATOR_PORT}" if leads else self.context.coordinator,
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
        _say(end.words)
        _leave_words(end.words, os.environ)
    return code


def _run(environ: Mapping[str, str], notice: Notice) -> End:
    pod = Pod.from_env(environ)
    if pod.bundle and CODE not in environ:
        _become_the_launched_code(pod, environ)
    run = RunDir(open_storage(pod.context.run_dir))
    try:
        return _lead(pod, run, notice) if pod.context.process_id == 0 else _follow(pod, notice)
    except NeverMet as error:
        return End(exit_code=ExitCode.INFRASTRUCTURE, words=str(error))


def _become_the_launched_code(pod: Pod, environ: Mapping[str, str]) -> None:
    """Fetches the bundle and begins again from it; does not return."""
    from launcher.bundle import fetch

    root = pod.context.run_dir.rpartition("/")[0]
    code = fetch(open_storage(root), pod.bundle, Path(pod.context.scratch_dir) / "code")
    os.chdir(code)
    path = os.pathsep.join(part for part in (str(code), environ.get("PYTHONPATH", "")) if part)
    env = {**environ, CODE: str(code), "PYTHONPATH": path}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execve(sys.executable, [sys.executable, "-P", "-m", "launcher.pod"], env)


def _follow(pod: Pod, notice: Notice) -> End:
    """Any process but 0."""
    leader = pod.context.coordinator.rpartition(":")[0]
    hello = Call(incarnation=pod.incarnation, host=pod.context.host_name, pod=pod.uid)

    def ask() -> Answer:
        return gang.call(leader, GANG_PORT, hello)

    attempt = gang.join(ask, pod.context.num_processes, stopping=notice.stopping, say=_say)
    if attempt == 0:
        return _left_before_it_began()
    own = _agent(pod, attempt, notice.order)
    with contextlib.suppress(OSError):
        gang.call(leader, GANG_PORT, dataclasses.replace(hello, end=own), timeout_s=TELL_S)
    _let_the_cause_come_first(own, notice)
    return _words(own)


def _lead(pod: Pod, run: RunDir, notice: Notice) -> End:
    """Process 0."""
    members = Gang(pod.incarnation, pod.hosts, own=pod.context.host_name)
    GangServer(members, pod.address, GANG_PORT).start()
    if not gang.gather(members, pod.context.num_processes, stopping=notice.stopping, say=_say):
        return _left_before_it_began()
    # Whoever led this JobSet before certainly runs no more: its pods are replaced after they are gone.
    owner = lease.this_process(f"JobSet {run.url.rpartition('/')[2]}", owner_id=lease.job_owner(pod.job))
    with _hold(run, owner, notice) as keeper, Lookout(run) as lookout:
        if stop := run.stop_request():
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
        members.open(attempt)
        own = _agent(pod, attempt, lambda: _leaders_order(keeper, lookout, notice))
        if keeper.lost is not None:
            reason, hint = keeper.lost.message, keeper.lost.hint
            own = dataclasses.replace(own, exit_code=ExitCode.INFRASTRUCTURE, reason=reason, hint=hint)
        told = _listen(members, pod, own)
        try:
            outcome = attempts.close_attempt(run, attempt, told, now=time.time())
        except StorageError as error:
            # Whoever opens the next attempt does it; how this host ended stays true.
            _say(f"how the attempt ended could not be written: {error.message}")
            return _words(own)
    if outcome.host and outcome.host != own.host:
        _say(f"first to fail: {outcome.host}: {outcome.reason}")
    return _words(own)


def _hold(run: RunDir, owner: lease.Owner, notice: Notice) -> LeaseKeeper:
    """The run's lease; waits while another job's may still have to expire.

    Raises:
      LeaseHeld: somebody keeps renewing it.
    """
    deadline_s = time.monotonic() + lease.LEASE_S + lease.CLOCK_SKEW_S + LEASE_RETRY_S
    while True:
        keeper = LeaseKeeper(run, owner)
        try:
            keeper.take()
            return keeper
        except LeaseHeld as error:
            if notice.came or time.monotonic() > deadline_s:
                raise
            _say(f"{error.message}; waiting")
            time.sleep(LEASE_RETRY_S)


def _agent(pod: Pod, attempt: int, orders: Orders) -> HostEnd:
    return attempts.end_of(run_agent(pod.during(attempt), orders=orders))


def _leaders_order(keeper: LeaseKeeper, lookout: Lookout, notice: Notice) -> signal.Signals | None:
    """A run that others have taken over is left at once; one that somebody stops, or a notice, is saved."""
    if keeper.lost is not None:
        return signal.SIGQUIT
    return signal.SIGTERM if lookout.seen().stop else notice.order()


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


def _listen(members: Gang, pod: Pod, own: HostEnd) -> Mapping[str, HostEnd]:
    """How all hosts ended, as far as they say so in time."""
    # After a notice the grace is nearly over, and nobody asks who was first.
    patience_s = LISTEN_NOTICED_S if own.exit_code == ExitCode.PREEMPTED else LISTEN_S
    deadline_s = time.monotonic() + patience_s
    while len(ends := members.ends()) < len(pod.hosts) - 1 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return {**ends, own.host: own}


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


def _say(text: str) -> None:
    print(marked(text, time.time()), flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A storage client may still wait for an answer in its thread; nothing is left to be done.
    os._exit(code)
