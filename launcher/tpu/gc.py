"""Queued resources and nodes that our labels prove ours and that no run has a use for: found, and removed.

Labels name the run and a digest of its address, so a run of the same name below another root is never
taken for this one. What cannot be proven to be of no use stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher import lease
from launcher.lease import LeaseHeld
from launcher.lease_keeper import LeaseKeeper
from launcher.rundir import RunDir
from launcher.storage import Storage
from launcher.summary import RunState, summary
from launcher.supervise.records import Provision, Trouble
from launcher.tpu import names
from launcher.tpu.client import Gone
from launcher.tpu.listing import Listings, Zone
from launcher.tpu.vm import lease_owner
from recipes.contract import RunPath, is_run_name

LEAVING = ("DELETING", "SUSPENDING")
REMOVAL_S = 180.0
POLL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """What is known of the run that machines are labelled with."""

    exists: bool
    over: str = ""
    """Why it needs no machines, as a clause; empty when it may."""
    is_supervised: bool = False
    hosts: str | None = None
    """Id under which its hosts hold its lease now."""
    provisions: Mapping[int, Provision] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """Machines that can go."""

    name: str
    """In full."""
    run: str
    state: str
    created_s: float
    num_slices: int
    provision: int
    usd_per_hour: float | None
    """What the ledger says that they cost; None when it does not."""
    why: str

    @property
    def is_node(self) -> bool:
        """A node without a queued resource."""
        return self.name.split("/")[-2] == "nodes"

    @property
    def place(self) -> str:
        return names.place_of(self.name)


def why_left(owner: Owner | None, order: str, number: int) -> str:
    """Why machines can go, as a clause; empty when they must stay.

    Args:
      owner: their run; None when nobody knows it here.
      order: as their labels say.
      number: of their provision, as their labels say.
    """
    if owner is None:
        return ""
    if not owner.exists:
        return "its run directory is gone"
    if owner.is_supervised or owner.hosts == lease_owner(order, number):
        return ""
    if owner.over:
        return owner.over
    entry = owner.provisions.get(number)
    if entry is not None and entry.order == order and entry.ended_s is not None:
        return f"it is of provision {number}, which is over"
    return ""


def owner_of(root: Storage, run: str, home: str, now: float, own_id: str = "") -> Owner | None:
    """The run below a root that labels name; None when it is none of this root.

    Args:
      root: the folder of all runs.
      run: its name, as labels say.
      home: digest of its address, as labels say.
      now: Unix time.
      own_id: under which the caller itself holds the supervisor's lease.
    """
    if not is_run_name(run) or names.home(root.child(run).url) != home:
        return None
    found = RunDir(root.child(run))
    if not found.exists():
        return Owner(exists=False)
    seen = summary(found, now)
    supervisor = lease.read(found.storage, RunPath.SUPERVISOR)
    hosts = lease.read(found.storage)
    over = {RunState.COMPLETE: "its run is complete", RunState.STOPPED: "its run was stopped"}
    return Owner(
        exists=True,
        over=over.get(seen.state, ""),
        is_supervised=supervisor is not None
        and supervisor.owner.id != own_id
        and lease.is_held(supervisor, now),
        hosts=hosts.owner.id if hosts is not None and lease.is_held(hosts, now) else None,
        provisions={each.number: each for each in found.provisions()},
    )


def leftovers(
    zone: Zone, owner: Callable[[str, str], Owner | None], *, now: float, older_than_s: float
) -> Sequence[Leftover]:
    """What can go in a zone.

    Args:
      zone: what is there.
      owner: run's name and digest of its address -> what is known of it.
      now: Unix time.
      older_than_s: younger ones stay.
    """
    found = [each for each in _ours(zone) if each[0].state not in LEAVING]
    old = [each for each in found if now - each[0].created_s >= older_than_s]
    kept: list[Leftover] = []
    for thing, labels in old:
        known = owner(labels.get(names.RUN, ""), labels.get(names.HOME, ""))
        number = names.provision_of(labels)
        if why := why_left(known, labels.get(names.ORDER, ""), number):
            entry = known.provisions.get(number) if known else None
            price = entry.usd_per_hour if entry else None
            kept.append(dataclasses.replace(thing, why=why, provision=number, usd_per_hour=price))
    return sorted(kept, key=lambda each: each.name)


def _ours(zone: Zone) -> Iterator[tuple[Leftover, Mapping[str, str]]]:
    for group in zone.queued.values():
        for queued in group:
            yield _leftover(queued.name, queued.state, queued.created_s, queued.labels, queued.num_slices)
    for nodes in zone.orphans.values():
        for node in nodes:
            yield _leftover(node.name, node.state, node.created_s, node.labels, 1)


def _leftover(
    name: str, state: str, created_s: float, labels: Mapping[str, str], num_slices: int
) -> tuple[Leftover, Mapping[str, str]]:
    bare = Leftover(
        name=name,
        run=labels.get(names.RUN, ""),
        state=state,
        created_s=created_s,
        num_slices=num_slices,
        provision=0,
        usd_per_hour=None,
        why="",
    )
    return bare, labels


def remove(
    leftover: Leftover,
    listings: Listings,
    root: Storage,
    *,
    is_still: Callable[[Leftover, str], bool],
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Removes machines, if they are still of no use, and waits until they are gone.

    Args:
      leftover: as found before.
      listings: asked anew.
      root: where its run is.
      is_still: whether it would be found again by who holds the supervisor's lease under an id.
      now: Unix time.
      sleep: waits.

    Returns:
      False when it stays: somebody has a use for it now, or the service takes longer than REMOVAL_S.

    Raises:
      Refusal: the service refuses.
    """
    with contextlib.ExitStack() as stack:
        run, me = RunDir(root.child(leftover.run)), lease.this_process("muster gc")
        if run.exists():
            # Nobody gets machines for it meanwhile.
            try:
                keeper = LeaseKeeper(run, me, RunPath.SUPERVISOR)
                keeper.take()
            except LeaseHeld:
                return False
            stack.enter_context(keeper)
        listings.forget()
        if not is_still(leftover, me.id):
            return False
        api = listings.api
        with contextlib.suppress(Gone):
            api.delete_node(leftover.name) if leftover.is_node else api.delete(leftover.name)
        if not _is_gone(leftover, listings, now, sleep):
            return False
        _close(run, leftover.provision, now())
        return True


def _is_gone(
    leftover: Leftover, listings: Listings, now: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    until_s = now() + REMOVAL_S
    while True:
        listings.forget()
        found = (each.name for each, _ in _ours(listings.zone(leftover.place)))
        if leftover.name not in found:
            return True
        if now() >= until_s:
            return False
        sleep(POLL_S)


def _close(run: RunDir, number: int, now: float) -> None:
    """They cost nothing any more."""
    if not run.exists():
        return
    for each in run.provisions():
        if each.number == number and each.ended_s is None:
            why = "removed by muster gc"
            run.write_provision(dataclasses.replace(each, ended_s=now, trouble=Trouble.REPLACED, why=why))
