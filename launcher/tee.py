"""The trainer's output: to a log file, to our stdout, and watched for the line that tells why it died."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from launcher.exits import FATAL_LINE

TAIL_LINES = 20
MAX_LINE_BYTES = 4096


class Tee:
    """Takes output in chunks. A full disk or a closed terminal loses log, never the training."""

    def __init__(self, log: Path, echo: IO[bytes] | None = None) -> None:
        self._file = log.open("ab", buffering=0)
        self._echo = echo
        self._lock = threading.Lock()
        self._partial = b""
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
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = f"[muster {stamp}] {text}\n".encode(errors="replace")
        with self._lock:
            # The trainer may have been cut off in the middle of a line.
            self._write(b"\n" + line if self._partial else line)

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
        with contextlib.suppress(OSError, ValueError):
            self._file.write(data)
        if self._echo is not None:
            with contextlib.suppress(OSError, ValueError):
                self._echo.write(data)
                self._echo.flush()
