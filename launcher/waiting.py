"""Tells the user what a command waits for, when that takes long.

    with waiting.named("gs://bucket"):
        ...  # after 5 s, once a process: "waiting for gs://bucket"

Silent until :func:`say_by` was called: agents and pods have nobody to tell.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

PATIENCE_S = 5.0

_say: Callable[[str], None] | None = None
_told: set[str] = set()


def say_by(say: Callable[[str], None] | None) -> None:
    """From now on ``say`` hears of long waits, each once; None for nobody."""
    global _say
    _say = say
    _told.clear()


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Around a call that may take long."""
    if _say is None or what in _told:
        yield
        return
    timer = threading.Timer(PATIENCE_S, _tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(what: str) -> None:
    if _say is not None and what not in _told:
        _told.add(what)
        _say(f"waiting for {what}")
