"""Lines of the logs of many hosts: the time in front of each, reading one log on, and merging all by time.

A stored line is ``2026-11-30T21:00:00.123Z text``, in UTC. Times of one width sort as text, so they are
compared and never computed with. A line without one has the time of the line before it in its log.
Reads of all hosts run in a bounded pool, one chunk ahead of the merge: memory is bounded whatever logs hold.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from launcher.storage_types import Storage

READERS = 32
"""Threads that wait for storage at once."""
MEMORY_BYTES = 128 * 2**20
"""Of chunks held at once, shared by all hosts; each may have two."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 8 * 2**10, 4 * 2**20
MAX_LINE_BYTES = 2**20
"""A longer line is shown in pieces."""
TAIL_BYTES_PER_LINE = 230
"""First guess; a tail reads on backwards when its lines turn out longer."""
TAIL_BLOCK_BYTES = 2**20

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})\d{0,6}Z ")
"""Up to nanoseconds, as Kubernetes has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of one host's log, without its end."""

    attempt: int
    host: str
    time: str
    """RFC 3339, UTC, milliseconds; empty when unknown."""
    text: str


def stamp(time_s: float) -> bytes:
    """What stands in front of a stored line that began at Unix time ``time_s``."""
    seconds, millis = divmod(int(time_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{millis:03d}Z ".encode()


def split_stamp(line: bytes) -> tuple[str, bytes]:
    """Time (empty when there is none) and text of a stored line."""
    found = _STAMP.match(line)
    return (f"{found[1].decode()}Z", line[found.end() :]) if found else ("", line)


class LineCutter:
    """Makes lines of the chunks of one log, however they are cut.

    Args:
      attempt: of the lines.
      host: of the lines.
      after: a time; lines up to it are passed over. They were had from elsewhere.
    """

    def __init__(self, attempt: int, host: str, *, after: str = "") -> None:
        self._attempt, self._host, self._after = attempt, host, after
        self._rest, self._midway = b"", False
        self.time = after
        """Of the newest line."""

    def feed(self, chunk: bytes) -> Iterator[LogLine]:
        """The lines that end in ``chunk``."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            yield from self._line(line)
            self._midway = False
        while len(self._rest) > MAX_LINE_BYTES:
            cut = _character_start(self._rest, MAX_LINE_BYTES)
            yield from self._line(self._rest[:cut])
            self._rest, self._midway = self._rest[cut:], True

    def flush(self) -> Iterator[LogLine]:
        """The last line, when it has no end."""
        if self._rest:
            yield from self._line(self._rest)
        self._rest, self._midway = b"", False

    def _line(self, line: bytes) -> Iterator[LogLine]:
        stated, text = ("", line) if self._midway else split_stamp(line)
        self.time = stated or self.time
        if not self._after or self.time > self._after:
            shown = text.decode(errors="replace")
            yield LogLine(attempt=self._attempt, host=self._host, time=self.time, text=shown)


def _character_start(data: bytes, end: int) -> int:
    """The last position up to ``end`` that is not inside a UTF-8 character."""
    starts = (position for position in range(end, end - 4, -1) if data[position] & 0xC0 != 0x80)
    return next(starts, end)


class HostLog:
    """One host's log in a run directory, and how far it has been read."""

    def __init__(self, storage: Storage, path: str, cutter: LineCutter, *, tail: int | None) -> None:
        self._storage, self._path, self._cutter, self._tail = storage, path, cutter, tail
        self._offset = 0

    def read_on(self, pool: Executor, chunk_bytes: int, *, growing: bool) -> Iterator[LogLine]:
        """All lines from where the last call ended. The first read begins now, not with the first line.

        Args:
          pool: where reads run.
          chunk_bytes: how much is read at once.
          growing: leave a last line that has no end yet for the next call.
        """
        return self._lines(pool.submit(self._read, chunk_bytes), pool, chunk_bytes, growing)

    def _lines(
        self, reading: Future[tuple[bytes, bool]], pool: Executor, chunk_bytes: int, growing: bool
    ) -> Iterator[LogLine]:
        more = True
        while more:
            chunk, more = reading.result()
            if more:
                reading = pool.submit(self._read, chunk_bytes)
            yield from self._cutter.feed(chunk)
        if not growing:
            yield from self._cutter.flush()

    def _read(self, chunk_bytes: int) -> tuple[bytes, bool]:
        """The next bytes, and whether there may be more."""
        if self._tail is not None:
            kept = self._seek_tail(self._tail, chunk_bytes)
            self._tail = None
            if kept is not None:
                return kept, False
        chunk = self._storage.read_log(self._path, self._offset, limit_bytes=chunk_bytes)
        self._offset += len(chunk)
        return chunk, len(chunk) == chunk_bytes

    def _seek_tail(self, count: int, limit_bytes: int) -> bytes | None:
        """Goes to the last ``count`` lines; or returns them and goes past, when one read had them all."""
        window = min(max(1, count) * TAIL_BYTES_PER_LINE, TAIL_BLOCK_BYTES)
        start, block = self._storage.read_log_tail(self._path, window)
        left = count + block.endswith(b"\n")
        first = True
        while block.count(b"\n") < left and start > 0:
            left -= block.count(b"\n")
            before = max(0, start - TAIL_BLOCK_BYTES)
            block = self._storage.read_log(self._path, before, limit_bytes=start - before)
            start, first = before, False
        begin = _after_newline_from_end(block, left)
        if first and len(block) - begin <= limit_bytes:
            self._offset = start + len(block)
            return block[begin:]
        self._offset = start + begin
        return None


def _after_newline_from_end(block: bytes, count: int) -> int:
    """Where what follows the ``count``-th newline from the end begins; 0 when there are fewer."""
    if count == 0:
        return len(block)
    position = len(block)
    for _ in range(count):
        position = block.rfind(b"\n", 0, position)
        if position < 0:
            return 0
    return position + 1


def merged(
    logs: Sequence[HostLog], others: Iterable[Iterable[LogLine]], *, growing: bool
) -> Generator[LogLine, None, None]:
    """The lines of all hosts by time; equal times, and lines without, in the order of the hosts.

    Args:
      logs: what is read here.
      others: lines of other hosts, each in its own order.
      growing: see :meth:`HostLog.read_on`.
    """
    chunk_bytes = MEMORY_BYTES // (2 * max(1, len(logs)))
    chunk_bytes = min(max(chunk_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="logs")
    try:
        lines = [log.read_on(pool, chunk_bytes, growing=growing) for log in logs]
        yield from heapq.merge(*lines, *others, key=_time_of)
    finally:
        pool.shutdown(cancel_futures=True)


def last(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    """The last ``count`` lines, or all."""
    return lines if count is None else deque(lines, maxlen=count)


def _time_of(line: LogLine) -> str:
    return line.time
