"""Reads the run directories of many runs in a handful of list calls, and only what has changed since.

    fleet = Fleet(root, None)          # or the names of some runs
    fleet.refresh(now)
    for facts in fleet.runs(): ...

Objects are told apart by the mark of their last write, so a pass over a thousand runs of which nothing is
new reads nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launcher import lease, ledger
from launcher.attempts import JOB
from launcher.ledger import AttemptEnd, AttemptStart, Heartbeat, HostRecord, StopRequest
from launcher.rundir import READERS, read_recipe
from launcher.storage_types import NotFound, Storage, StorageError, Unavailable
from launcher.supervise.observation import Observation
from launcher.supervise.place import Look
from launcher.supervise.records import Order, Provision
from recipes.contract import ExitCode, RunPath, attempt_path, heartbeat_path, host_name, is_run_name
from recipes.schema import Recipe

HEARTBEAT = heartbeat_path(host_name(0, 0))
PATTERNS = (
    "*.json",
    f"{RunPath.ATTEMPTS}/*/*.json",
    f"{RunPath.PROVISIONS}/*.json",
    HEARTBEAT,
)
"""Below a run directory: everything that a decision depends on."""
TOP: Mapping[str, type[Any]] = {
    RunPath.ORDER: Order,
    RunPath.STOP: StopRequest,
    RunPath.LEASE: lease.Lease,
    RunPath.SUPERVISOR: lease.Lease,
}
LIVE = (RunPath.LEASE, RunPath.SUPERVISOR, RunPath.STOP, HEARTBEAT)
"""Of no interest once the run is complete."""
NEEDED = (RunPath.ORDER, RunPath.LEASE, RunPath.SUPERVISOR)
"""With the provisions: what nothing can be decided without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run as its directory tells, at one moment."""

    name: str
    order: Order | None
    recipe: Recipe | None
    """As launched; None without an order, or when it cannot be read."""
    provisions: Sequence[Provision]
    """Oldest first."""
    ends: Sequence[AttemptEnd]
    """Of this order's attempts, oldest first."""
    attempt: AttemptStart | None
    """The newest of this order, while it has not ended."""
    failing_machines: Sequence[str]
    beat_s: float | None
    """As process 0 wrote it; once it was seen to change, when that was seen, by this machine's clock."""
    is_held: bool
    supervisor: lease.Lease | None
    """Held by somebody now."""
    stop: StopRequest | None
    problems: Sequence[str]
    """What could not be read."""
    unusable: StorageError | None = None
    """Why nothing may be decided: without what could not be read, machines might be got twice."""


class Fleet:
    """The run directories below one root."""

    def __init__(self, root: Storage, names: Sequence[str] | None) -> None:
        self._root, self._names = root, names
        self._marks: dict[str, dict[str, str]] = {}
        """By run: path within it -> mark."""
        self._records: dict[tuple[str, str], tuple[str, object]] = {}
        """By run and path: the mark that it had, and what was read: a record, or the error."""
        self._recipes: dict[tuple[str, str], Recipe | StorageError] = {}
        self._hosts: dict[tuple[str, int, str], str] = {}
        self._beats: dict[str, float] = {}
        self._now = 0.0

    def refresh(self, now: float) -> None:
        """Lists everything and reads what has changed.

        Raises:
          Unavailable: the store does not answer.
          StorageError: it refuses.
        """
        self._now = now
        self._marks = {}
        for pattern in self._patterns():
            for path, mark in self._root.marks(pattern).items():
                run, _, inside = path.partition("/")
                if self._names is not None or is_run_name(run):
                    self._marks.setdefault(run, {})[inside] = mark
        self._forget()
        listed = [run for run, marks in self._marks.items() if RunPath.ORDER in marks]
        self._read_new(listed, lambda path: path not in LIVE)
        # What a complete run's lease and heartbeat say no longer matters, nor does its recipe.
        live = [run for run in listed if self._names is not None or not self._is_done(run)]
        self._read_new(live, lambda path: path in LIVE)
        self._read_recipes(live)

    def runs(self) -> Sequence[RunFacts]:
        """Every run that has an order, by name; of all runs, only those that may need something."""
        names = [run for run, marks in sorted(self._marks.items()) if RunPath.ORDER in marks]
        if self._names is None:
            names = [run for run in names if not self._is_done(run)]
        return [self._facts(run) for run in names]

    def _patterns(self) -> Iterable[str]:
        for name in ("*",) if self._names is None else self._names:
            yield from (f"{name}/{pattern}" for pattern in PATTERNS)

    def _forget(self) -> None:
        """What is no longer there."""
        self._records = {
            key: found for key, found in self._records.items() if key[1] in self._marks.get(key[0], {})
        }
        self._beats = {run: beat_s for run, beat_s in self._beats.items() if run in self._marks}
        self._recipes = {key: found for key, found in self._recipes.items() if key[0] in self._marks}
        self._hosts = {key: found for key, found in self._hosts.items() if key[0] in self._marks}

    def _read_new(self, runs: Iterable[str], matters: Callable[[str], bool]) -> None:
        changed = [
            (run, path, mark)
            for run in runs
            for path, mark in self._marks[run].items()
            if matters(path) and _kind(path) is not None and self._mark_read(run, path) != mark
        ]
        wanted = [each for each in changed if not self._is_seen_beating(*each)]
        for (run, path, mark), record in zip(wanted, _side_by_side(self._read, wanted), strict=True):
            # What did not answer is asked for again.
            self._records[run, path] = ("" if isinstance(record, Unavailable) else mark, record)

    def _mark_read(self, run: str, path: str) -> str:
        return self._records.get((run, path), ("", None))[0]

    def _is_seen_beating(self, run: str, path: str, mark: str) -> bool:
        """A heartbeat is read once; that it has changed is a sign of life, whatever it says."""
        record = self._of(run, path, Heartbeat) if path == HEARTBEAT else None
        if record is None:
            return False
        self._beats[run] = self._now
        self._records[run, path] = (mark, record)
        return True

    def _read(self, wanted: tuple[str, str, str]) -> object:
        run, path, _ = wanted
        kind = _kind(path)
        assert kind is not None
        try:
            return ledger.read_record(self._root, f"{run}/{path}", kind)
        except NotFound:
            return None
        except StorageError as error:
            return error

    def _read_recipes(self, runs: Iterable[str]) -> None:
        """Once for each order; one that cannot be read is tried again, for somebody may mend it."""
        orders = ((run, self._of(run, RunPath.ORDER, Order)) for run in runs)
        keys = [(run, order.recipe) for run, order in orders if order is not None]
        wanted = [key for key in keys if not isinstance(self._recipes.get(key), Recipe)]
        self._recipes |= zip(wanted, _side_by_side(self._read_recipe, wanted), strict=True)

    def _read_recipe(self, key: tuple[str, str]) -> Recipe | StorageError:
        run, path = key
        try:
            return read_recipe(self._root.child(run), path)
        except StorageError as error:
            return error

    # One run

    def _of[T](self, run: str, path: str, cls: type[T]) -> T | None:
        found = self._records.get((run, path), ("", None))[1]
        return found if isinstance(found, cls) else None

    def _below[T](self, run: str, matches: Callable[[str], bool], cls: type[T]) -> Sequence[T]:
        paths = sorted(path for path in self._marks[run] if matches(path))
        found = (self._of(run, path, cls) for path in paths)
        return [record for record in found if record is not None]

    def _is_done(self, run: str) -> bool:
        """This order is complete, and nothing is left of any: it will never need anything."""
        order, provisions = self._of(run, RunPath.ORDER, Order), self._provisions(run)
        if order is None or any(each.ended_s is None for each in provisions) or self._missing(run):
            return False
        last = max((path for path in self._marks[run] if _is_end(path)), default="")
        start = self._of(run, last.replace("/end.", "/start."), AttemptStart)
        end = self._of(run, last, AttemptEnd)
        if start is None or end is None or end.exit_code != ExitCode.COMPLETE:
            return False
        return _is_of(start, order, is_cluster=not any(_is_zone(each.place) for each in provisions))

    def _provisions(self, run: str) -> Sequence[Provision]:
        found = self._below(run, _is_provision, Provision)
        return sorted(found, key=lambda each: each.number)

    def _facts(self, run: str) -> RunFacts:
        order = self._of(run, RunPath.ORDER, Order)
        found = self._recipes.get((run, order.recipe)) if order else None
        recipe = found if isinstance(found, Recipe) else None
        starts = self._below(run, _is_start, AttemptStart)
        is_cluster = recipe is not None and recipe.target.kind == "gke"
        own = [each for each in starts if order is not None and _is_of(each, order, is_cluster=is_cluster)]
        ends = {start.attempt: self._end(run, start.attempt) for start in own}
        last = own[-1] if own else None
        provisions = self._provisions(run)
        beat = self._of(run, HEARTBEAT, Heartbeat)
        held = self._of(run, RunPath.LEASE, lease.Lease)
        supervisor = self._of(run, RunPath.SUPERVISOR, lease.Lease)
        missing = [found] if isinstance(found, StorageError) else []
        return RunFacts(
            name=run,
            order=order,
            recipe=recipe,
            provisions=provisions,
            ends=[end for end in ends.values() if end is not None],
            attempt=last if last is not None and not self._has_end(run, last.attempt) else None,
            failing_machines=self._failing(run, ends, provisions),
            beat_s=self._beats.get(run, beat.progress.time_s) if beat else None,
            is_held=lease.is_held(held, self._now),
            supervisor=supervisor if lease.is_held(supervisor, self._now) else None,
            stop=self._stop(run),
            problems=[each.message for each in (*missing, *self._damaged(run))],
            unusable=next(iter((*missing, *self._missing(run))), None),
        )

    def _end(self, run: str, attempt: int) -> AttemptEnd | None:
        return self._of(run, _end_path(attempt), AttemptEnd)

    def _has_end(self, run: str, attempt: int) -> bool:
        """Also when it cannot be read."""
        return _end_path(attempt) in self._marks[run]

    def _stop(self, run: str) -> StopRequest | None:
        """A damaged one counts too, for somebody asked."""
        if RunPath.STOP not in self._marks[run]:
            return None
        found = self._of(run, RunPath.STOP, StopRequest)
        return found or StopRequest(requested_s=0.0, by="somebody")

    def _damaged(self, run: str) -> Sequence[StorageError]:
        found = (self._records.get((run, path), ("", None))[1] for path in self._marks[run])
        return [error for error in found if isinstance(error, StorageError)]

    def _missing(self, run: str) -> Sequence[StorageError]:
        """Errors of what nothing can be decided without; of the rest only while it does not answer."""
        found = ((path, self._records.get((run, path), ("", None))[1]) for path in self._marks[run])
        return [
            error
            for path, error in found
            if isinstance(error, StorageError)
            and (isinstance(error, Unavailable) or path in NEEDED or _is_provision(path))
        ]

    def _failing(
        self, run: str, ends: Mapping[int, AttemptEnd | None], provisions: Sequence[Provision]
    ) -> Sequence[str]:
        """Machines that failed first in the attempts on the machines that are there now."""
        current = [each for each in provisions if each.ended_s is None and not each.is_probe]
        since_s = max((each.requested_s for each in current), default=None)
        if since_s is None:
            return []
        failed = [
            (attempt, end.first_failing_host)
            for attempt, end in ends.items()
            if end and end.exit_code == ExitCode.INFRASTRUCTURE and end.end_s >= since_s
        ]
        return [self._machine(run, attempt, host) for attempt, host in failed if host is not None]

    def _machine(self, run: str, attempt: int, host: str) -> str:
        key = run, attempt, host
        if key not in self._hosts:
            path = f"{run}/{attempt_path(attempt)}/hosts/{host}.json"
            try:
                self._hosts[key] = ledger.read_record(self._root, path, HostRecord).hostname
            except Unavailable:
                return ""
            except StorageError:
                self._hosts[key] = ""
        return self._hosts[key]


def observation(facts: RunFacts, look: Look, words: Mapping[str, str] | None = None) -> Observation:
    """What is known of a run, from its directory and from its place.

    Args:
      facts: from the fleet.
      look: from the place.
      words: what hosts say of themselves, by the name of their machines.

    Raises:
      StorageError: something that decisions rest on could not be read.
    """
    if facts.unusable is not None:
        raise facts.unusable
    said = words or {}
    return Observation(
        machines=[
            dataclasses.replace(each, words=said[each.name]) if each.name in said else each
            for each in look.machines
        ],
        unseen=look.unseen,
        provisions=facts.provisions,
        ends=facts.ends,
        failing_machines=facts.failing_machines,
        attempt=facts.attempt,
        beat_s=facts.beat_s,
        is_held=facts.is_held,
        stop=facts.stop,
        room=look.room,
    )


def _side_by_side[A, B](act: Callable[[A], B], items: Sequence[A]) -> Sequence[B]:
    """In a bucket each takes some 50 ms."""
    if not items:
        return []
    with ThreadPoolExecutor(min(READERS, len(items))) as pool:
        return list(pool.map(act, items))


def _is_of(start: AttemptStart, order: Order, *, is_cluster: bool) -> bool:
    """Attempts on TPU VMs name the order; those of a JobSet, which a launch made, come after it."""
    return start.lock.get(JOB) == order.id or (is_cluster and start.started_s >= order.launched_s)


def _is_zone(place: str) -> bool:
    return place.startswith("projects/") and "/locations/" in place


def _end_path(attempt: int) -> str:
    return f"{attempt_path(attempt)}/end.json"


def _is_provision(path: str) -> bool:
    return path.startswith(f"{RunPath.PROVISIONS}/")


def _is_start(path: str) -> bool:
    return path.startswith(f"{RunPath.ATTEMPTS}/") and path.endswith("/start.json")


def _is_end(path: str) -> bool:
    return path.startswith(f"{RunPath.ATTEMPTS}/") and path.endswith("/end.json")


def _kind(path: str) -> type[Any] | None:
    """The record that is at a path of a run, if it matters here."""
    if path in TOP:
        return TOP[path]
    if _is_start(path):
        return AttemptStart
    if _is_end(path):
        return AttemptEnd
    if _is_provision(path):
        return Provision
    return Heartbeat if path == HEARTBEAT else None
