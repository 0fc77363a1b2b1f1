"""``muster logs RUN``: what the hosts of one attempt wrote, live if asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import click

from launcher import lease
from launcher.cli import output, runs
from launcher.rundir import RunDir
from recipes.errors import UserError
from recipes.load import nearest

CHUNK_BYTES = 8 * 2**20
TAIL_BYTES_PER_LINE = 200
"""First guess; a tail reads more when its lines turn out longer."""

POLL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of one host's log, without its end."""

    attempt: int
    host: str
    text: str


@click.command()
@runs.run_argument
@runs.root_option
@click.option(
    "--attempt", type=click.IntRange(min=1), help="Which attempt; the newest with logs if not given."
)
@click.option("--host", help="Only this host, for example s0-h1; all hosts if not given.")
@click.option("--follow", is_flag=True, help="Go on as logs grow, until the run is no longer running.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last TAIL lines of each host.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line.")
def command(
    run: str, root: str, attempt: int | None, host: str | None, follow: bool, tail: int | None, as_json: bool
) -> None:
    """Print the logs of RUN (a name, a path or a gs:// address), host after host.

    With several hosts each line says whose it is.
    """
    reader = LogReader(runs.find_run(run, root), attempt=attempt, host=host, tail=tail)
    # A file gets what the host wrote, a terminal does not.
    show = output.data if sys.stdout.isatty() else output.data_as_it_is
    for line in reader.follow(time.sleep, time.time) if follow else reader.lines():
        if as_json:
            output.data_json(asdict(line), indent=None)
        else:
            show(f"{line.host}: {line.text}" if reader.num_hosts > 1 else line.text)
        if follow:
            sys.stdout.flush()


class LogReader:
    """Reads the logs of one run in lines, remembering how far it has come in each."""

    def __init__(self, run: RunDir, *, attempt: int | None, host: str | None, tail: int | None) -> None:
        self._run, self._host, self._tail = run, host, tail
        self.num_hosts = 0
        self._fixed = attempt is not None
        self._attempt = attempt if attempt is not None else self._newest()
        self._offsets: dict[tuple[int, str], int] = {}
        self._check()

    def lines(self, *, growing: bool = False) -> Iterator[LogLine]:
        """Everything there is now, host after host.

        Args:
          growing: leave a last line that has no end yet for the next call.
        """
        hosts = self._hosts()
        self.num_hosts = len(hosts)
        for host in hosts:
            yield from self._host_lines(host, growing)

    def follow(self, sleep: Callable[[float], None], now: Callable[[], float]) -> Iterator[LogLine]:
        """Everything there is and will be, until nobody acts on the run; goes on to later attempts."""
        while True:
            # Asked before reading, so that what was written last is still read.
            running = self._running(now())
            yield from self.lines(growing=running)
            newest = self._attempt if self._fixed else self._newest()
            if newest != self._attempt:
                self._attempt = newest
            elif not running:
                return
            else:
                sleep(POLL_S)

    def _running(self, now: float) -> bool:
        if self._fixed and self._run.attempt_end(self._attempt) is not None:
            return False
        return lease.is_held(lease.read(self._run.storage), now)

    def _newest(self) -> int:
        attempts = self._run.attempts()
        with_logs = (number for number in reversed(attempts) if self._run.log_hosts(number))
        return next(with_logs, attempts[-1] if attempts else 0)

    def _hosts(self) -> Sequence[str]:
        return [self._host] if self._host else self._run.log_hosts(self._attempt)

    def _check(self) -> None:
        attempts = self._run.attempts()
        if self._fixed and self._attempt not in attempts:
            have = f"it has attempts 1 to {attempts[-1]}" if attempts else "it has not started yet"
            raise UserError(f"{self._run.url} has no attempt {self._attempt}", hint=have)
        hosts = self._run.log_hosts(self._attempt) if attempts else []
        if self._host and hosts and self._host not in hosts:
            guess = nearest(self._host, hosts)
            hint = f"did you mean {guess}?" if guess else f"hosts: {', '.join(hosts[:8])}"
            raise UserError(f"attempt {self._attempt} has no log of host {self._host}", hint=hint)

    def _host_lines(self, host: str, growing: bool) -> Iterator[LogLine]:
        """The lines from where the last call ended."""
        path = self._run.log_path(self._attempt, host)
        key = (self._attempt, host)
        if key not in self._offsets:
            self._offsets[key] = 0 if self._tail is None else self._tail_offset(path, self._tail)
        rest = b""
        while chunk := self._run.storage.read_log(path, self._offsets[key], limit_bytes=CHUNK_BYTES):
            self._offsets[key] += len(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield self._line(host, line)
        if growing:
            self._offsets[key] -= len(rest)
        elif rest:
            yield self._line(host, rest)

    def _line(self, host: str, line: bytes) -> LogLine:
        return LogLine(attempt=self._attempt, host=host, text=line.decode(errors="replace"))

    def _tail_offset(self, path: str, count: int) -> int:
        """Where the last ``count`` lines of a log begin."""
        size = self._run.storage.log_size(path)
        window = max(1, count) * TAIL_BYTES_PER_LINE
        while True:
            start = max(0, size - window)
            body = self._run.storage.read_log(path, start, limit_bytes=size - start)
            pieces = body.split(b"\n")
            # Pieces: the cut first line, whole lines, and what follows the last newline.
            lines = pieces[:-1] if pieces[-1] == b"" else pieces
            if start == 0 or len(lines) > count:
                kept = lines[len(lines) - count :] if count < len(lines) else lines
                return size - sum(len(line) + 1 for line in kept) + (0 if pieces[-1] == b"" else bool(kept))
            window *= 4
