"""Work in a thread beside the caller's, for waits that can overlap.

    found = beside(lambda: cluster.get(JOBSETS, run))
    bundle = make_bundle(folder)
    found.result()

Unlike an executor's threads these never keep the process from ending: Ctrl-C is heeded at once, whatever
a thread waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def beside[T](work: Callable[[], T]) -> Future[T]:
    """Begins ``work``; its result or exception comes with ``result()``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
