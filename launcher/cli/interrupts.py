"""Ctrl-C while nothing has been done yet: imports and composition.

A KeyboardInterrupt there can come up inside a destructor, which swallows it, or in a library that takes it
for an error of its own. So the process ends at once. Imports nothing that Python has not imported already.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


class ended_by_ctrl_c:  # contextlib would have to be imported first
    """Around what leaves nothing to clean up. A handler of somebody else's, or none, is left alone."""

    def __init__(self) -> None:
        self._is_set = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, _end)
                self._is_set = True
            except ValueError:
                # Not the main thread, where Ctrl-C does not arrive.
                return

    def __exit__(self, *_exception: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)
