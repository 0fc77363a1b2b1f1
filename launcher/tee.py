"""The trainer's output: to a log file, to our stdout, and watched for the line that tells why it died.

In the file every line begins with the time of its first byte (see :mod:`launcher.log_lines`); what is
echoed has none, because whoever takes it (a terminal, Kubernetes) has its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from launcher.exits import FATAL_LINE
from launcher.log_lines import stamp

TAIL_LINES = 20
MAX_LINE_BYTES = 4096


def marked(text: str, time_s: float) -> str:
    """A line of Muster's own among a trainer's, dated."""
    return f"[muster {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(time_s))}] {text}"


class Tee:
    """Takes output in chunks. A full disk or a closed terminal loses log, never the training."""

    def __init__(
        self, log: Path, echo: IO[bytes] | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = log.open("ab", buffering=0)
        self._echo, self._clock = echo, clock
        self._lock = threading.Lock()
        self._partial = b""
        self._mid_line = False
        """What came last did not end its line."""
        self._torn = False
        """What was stored last did not arrive whole, so the file may end anywhere."""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.fatal_line = False

    def take(self, chunk: bytes) -> None:
        """Takes some of the trainer's output, in whatever pieces it comes."""
        with self._lock:
            self._write(chunk)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                self._see(line)
            if len(self._partial) > MAX_LINE_BYTES:
                self._see(self._partial)
                self._partial = b""

    def say(self, text: str) -> None:
        """A line of the agent's own, marked and dated."""
        line = f"{marked(text, self._clock())}\n".encode(errors="replace")
        with self._lock:
            # The trainer may have been cut off in the middle of a line.
            self._write(b"\n" + line if self._mid_line else line)

    def tail(self) -> Sequence[str]:
        """The last lines of the trainer."""
        with self._lock:
            rest = [self._partial.decode(errors="replace")] if self._partial else []
            return [*self._tail, *rest]

    def close(self) -> None:
        with self._lock:
            self._file.close()
            self._echo = None

    def _see(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace")
        self._tail.append(text)
        self.fatal_line = self.fatal_line or FATAL_LINE in text

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._store(self._stamped(data))
        self._mid_line = not data.endswith(b"\n")
        if self._echo is not None:
            with contextlib.suppress(OSError, ValueError):
                self._echo.write(data)
                self._echo.flush()

    def _stamped(self, data: bytes) -> bytes:
        """``data`` with the time before every line that begins in it; a progress bar is one line."""
        now = stamp(self._clock())
        body, end = (data[:-1], b"\n") if data.endswith(b"\n") else (data, b"")
        text = body.replace(b"\n", b"\n" + now) + end
        if self._torn:
            return b"\n" + now + text
        return text if self._mid_line else now + text

    def _store(self, data: bytes) -> None:
        stored = 0
        with contextlib.suppress(OSError, ValueError):
            stored = self._file.write(data) or 0
        self._torn = stored < len(data)
