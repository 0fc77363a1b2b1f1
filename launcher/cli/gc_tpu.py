"""``muster gc --project P``: TPU VMs that are provably ours and of no use; removed once confirmed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.cli import output, runs
from launcher.rundir import RunDir
from launcher.standing import short_place
from launcher.storage import Storage, StorageError, Unavailable
from launcher.supervise.wanted import zone_place
from launcher.tpu.gc import Leftover, Owner, leftovers, owner_of, remove
from launcher.tpu.listing import Listings
from recipes.contract import ExitCode, is_run_name
from recipes.errors import UserError

HEADER = ("RUN", "ZONE", "NAME", "STATE", "SLICES", "AGE", "USD/H", "WHY")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the command line asks for."""

    root: Storage
    project: str
    zones: Sequence[str]
    """Empty: those that the runs below the root have had machines in."""
    older_than_s: float
    dry_run: bool
    as_json: bool


def clear(asked: Asked, confirm: Callable[[int], None]) -> int:
    """Lists, asks, removes; gives the exit code."""
    listings, parents = Listings(), _parents(asked)
    found = [each for parent in parents for each in _find(asked, listings, parent)]
    if not asked.as_json:
        _show(found, parents)
    gone: set[str] = set()
    exit_code: int = ExitCode.COMPLETE
    if found and not asked.dry_run:
        confirm(len(found))
        gone, exit_code = _remove(asked, listings, found)
    if asked.as_json:
        output.data_json(
            {
                "project": asked.project,
                "zones": [short_place(parent) for parent in parents],
                "machines": [_plain(each, deleted=each.name in gone) for each in found],
            }
        )
    return exit_code


def _parents(asked: Asked) -> Sequence[str]:
    if asked.zones:
        return [zone_place(asked.project, zone) for zone in dict.fromkeys(asked.zones)]
    start = zone_place(asked.project, "")
    places: dict[str, None] = {}
    for name in asked.root.children():
        if is_run_name(name):
            for each in RunDir(asked.root.child(name)).provisions([]):
                places |= {each.place: None} if each.place.startswith(start) else {}
    if not places:
        raise UserError(
            f"no run in {asked.root.url} has had machines in project {asked.project}",
            hint="give the zones to look at: --zone ZONE, as often as needed",
        )
    return sorted(places)


def _find(asked: Asked, listings: Listings, parent: str, own_id: str = "") -> Sequence[Leftover]:
    now = time.time()

    def owner(run: str, home: str) -> Owner | None:
        try:
            return owner_of(asked.root, run, home, now, own_id)
        except Unavailable:
            raise
        except StorageError as error:
            output.note(f"{run} stays: {error.message}")
            return None

    return leftovers(listings.zone(parent), owner, now=now, older_than_s=asked.older_than_s)


def _show(found: Sequence[Leftover], parents: Sequence[str]) -> None:
    if not found:
        output.say(f"nothing to clear away in {', '.join(short_place(parent) for parent in parents)}")
        return
    rows = [
        (
            each.run,
            short_place(each.place),
            each.name.rpartition("/")[2],
            each.state,
            str(each.num_slices),
            runs.duration(time.time() - each.created_s),
            runs.dollars(each.usd_per_hour),
            each.why,
        )
        for each in found
    ]
    output.data(output.table(rows, header=HEADER))


def _remove(asked: Asked, listings: Listings, found: Sequence[Leftover]) -> tuple[set[str], int]:
    """What is gone, and the exit code; one that stays does not keep the others."""
    gone, exit_code = set[str](), int(ExitCode.COMPLETE)

    def is_still(leftover: Leftover, own_id: str) -> bool:
        return any(each.name == leftover.name for each in _find(asked, listings, leftover.place, own_id))

    for each in found:
        try:
            is_gone = remove(each, listings, asked.root, is_still=is_still, now=time.time, sleep=time.sleep)
        except UserError as error:
            output.user_error(error)
            exit_code = error.exit_code
            continue
        if is_gone:
            gone.add(each.name)
            output.say(f"{each.name}: gone")
        else:
            output.say(f"{each.name}: still there, in use again or being removed")
            exit_code = ExitCode.INFRASTRUCTURE
    return gone, exit_code


def _plain(each: Leftover, *, deleted: bool) -> dict[str, object]:
    return {
        "run": each.run,
        "name": each.name,
        "state": each.state,
        "num_slices": each.num_slices,
        "provision": each.provision,
        "age_s": time.time() - each.created_s,
        "usd_per_hour": each.usd_per_hour,
        "why": each.why,
        "deleted": deleted,
    }
