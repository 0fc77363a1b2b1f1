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
from launcher.ledger import AttemptEnd, AttemptStart, Heartbeat, HostRecord, StopRequest
from launcher.rundir import read_recipe
from launcher.storage_types import NotFound, Storage, StorageError, Unavailable
from launcher.supervise.observation import Observation
from launcher.supervise.place import Look
from launcher.supervise.records import Order, Provision
from recipes.contract import ExitCode, RunPath, heartbeat_path, host_name, is_run_name
from recipes.schema import Recipe

READERS = 32
JOB = "job"
"""In an attempt's lock: which launch it belongs to."""
PATTERNS = (
    "*.json",
    f"{RunPath.ATTEMPTS}/*/*.json",
    f"{RunPath.PROVISIONS}/*.json",
    heartbeat_path(host_name(0, 0)),
)
"""Below a run directory: everything that a decision depends on."""
TOP: Mapping[str, type[Any]] = {
    RunPath.ORDER: Order,
    RunPath.STOP: StopRequest,
    RunPath.LEASE: lease.Lease,
    RunPath.SUPERVISOR: lease.Lease,
}


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
    is_held: bool
    supervisor: lease.Lease | None
    """Held by somebody now."""
    stop: StopRequest | None
    problems: Sequence[str]
    """What could not be read."""


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
                if is_run_name(run):
                    self._marks.setdefault(run, {})[inside] = mark
        wanted = [
            (run, path, mark)
            for run, marks in self._marks.items()
            if RunPath.ORDER in marks
            for path, mark in marks.items()
            if _kind(path) is not None and self._records.get((run, path), ("", None))[0] != mark
        ]
        for (run, path, mark), record in zip(wanted, self._read_all(wanted), strict=True):
            self._records[run, path] = (mark, record)
        self._forget()

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

    def _read_all(self, wanted: Sequence[tuple[str, str, str]]) -> Sequence[object]:
        if not wanted:
            return []
        with ThreadPoolExecutor(min(READERS, len(wanted))) as pool:
            return list(pool.map(lambda each: self._read(each[0], each[1]), wanted))

    def _read(self, run: str, path: str) -> object:
        kind = _kind(path)
        assert kind is not None
        try:
            return ledger.read_record(self._root, f"{run}/{path}", kind)
        except NotFound:
            return None
        except Unavailable:
            raise
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
        """Complete, and nothing of it is left: it will never need anything."""
        if any(each.ended_s is None for each in self._provisions(run)):
            return False
        ends = self._below(run, _is_end, AttemptEnd)
        return bool(ends) and ends[-1].exit_code == ExitCode.COMPLETE

    def _provisions(self, run: str) -> Sequence[Provision]:
        found = self._below(run, lambda path: path.startswith(f"{RunPath.PROVISIONS}/"), Provision)
        return sorted(found, key=lambda each: each.number)

    def _facts(self, run: str) -> RunFacts:
        order = self._of(run, RunPath.ORDER, Order)
        recipe, problems = self._recipe(run, order) if order else (None, [])
        starts = self._below(run, _is_start, AttemptStart)
        own = [start for start in starts if order is not None and _is_of(start, order, recipe)]
        ends = {start.attempt: self._end(run, start.attempt) for start in own}
        last = own[-1] if own else None
        provisions = self._provisions(run)
        beat = self._of(run, heartbeat_path(host_name(0, 0)), Heartbeat)
        held = self._of(run, RunPath.LEASE, lease.Lease)
        supervisor = self._of(run, RunPath.SUPERVISOR, lease.Lease)
        return RunFacts(
            name=run,
            order=order,
            recipe=recipe,
            provisions=provisions,
            ends=[end for end in ends.values() if end is not None],
            attempt=last if last is not None and ends[last.attempt] is None else None,
            failing_machines=self._failing(run, ends, provisions),
            beat_s=beat.progress.time_s if beat else None,
            is_held=lease.is_held(held, self._now),
            supervisor=supervisor if lease.is_held(supervisor, self._now) else None,
            stop=self._stop(run),
            problems=[*problems, *self._damaged(run)],
        )

    def _end(self, run: str, attempt: int) -> AttemptEnd | None:
        return self._of(run, f"{RunPath.ATTEMPTS}/{attempt:04d}/end.json", AttemptEnd)

    def _stop(self, run: str) -> StopRequest | None:
        """A damaged one counts too, for somebody asked."""
        if RunPath.STOP not in self._marks[run]:
            return None
        found = self._of(run, RunPath.STOP, StopRequest)
        return found or StopRequest(requested_s=0.0, by="somebody")

    def _damaged(self, run: str) -> Sequence[str]:
        found = (self._records.get((run, path), ("", None))[1] for path in self._marks[run])
        return [error.message for error in found if isinstance(error, StorageError)]

    def _recipe(self, run: str, order: Order) -> tuple[Recipe | None, Sequence[str]]:
        key = run, order.recipe
        if key not in self._recipes:
            try:
                self._recipes[key] = read_recipe(self._root, f"{run}/{order.recipe}")
            except Unavailable:
                raise
            except StorageError as error:
                self._recipes[key] = error
        found = self._recipes[key]
        return (None, [found.message]) if isinstance(found, StorageError) else (found, [])

    def _failing(
        self, run: str, ends: Mapping[int, AttemptEnd | None], provisions: Sequence[Provision]
    ) -> Sequence[str]:
        """Machines that failed first in the attempts on the machines that are there now."""
        since_s = max((each.requested_s for each in provisions if each.ended_s is None), default=None)
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
            path = f"{run}/{RunPath.ATTEMPTS}/{attempt:04d}/hosts/{host}.json"
            try:
                self._hosts[key] = ledger.read_record(self._root, path, HostRecord).hostname
            except StorageError:
                return ""
        return self._hosts[key]


def observation(facts: RunFacts, look: Look, words: Mapping[str, str] | None = None) -> Observation:
    """What is known of a run, from its directory and from its place.

    Args:
      facts: from the fleet.
      look: from the place.
      words: what hosts say of themselves, by the name of their machines.
    """
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


def _is_of(start: AttemptStart, order: Order, recipe: Recipe | None) -> bool:
    """Attempts on TPU VMs name the order; those of a JobSet, which a launch made, come after it."""
    if recipe is not None and recipe.target.kind == "gke":
        return start.started_s >= order.launched_s
    return start.lock.get(JOB) == order.id


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
    if path.startswith(f"{RunPath.PROVISIONS}/"):
        return Provision
    return Heartbeat if path == heartbeat_path(host_name(0, 0)) else None
