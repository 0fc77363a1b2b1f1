"""Waiting for what a cluster does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0
"""Far above what an idle machine needs: only a failure ever waits this long."""


def wait_until[T](predicate: Callable[[], T], timeout_s: float = WAIT_S, what: str = "") -> T:
    """Asks until the answer is true, and gives it.

    Raises:
      TimeoutError: it never was.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (answer := predicate()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s: {what or predicate}; last answer {answer!r}")
        time.sleep(0.05)
    return answer
