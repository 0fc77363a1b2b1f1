"""Who may act on a run: ``lease.json`` and ``supervisor.json``, handed over only by versioned writes.

The first is held by who runs the attempt, the second by who gets machines for it.

A lease is free when it was released, when it expired, or when its owner's process is dead on this
very machine. It is never deleted: releasing writes a marker, so every change goes through the
version check. Of any number of processes that try at once, exactly one gets it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import secrets
import socket
from dataclasses import dataclass

from launcher import ledger, processes
from launcher.processes import ProcessId
from launcher.storage_types import Conflict, Exists, NotFound, Storage, StorageError, Version
from recipes.contract import ExitCode, RunPath
from recipes.errors import UserError

LEASE_S = 60.0
"""A lease that is not renewed for this long is free. Renew at a quarter of it."""

CLOCK_SKEW_S = 5.0
"""How far the clocks of two machines may differ."""

WRONG_CLOCK_S = 600.0
"""A lease that ends further ahead than its length and this was written, or is read, by a wrong clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """One process that wants to act on a run."""

    id: str
    """Unique to this process and this acquisition."""
    hostname: str
    process: ProcessId
    what: str
    """What it does, for people: ``muster launch`` ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The content of lease.json."""

    owner: Owner
    acquired_s: float
    expires_s: float
    released: bool = False

    def holder(self) -> str:
        """Who it is, for people."""
        return f"{self.owner.what} (process {self.owner.process.pid} on {self.owner.hostname})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A lease that this process holds; give it to ``renew`` and ``release``."""

    lease: Lease
    version: Version
    path: str = RunPath.LEASE


class LeaseHeld(UserError):
    """Somebody else acts on the run now."""

    def __init__(self, where: str, lease: Lease, now: float) -> None:
        left_s = max(0.0, lease.expires_s - now)
        message = f"{where} is in use by {lease.holder()}"
        hint = f"stop it with `muster stop`, or wait: unless renewed, its lease ends in {left_s:.0f} s"
        if left_s > LEASE_S + WRONG_CLOCK_S:
            message += (
                f" until {_date(lease.expires_s)}, by a clock that is wrong: leases last {LEASE_S:.0f} s,"
                f" and here it is {_date(now)}"
            )
            hint = f"correct the clock, or {_away(where)}"
        super().__init__(message, hint=hint)
        self.lease = lease


class LeaseLost(UserError):
    """Another process took the lease over; this one must stop acting at once."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"another process took over {where}",
            hint="look at it with `muster status`; this process has stopped",
            exit_code=ExitCode.INFRASTRUCTURE,
        )


class LeaseGone(LeaseLost):
    """Nobody took it: somebody removed it."""

    def __init__(self, where: str, path: str, *, folder_too: bool) -> None:
        super().__init__(where)
        gone = f"the run directory {where}" if folder_too else f"{where}/{path}"
        self.message = f"{gone} is gone"
        self.hint = "it was removed or moved while the run went on; this process has stopped"


def this_process(what: str, *, owner_id: str | None = None) -> Owner:
    """The calling process as an owner.

    Args:
      what: what it does, for people.
      owner_id: who it acts for, when others did so before it and certainly run no more; new if not given.
    """
    return Owner(
        id=owner_id or secrets.token_hex(16),
        hostname=socket.gethostname(),
        process=_own_process(),
        what=what,
    )


def read(storage: Storage, path: str = RunPath.LEASE) -> Lease | None:
    """The lease as it is, free or not; None when the run never had one."""
    found = _read(storage, path)
    return found[0] if found else None


def is_held(lease: Lease | None, now: float) -> bool:
    """Whether somebody holds the lease at ``now`` (Unix time)."""
    if lease is None or lease.released or now > lease.expires_s + CLOCK_SKEW_S:
        return False
    return not _is_dead(lease.owner)


def acquire(storage: Storage, owner: Owner, now: float, path: str = RunPath.LEASE) -> Held:
    """Takes the lease.

    Args:
      storage: the run directory.
      owner: who wants it.
      now: Unix time.
      path: which of the run's leases.

    Raises:
      LeaseHeld: somebody else has it.
    """
    lease = Lease(owner=owner, acquired_s=now, expires_s=now + LEASE_S)
    found = _read(storage, path)
    if found and is_held(found[0], now) and found[0].owner.id != owner.id:
        raise LeaseHeld(storage.url, found[0], now)
    try:
        if found is None:
            version = storage.create(path, ledger.encode(lease))
        else:
            version = storage.replace(path, ledger.encode(lease), if_version=found[1])
    except (Exists, Conflict):
        winner = _read(storage, path)
        if winner is None:
            raise
        raise LeaseHeld(storage.url, winner[0], now) from None
    return Held(lease=lease, version=version, path=path)


def renew(storage: Storage, held: Held, now: float) -> Held:
    """Keeps the lease for another LEASE_S.

    Raises:
      LeaseLost: it was taken over; stop acting.
    """
    return _rewrite(storage, held, dataclasses.replace(held.lease, expires_s=now + LEASE_S))


def release(storage: Storage, held: Held) -> None:
    """Frees the lease; nothing happens when it was taken over already."""
    with contextlib.suppress(LeaseLost):
        _rewrite(storage, held, dataclasses.replace(held.lease, released=True))


def job_owner(uid: str) -> str:
    """Id under which the pods of a cluster's job hold the lease.

    Args:
      uid: of the job.
    """
    return f"jobset-{uid}"


def release_of(storage: Storage, owner_id: str) -> None:
    """Frees the lease of an owner that certainly runs no more; nothing happens when it is another's."""
    found = _read(storage, RunPath.LEASE)
    if found and found[0].owner.id == owner_id and not found[0].released:
        release(storage, Held(lease=found[0], version=found[1]))


def _rewrite(storage: Storage, held: Held, lease: Lease) -> Held:
    try:
        version = storage.replace(held.path, ledger.encode(lease), if_version=held.version)
    except (Conflict, NotFound):
        raise _lost(storage, held.path) from None
    return Held(lease=lease, version=version, path=held.path)


def _lost(storage: Storage, path: str) -> LeaseLost:
    """Why the lease is no longer what this process wrote."""
    with contextlib.suppress(StorageError):
        names = storage.children()
        if path not in names:
            return LeaseGone(storage.url, path, folder_too=RunPath.RECIPE not in names)
    return LeaseLost(storage.url)


def _away(where: str) -> str:
    return f"once you know that no launcher of this run is running, move {where}/{RunPath.LEASE} away"


def _date(time_s: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a year beyond 9999"


def _read(storage: Storage, path: str) -> tuple[Lease, Version] | None:
    try:
        data, version = storage.read_versioned(path)
    except NotFound:
        return None
    try:
        return ledger.decode(data, Lease, f"{storage.url}/{path}"), version
    except ledger.Damaged as error:
        # Nobody can tell whether somebody holds it, so nobody may act.
        error.hint = f"it is damaged or was not written by Muster; {_away(storage.url)}"
        raise


def _is_dead(owner: Owner) -> bool:
    """Whether the owner certainly runs no more; False whenever this machine cannot know."""
    machine = _own_process().machine
    if not machine or owner.process.machine != machine or owner.hostname != socket.gethostname():
        return False
    return not processes.is_running(owner.process)


def _own_process() -> ProcessId:
    found = processes.process_id(os.getpid())
    return found or ProcessId(pid=os.getpid(), started="")
