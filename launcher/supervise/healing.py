"""When machines are of no use any more, and how long to be patient: parts of ``decide``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from launcher.ledger import AttemptEnd
from launcher.supervise.actions import Action, Delete, Wait
from launcher.supervise.choose import has_alternative
from launcher.supervise.observation import GAVE_UP, Machines, Observation, Phase, Wanted
from launcher.supervise.records import Provision, Trouble

STARTING_S = 1800.0
"""How long machines may take from the first of them to all of them."""
DEGRADED_S = 900.0
"""How long some may be restarting, or being repaired."""
SILENT_S = 1800.0
"""How long machines that are up may show no sign of the run: longer than any installation."""
BAD_HOST_ATTEMPTS = 2


def loss(
    wanted: Wanted, seen: Observation, provision: Provision, there: Machines, now: float
) -> Action | None:
    """What to do about machines that are of no use any more; None while they are, or may come to be."""
    match there.phase:
        case Phase.LOST:
            return _lost(provision, there)
        case Phase.WAITING | Phase.STARTING if provision.ready_s is None:
            return _not_coming(wanted, seen, provision, there, now)
        case Phase.WAITING | Phase.STARTING | Phase.DEGRADED if wanted.restarts_itself:
            return _not_coming_back(wanted, seen, provision, there, now)
        case Phase.STARTING | Phase.DEGRADED if not wanted.restarts_itself:
            since_s = _last_sign_s(seen, provision)
            if now - since_s <= DEGRADED_S:
                return None
            return _failed(there, f"{there.state} for {(now - since_s) / 60:.0f} minutes")
        case Phase.UP if not wanted.restarts_itself:
            return _useless(seen, provision, there, now)
    return None


def warnings(wanted: Wanted, seen: Observation) -> Sequence[str]:
    """What people should know where the place itself restarts attempts."""
    if not wanted.restarts_itself:
        return []
    return [
        f"{host} failed first in {BAD_HOST_ATTEMPTS} attempts or more: `kubectl cordon {host}` keeps it out"
        for host in bad_hosts(seen)
    ]


def bad_hosts(seen: Observation) -> Sequence[str]:
    """Machines that failed first in two attempts of these machines."""
    counted = Counter(seen.failing_machines)
    return sorted(host for host, times in counted.items() if host and times >= BAD_HOST_ATTEMPTS)


def failed_in_a_row(past: Sequence[Provision], ends: Sequence[AttemptEnd]) -> int:
    """Sets of machines in a row on which the run did not get going, since it last got on."""
    got_on_s = max((end.end_s for end in ends if end.to_step > end.from_step), default=0.0)
    number = 0
    for provision in reversed(past):
        if provision.trouble is not Trouble.FAILED or provision.requested_s < got_on_s:
            break
        number += 1
    return number


def patience(wanted: Wanted, seen: Observation, provision: Provision, there: Machines) -> Wait:
    """Why nothing is done about machines that are there."""
    where = f"{there.name} in {there.place.rpartition('/')[2]}"
    match there.phase:
        case Phase.UP if seen.attempt is not None:
            until_s = wanted.deadline_s
            return Wait(why=f"attempt {seen.attempt.attempt} is under way", until_s=until_s)
        case Phase.UP:
            return Wait(why=there.words or "the hosts are starting")
        case Phase.WAITING:
            return Wait(
                why=f"{where} waits for {there.capacity} chips ({there.state})",
                until_s=provision.requested_s + wanted.fallback_after_s,
            )
        case Phase.LEAVING:
            return Wait(why=f"{where} is being taken away ({there.state})")
        case Phase.UNKNOWN:
            return Wait(why=f"{where} is in a state that this Muster does not know ({there.state})")
    return Wait(why=f"{where}: {there.state}")


def _lost(provision: Provision, there: Machines) -> Delete:
    fault = there.fault
    if fault is not None:
        return Delete(machines=there, trouble=fault.trouble, why=fault.sentence, code=fault.code)
    if provision.ready_s is None:
        return Delete(machines=there, trouble=Trouble.NO_CAPACITY, why=f"never came up: {there.state}")
    return Delete(machines=there, trouble=Trouble.PREEMPTED, why=f"taken away: {there.state}")


def _not_coming(
    wanted: Wanted, seen: Observation, provision: Provision, there: Machines, now: float
) -> Action | None:
    waited_s = now - provision.requested_s
    limit_s = wanted.fallback_after_s + (STARTING_S if there.phase is Phase.STARTING else 0.0)
    if waited_s <= limit_s or not has_alternative(wanted, provision, seen.provisions, seen.room, now):
        return None
    where = there.place.rpartition("/")[2]
    why = (
        f"no {there.capacity} chips for {there.num_slices} slices in {where} for {waited_s / 60:.0f} minutes"
    )
    return Delete(machines=there, trouble=Trouble.NO_CAPACITY, why=f"{why} ({there.state})")


def _not_coming_back(
    wanted: Wanted, seen: Observation, provision: Provision, there: Machines, now: float
) -> Action | None:
    """What the place restarts by itself, as long as there are nodes for all of it."""
    waited_s = now - _last_sign_s(seen, provision)
    if waited_s <= wanted.fallback_after_s or seen.room is None or seen.room >= there.num_slices:
        return None
    if not has_alternative(wanted, provision, seen.provisions, seen.room, now):
        return None
    why = f"no nodes for {there.num_slices} slices for {waited_s / 60:.0f} minutes ({there.state})"
    return Delete(machines=there, trouble=Trouble.NO_CAPACITY, why=why)


def _useless(seen: Observation, provision: Provision, there: Machines, now: float) -> Action | None:
    """Machines that are up: hosts that gave up, that keep failing, or that say nothing."""
    if seen.attempt is None and there.words.startswith(GAVE_UP):
        return _failed(there, there.words.removeprefix(GAVE_UP).strip())
    if bad := bad_hosts(seen):
        return _failed(there, f"{bad[0]} failed first in {BAD_HOST_ATTEMPTS} attempts: its slice is replaced")
    silent_s = now - _last_sign_s(seen, provision)
    if not seen.is_held and silent_s > SILENT_S:
        return _failed(there, f"no sign of the run for {silent_s / 60:.0f} minutes")
    return None


def _failed(there: Machines, why: str) -> Delete:
    return Delete(machines=there, trouble=Trouble.FAILED, why=why)


def _last_sign_s(seen: Observation, provision: Provision) -> float:
    ended_s = max((end.end_s for end in seen.ends), default=0.0)
    return max(seen.beat_s or 0.0, provision.ready_s or provision.requested_s, ended_s)
