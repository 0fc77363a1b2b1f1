"""One of several processes that race for the same thing at the same moment.

Reads commands from stdin, a line each (``lease URL SEED``, ``attempt URL SEED``), and answers each
with one line: ``won``, ``lost`` or a number. The test releases all workers at once.
"""

from __future__ import annotations

import random
import sys
import time

from launcher import lease
from launcher.rundir import RunDir
from launcher.storage import open_storage
from tests.unit.rundir_support import make_recipe


def _lease(run: RunDir, now: float) -> str:
    try:
        run.acquire(lease.this_process("racer"), now)
    except lease.LeaseHeld:
        return "lost"
    return "won"


def _attempt(run: RunDir, now: float) -> str:
    return str(run.next_attempt(now, recipe=make_recipe(), hosts=["s0-h0"]))


def main() -> None:
    """Answers until stdin ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        what, url, seed, now = line.split()
        time.sleep(random.Random(seed).uniform(0.0, 0.002))
        act = {"lease": _lease, "attempt": _attempt}[what]
        print(act(RunDir(open_storage(url)), float(now)), flush=True)


if __name__ == "__main__":
    main()
