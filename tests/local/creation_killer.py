"""Creates a run in a child process that is killed at its Nth file-system call, for every N.

After each kill it looks at what was left and launches again. Prints ``kills=N empty=N valid=N``.
Usage: python -m tests.local.creation_killer FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from launcher.rundir import RunDir, create_or_open
from launcher.storage import open_storage
from tests.unit.rundir_support import make_recipe

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir", "fcntl.flock")


def _create_and_die(folder: Path, at_call: int) -> None:
    calls = 0

    def count(event: str, _: tuple[object, ...]) -> None:
        nonlocal calls
        if event in EVENTS:
            calls += 1
            if calls == at_call:
                os.kill(os.getpid(), signal.SIGKILL)

    storage, recipe = open_storage(str(folder)), make_recipe()
    sys.addaudithook(count)
    run = create_or_open(storage, recipe, {"python": "x"}).run
    run.next_attempt(1.0, recipe=recipe, hosts=["s0-h0"])


def _check(folder: Path) -> str:
    """What the kill left: nothing, or a run that is whole. Then launches again."""
    storage = open_storage(str(folder))
    run = RunDir(storage)
    found = "valid" if run.exists() else "empty"
    if found == "valid":
        assert run.recipe() == make_recipe()
        assert run.lock() in ({}, {"python": "x"})
    for attempt in run.attempts():
        start = run.attempt_start(attempt)
        assert start is None or start.attempt == attempt
    opened = create_or_open(storage, make_recipe(), {"python": "x"})
    assert opened.created is (found == "empty")
    assert run.next_attempt(2.0, recipe=make_recipe(), hosts=["s0-h0"]) in (1, 2)
    assert run.lock() == {"python": "x"}
    return found


def main() -> None:
    """Kills at call 1, 2, 3 ... until one child lives to its end."""
    found: list[str] = []
    while True:
        folder = Path(sys.argv[1]) / f"run-{len(found)}"
        child = os.fork()
        if child == 0:
            _create_and_die(folder, len(found) + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        found.append(_check(folder))
    print(f"kills={len(found)} empty={found.count('empty')} valid={found.count('valid')}")


if __name__ == "__main__":
    main()
