"""A host of a run: meets the others, runs the agent and says how it ended; process 0 also keeps the books.

What pods of a JobSet (`launcher.pod`) and workers on TPU VMs (`launcher.tpu.worker`) share. A pod sees one
attempt; a worker sees as many as come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from launcher import attempts, gang, lease
from launcher.agent import run_agent
from launcher.exits import HostEnd
from launcher.gang import Answer, Call, Gang, GangServer
from launcher.lease import LeaseHeld
from launcher.lease_keeper import LeaseKeeper
from launcher.lookout import Lookout
from launcher.rundir import RunDir
from launcher.storage import StorageError
from launcher.tee import marked
from recipes.contract import COORDINATOR_PORT, GANG_PORT, ExitCode, HostContext, host_names

TELL_S = 2.0
"""How long to try to tell process 0 how this host ended."""
LISTEN_S, LISTEN_NOTICED_S = 5.0, 0.5
"""How long process 0 waits for the others to say how they ended; after a notice."""
DISMISS_S = 10.0
"""How long process 0 waits for the others to ask, to tell them that there will be no other attempt."""
LEASE_RETRY_S = 2.0

type Say = Callable[[str], None]


def say(text: str) -> None:
    """One line of this host's own among the trainer's output."""
    print(marked(text, time.time()), flush=True)


class Notice:
    """Whether a stop was asked for while there was no agent to heed it."""

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
class Member:
    """Who this host is."""

    context: HostContext
    """With attempt 0 until the hosts have met."""
    recipe_path: str
    job: str
    """What failures are counted over: uid of the JobSet, id of the order."""
    incarnation: str
    """The same in all hosts that belong together."""
    uid: str
    """Of this pod, or of this process on a VM."""
    address: str
    bundle: str
    owner: lease.Owner
    """Under which process 0 holds the run's lease."""

    @property
    def hosts(self) -> Sequence[str]:
        """All hosts, in the order of their ranks."""
        return host_names(self.context.num_slices, self.context.hosts_per_slice)

    @property
    def leads(self) -> bool:
        return self.context.process_id == 0

    def during(self, attempt: int) -> HostContext:
        """This host in one attempt."""
        # The coordinator listens on its own address, whatever its name resolves to by then.
        return dataclasses.replace(
            self.context,
            attempt=attempt,
            scratch_dir=f"{self.context.scratch_dir}/{attempt:04d}",
            coordinator=f"{self.address}:{COORDINATOR_PORT}" if self.leads else self.context.coordinator,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """One attempt, as this host saw it."""

    attempt: int
    own: HostEnd


def follow(
    member: Member,
    notice: Notice,
    *,
    after: int = 0,
    say: Say = say,
    began: Callable[[int], None] | None = None,
) -> Ended | None:
    """One attempt of any process but 0; None when asked to stop before it began.

    Args:
      member: this host.
      notice: heeded while it waits, and while the agent runs.
      after: the attempt that it was in before.
      say: takes news while it waits.
      began: is told the number once it is known.

    Raises:
      NeverMet: it did not begin.
      RunOver: there will be none.
    """
    leader = member.context.coordinator.rpartition(":")[0]
    hello = Call(incarnation=member.incarnation, host=member.context.host_name, pod=member.uid, attempt=after)

    def ask() -> Answer:
        return gang.call(leader, GANG_PORT, hello)

    attempt = gang.join(ask, member.context.num_processes, stopping=notice.stopping, say=say, after=after)
    if attempt == 0:
        return None
    if began is not None:
        began(attempt)
    own = attempts.end_of(run_agent(member.during(attempt), orders=notice.order))
    with contextlib.suppress(OSError):
        gang.call(leader, GANG_PORT, dataclasses.replace(hello, attempt=attempt, end=own), timeout_s=TELL_S)
    return Ended(attempt=attempt, own=own)


class Leader:
    """Process 0: where the others meet, and how their attempts end."""

    def __init__(self, member: Member, notice: Notice, *, say: Say = say) -> None:
        self._member, self._notice, self._say = member, notice, say
        self._server = GangServer(self._new_gang(), member.address, GANG_PORT)

    def start(self) -> None:
        """Listens.

        Raises:
          OSError: the address cannot be listened on.
        """
        self._server.start()

    def meet(self) -> bool:
        """Waits for all the others; False when asked to stop first.

        Raises:
          NeverMet: they did not come.
        """
        num_hosts = self._member.context.num_processes
        return gang.gather(self._server.gang, num_hosts, stopping=self._notice.stopping, say=self._say)

    def lead(self, run: RunDir, attempt: int, keeper: LeaseKeeper, lookout: Lookout) -> Ended:
        """One attempt that is numbered already, to its end in the run directory."""
        self._server.gang.open(attempt)
        record = run_agent(self._member.during(attempt), orders=lambda: self._order(keeper, lookout))
        own = attempts.end_of(record)
        if keeper.lost is not None:
            reason, hint = keeper.lost.message, keeper.lost.hint
            own = dataclasses.replace(own, exit_code=ExitCode.INFRASTRUCTURE, reason=reason, hint=hint)
        told = self._listen(own)
        try:
            outcome = attempts.close_attempt(run, attempt, told, now=time.time())
        except StorageError as error:
            # Whoever opens the next attempt does it; how this host ended stays true.
            self._say(f"how the attempt ended could not be written: {error.message}")
            return Ended(attempt=attempt, own=own)
        if outcome.host and outcome.host != own.host:
            self._say(f"first to fail: {outcome.host}: {outcome.reason}")
        return Ended(attempt=attempt, own=own)

    def meet_again(self) -> None:
        """From here on hosts are waited for that outlived the attempt, or came after it began."""
        self._server.gang = self._new_gang()

    def dismiss(self, why: str) -> None:
        """Tells the others that there will be no other attempt, as far as they ask in time."""
        members = self._server.gang
        members.end(why)
        deadline_s = time.monotonic() + DISMISS_S
        while members.untold() and time.monotonic() < deadline_s and not self._notice.came:
            time.sleep(0.05)

    def _new_gang(self) -> Gang:
        member = self._member
        return Gang(member.incarnation, member.hosts, own=member.context.host_name)

    def _order(self, keeper: LeaseKeeper, lookout: Lookout) -> signal.Signals | None:
        """A run that others took over is left at once; one that somebody stops, or a notice, is saved."""
        if keeper.lost is not None:
            return signal.SIGQUIT
        return signal.SIGTERM if lookout.seen().stop else self._notice.order()

    def _listen(self, own: HostEnd) -> Mapping[str, HostEnd]:
        """How all hosts ended, as far as they say so in time."""
        # After a notice of its own the grace is nearly over, and nobody asks who was first.
        is_noticed = own.exit_code == ExitCode.PREEMPTED and not own.collateral
        patience_s = LISTEN_NOTICED_S if is_noticed else LISTEN_S
        deadline_s = time.monotonic() + patience_s
        others = len(self._member.hosts) - 1
        while len(ends := self._server.gang.ends()) < others and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return {**ends, own.host: own}


def hold(run: RunDir, owner: lease.Owner, notice: Notice, *, say: Say = say) -> LeaseKeeper:
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
            say(f"{error.message}; waiting")
            time.sleep(LEASE_RETRY_S)
