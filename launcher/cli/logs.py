"""``muster logs RUN``: what the hosts of one attempt wrote, merged by time, live if asked.

Everything is read from the run directory, whatever back end runs the trainer and whether its machines are
still there; ``extra`` is for hosts whose first lines have not been shipped yet.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

from launcher import lease
from launcher.cli import output, runs
from launcher.gke.pod_logs import PodLogs
from launcher.log_lines import HostLog, LineCutter, LogLine, last, merged
from launcher.rundir import RunDir, host_order
from launcher.standing import is_on_vms
from launcher.storage_types import StorageError
from recipes.contract import attempt_path, host_name
from recipes.errors import UserError
from recipes.load import nearest

POLL_S = 1.0
SHOWN_HOSTS = 8
_HOST = re.compile(r"s([0-9]+)-h([0-9]+)")

type Extra = Callable[[Callable[[str], bool]], Mapping[str, Iterable[bytes]]]
"""Output so far of hosts that run now, by name: chunks of a log with times, from its beginning.

Asked with which hosts are wanted.
"""


def _nothing(_: Callable[[str], bool]) -> Mapping[str, Iterable[bytes]]:
    return {}


@click.command()
@runs.run_argument
@runs.root_option
@click.option(
    "--attempt", type=click.IntRange(min=1), help="Which attempt; the newest with logs if not given."
)
@click.option("--previous", is_flag=True, help="The attempt before the newest.")
@click.option("--slice", "slice_id", type=click.IntRange(min=0), help="Only hosts of this slice.")
@click.option("--host", help="Only this host, for example s0-h1; or a number: that host of every slice.")
@click.option("--follow", is_flag=True, help="Go on as logs grow, until the run is no longer running.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last TAIL lines of each host.")
@click.option("--timestamps", is_flag=True, help="Begin each line with its time, in UTC.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line.")
def command(
    run: str,
    root: str,
    attempt: int | None,
    previous: bool,
    slice_id: int | None,
    host: str | None,
    follow: bool,
    tail: int | None,
    timestamps: bool,
    as_json: bool,
) -> None:
    """Print the logs of RUN (a name, a path or a gs:// address), the lines of all hosts by time.

    With several hosts each line says whose it is.
    """
    wanted = Wanted(attempt=attempt, previous=previous, slice_id=slice_id, host=host, tail=tail)
    found = runs.find_run(run, root)
    pods = PodLogs(
        found,
        _quiet if is_on_vms(found) else output.note,
        slice_id=wanted.index_of_slice,
        host_id=wanted.index_of_host,
    )
    reader = LogReader(found, wanted, extra=pods)
    # A file gets what the host wrote, a terminal does not.
    show = output.data if sys.stdout.isatty() else output.data_as_it_is
    with contextlib.closing(reader.follow(time.sleep, time.time) if follow else reader.lines()) as lines:
        for line in lines:
            if as_json:
                output.data_json(_document(line), indent=None)
            else:
                show(_text(line, timestamps=timestamps, hosts=reader.num_hosts > 1))
            if follow:
                sys.stdout.flush()


def _document(line: LogLine) -> Mapping[str, object]:
    return {"attempt": line.attempt, "host": line.host, "time": line.time or None, "text": line.text}


def _text(line: LogLine, *, timestamps: bool, hosts: bool) -> str:
    text = f"{line.host}: {line.text}" if hosts else line.text
    return f"{line.time or '-'} {text}" if timestamps else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which part of a run's logs is wanted."""

    attempt: int | None = None
    previous: bool = False
    """The one before the newest."""
    slice_id: int | None = None
    host: str | None = None
    """A name, or a number within the slice."""
    tail: int | None = None
    """Lines of each host."""

    def __post_init__(self) -> None:
        if self.previous and self.attempt is not None:
            raise UserError("--previous and --attempt exclude each other", hint="leave one of them out")

    @property
    def host_id(self) -> int | None:
        return int(self.host) if self.host and self.host.isascii() and self.host.isdigit() else None

    @property
    def index_of_slice(self) -> int | None:
        """The one slice that is wanted, if it is one."""
        named = _HOST.fullmatch(self.host or "")
        return int(named[1]) if named else self.slice_id

    @property
    def index_of_host(self) -> int | None:
        """The one number of hosts within slices that is wanted, if it is one."""
        named = _HOST.fullmatch(self.host or "")
        return int(named[2]) if named else self.host_id

    def takes(self, host: str) -> bool:
        """Whether it includes the host of this name."""
        found = _HOST.fullmatch(host)
        slice_id, host_id = (int(found[1]), int(found[2])) if found else (-1, -1)
        if self.slice_id is not None and slice_id != self.slice_id:
            return False
        return self.host is None or host == self.host or host_id == self.host_id

    def describe(self) -> str:
        """The hosts it includes, in words."""
        if self.host_id is not None:
            return f"host {self._guess()}" if self.slice_id is not None else f"a host {self.host_id}"
        if self.host is not None:
            return f"host {self.host}" + (f" in slice {self.slice_id}" if self.slice_id is not None else "")
        return f"slice {self.slice_id}"

    def hint(self, hosts: Sequence[str]) -> str:
        """What may have been meant instead."""
        slices = [int(found[1]) for host in hosts if (found := _HOST.fullmatch(host))]
        if self.host is None and slices:
            return f"it has slices 0 to {max(slices)}"
        guess = nearest(self._guess(), hosts)
        if guess:
            return f"did you mean {guess}?"
        more = f" and {len(hosts) - SHOWN_HOSTS} more" if len(hosts) > SHOWN_HOSTS else ""
        return f"hosts: {', '.join(hosts[:SHOWN_HOSTS])}{more}"

    def _guess(self) -> str:
        """The nearest to a full name of a host."""
        return self.host or "" if self.host_id is None else host_name(self.slice_id or 0, self.host_id)


class LogReader:
    """Reads the logs of one run in lines, remembering how far it has come in each."""

    def __init__(self, run: RunDir, wanted: Wanted, *, extra: Extra = _nothing) -> None:
        self._run, self._wanted, self._extra = run, wanted, extra
        self.num_hosts = 0
        self._fixed = wanted.previous or wanted.attempt is not None
        self._attempt = 0
        self._logs: dict[str, HostLog] = {}
        self._cutters: dict[str, LineCutter] = {}
        self._listed: dict[int, Sequence[str]] = {}
        """Hosts with logs by attempt, as far as listed and not used yet."""
        self._started: dict[int, Sequence[str]] = {}
        """Hosts that attempts were started with."""
        self._tail = wanted.tail
        self._attempt = self._choose()
        self._check()

    def lines(self, *, growing: bool = False) -> Generator[LogLine, None, None]:
        """Everything there is now and was not given yet, by time.

        Args:
          growing: leave a last line that has no end yet for the next call.
        """
        stored = [host for host in self._hosts(self._attempt) if self._wanted.takes(host)]
        self._listed.clear()
        others = self._others(stored)
        self.num_hosts = len(stored) + len(others)
        tail, self._tail = self._tail, None
        self._run.storage.prepare_logs([self._run.log_path(self._attempt, host) for host in stored])
        logs = [self._log(host, tail) for host in stored]
        borrowed = [last(self._borrowed(host, chunks, growing), tail) for host, chunks in others.items()]
        yield from merged(logs, borrowed, growing=growing)

    def follow(
        self, sleep: Callable[[float], None], now: Callable[[], float]
    ) -> Generator[LogLine, None, None]:
        """Everything there is and will be, until nobody acts on the run; goes on to later attempts."""
        while True:
            # Asked before reading, so that what was written last is still read.
            newest = self._newest(self._run.attempts())
            running = self._running(now(), newest)
            yield from self.lines(growing=running and (self._fixed or newest == self._attempt))
            if newest != self._attempt and not self._fixed:
                if self._attempt:
                    self._cutters.clear()
                self._logs.clear()
                self._attempt = newest
            elif not running:
                return
            else:
                sleep(POLL_S)

    def _running(self, now: float, newest: int) -> bool:
        if self._fixed and (newest > self._attempt or self._run.attempt_end(self._attempt) is not None):
            return False
        return lease.is_held(lease.read(self._run.storage), now)

    def _choose(self) -> int:
        """The attempt that is wanted.

        Raises:
          UserError: there is none.
        """
        attempts = self._run.attempts()
        number = self._wanted.attempt
        if number is not None:
            if number not in attempts:
                have = f"it has attempts 1 to {attempts[-1]}" if attempts else "it has not started yet"
                raise UserError(f"{self._run.url} has no attempt {number}", hint=have)
            return number
        newest = self._newest(attempts)
        if not self._wanted.previous:
            return newest
        earlier = [number for number in attempts if number < newest]
        if not earlier:
            raise UserError(
                f"{self._run.url} has no attempt before attempt {newest}"
                if newest
                else f"{self._run.url} has not started yet",
                hint="leave out --previous",
            )
        return next((number for number in reversed(earlier) if self._hosts(number)), earlier[-1])

    def _newest(self, attempts: Sequence[int]) -> int:
        """The newest attempt of which there is anything; else the one that is read, else the newest."""
        for number in reversed(attempts):
            if number == self._attempt:
                break
            if self._hosts(number) or (number == attempts[-1] and self._extra(self._wanted.takes)):
                return number
        return self._attempt or (attempts[-1] if attempts else 0)

    def _hosts(self, attempt: int) -> Sequence[str]:
        """Hosts that have a log in one attempt."""
        if attempt not in self._listed:
            names = self._run.storage.stems(f"{attempt_path(attempt)}/logs") if attempt else []
            self._listed[attempt] = sorted(names, key=host_order)
        return self._listed[attempt]

    def _others(self, stored: Collection[str]) -> Mapping[str, Iterable[bytes]]:
        """What ``extra`` has of the attempt, of hosts that are wanted and not ``stored``."""
        known = frozenset(stored)
        started = [host for host in self._hosts_at_start() if self._wanted.takes(host)]
        if started and known.issuperset(started):
            return {}
        attempts = self._run.attempts()
        if attempts and self._attempt != attempts[-1]:
            return {}
        return self._extra(lambda host: self._wanted.takes(host) and host not in known)

    def _hosts_at_start(self) -> Sequence[str]:
        """Hosts that the attempt was started with; empty when nobody can tell yet."""
        if self._attempt not in self._started:
            start = None
            with contextlib.suppress(StorageError):
                start = self._run.attempt_start(self._attempt) if self._attempt else None
            if start is None:
                return ()
            self._started[self._attempt] = start.hosts
        return self._started[self._attempt]

    def _check(self) -> None:
        """Refuses hosts that are not of the attempt."""
        hosts = self._hosts(self._attempt)
        if not hosts or any(map(self._wanted.takes, hosts)):
            return
        known = {*hosts, *self._hosts_at_start(), *self._others(hosts)}
        if not any(map(self._wanted.takes, known)):
            raise UserError(
                f"attempt {self._attempt} has no log of {self._wanted.describe()}",
                hint=self._wanted.hint(sorted(known, key=host_order)),
            )

    def _log(self, host: str, tail: int | None) -> HostLog:
        if host not in self._logs:
            path = self._run.log_path(self._attempt, host)
            cutter = self._new_cutter(host)
            self._logs[host] = HostLog(self._run.storage, path, cutter, tail=tail)
        return self._logs[host]

    def _borrowed(self, host: str, chunks: Iterable[bytes], growing: bool) -> Iterator[LogLine]:
        cutter = self._new_cutter(host)
        for chunk in chunks:
            yield from cutter.feed(chunk)
        if not growing:
            yield from cutter.flush()

    def _new_cutter(self, host: str) -> LineCutter:
        """For a log that is read from its beginning, of which lines may have been borrowed already."""
        known = self._cutters.get(host)
        self._cutters[host] = LineCutter(self._attempt, host, after=known.time if known else "")
        return self._cutters[host]


def _quiet(_text: str) -> None:
    """Of clusters, where the run is on TPU VMs."""
