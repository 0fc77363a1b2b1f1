"""Which machines to ask for next, and when: pure, from the ledger alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from launcher.supervise.actions import Wait
from launcher.supervise.observation import MEANING, Option, Wanted
from launcher.supervise.records import Provision, Trouble

SCARCE = (Trouble.NO_CAPACITY, Trouble.QUOTA, Trouble.RESERVATION)
"""An option that ended so is passed over for ``grow_after_s`` while there is another."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 15.0, 600.0

type Key = tuple[str, str, int]


def key(what: Option | Provision) -> Key:
    """What makes two options the same."""
    return what.place, what.capacity, what.num_slices


def choose(wanted: Wanted, provisions: Sequence[Provision], room: int | None, now: float) -> Option | Wait:
    """The best option that may be asked for now, or until when to wait.

    Args:
      wanted: the run.
      provisions: of this order, oldest first, all ended.
      room: slices that would find chips now; None when only asking tells.
      now: Unix time.
    """
    past = [each for each in provisions if not each.is_probe]
    options = _that_fit(wanted, room)
    goal = grown_to(provisions)
    if goal is not None:
        options = [option for option in options if key(option) == goal] or options
    fresh = [option for option in options if not _is_scarce(option, past, wanted.grow_after_s, now)]
    option = (fresh or sorted(options, key=lambda each: _last_failure_s(each, past)))[0]
    until_s = _not_before_s(wanted.run, option, past)
    if now < until_s:
        last = past[-1]
        meaning = MEANING[last.trouble] if last.trouble else "the last try failed"
        return Wait(why=f"{meaning}{f' ({last.code})' if last.code else ''}; trying again", until_s=until_s)
    return option


def has_alternative(
    wanted: Wanted, current: Provision, provisions: Sequence[Provision], room: int | None, now: float
) -> bool:
    """Whether another option than the current one would be tried if that were given up now."""
    given_up = [
        *(each for each in provisions if each.ended_s is not None),
        _given_up(current, now),
    ]
    found = choose(wanted, given_up, room, now)
    return isinstance(found, Option) and key(found) != key(current)


def grown_to(provisions: Sequence[Provision]) -> Key | None:
    """What a probe has shown to be possible: machines given back for it are replaced by these."""
    past = [each for each in provisions if not each.is_probe]
    if not past or past[-1].trouble is not Trouble.REPLACED:
        return None
    last = past[-1]
    shown = [
        probe
        for probe in provisions
        if probe.is_probe
        and probe.ready_s is not None
        and probe.number > last.number
        and (probe.place, probe.capacity) == (last.place, last.capacity)
    ]
    return (last.place, last.capacity, last.num_slices + shown[-1].num_slices) if shown else None


def jitter(run: str, number: int) -> float:
    """Between 0.5 and 1, the same each time: so that many runs do not come back at once."""
    digest = hashlib.sha256(f"{run}/{number}".encode()).digest()
    return 0.5 + int.from_bytes(digest[:4]) / 2**33


def _that_fit(wanted: Wanted, room: int | None) -> Sequence[Option]:
    if room is None or not wanted.is_elastic:
        return wanted.options
    return [each for each in wanted.options if each.num_slices <= room] or wanted.options[:1]


def _is_scarce(option: Option, past: Sequence[Provision], memory_s: float, now: float) -> bool:
    return any(
        key(each) == key(option) and each.trouble in SCARCE and now - (each.ended_s or now) < memory_s
        for each in past
    )


def _last_failure_s(option: Option, past: Sequence[Provision]) -> float:
    ended = [each.ended_s for each in past if key(each) == key(option) and each.ended_s is not None]
    return max(ended, default=0.0)


def _not_before_s(run: str, option: Option, past: Sequence[Provision]) -> float:
    """After failures in a row of this option: doubling, with jitter."""
    same = [each for each in past if key(each) == key(option)]
    in_a_row = 0
    for each in reversed(same):
        if each.trouble in (Trouble.PREEMPTED, Trouble.REPLACED):
            break
        in_a_row += 1
    if not in_a_row:
        return 0.0
    delay_s = min(FIRST_BACKOFF_S * 2.0 ** (in_a_row - 1), MAX_BACKOFF_S)
    return (same[-1].ended_s or 0.0) + delay_s * jitter(run, same[-1].number)


def _given_up(current: Provision, now: float) -> Provision:
    return dataclasses.replace(current, ended_s=now, trouble=Trouble.NO_CAPACITY)
