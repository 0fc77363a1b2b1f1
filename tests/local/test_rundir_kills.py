"""A launcher killed at any file-system call while it makes a run leaves nothing or a valid run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_creation_survives_a_kill_at_every_call(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.local.creation_killer", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = re.fullmatch(r"kills=(\d+) empty=(\d+) valid=(\d+)", done.stdout.strip())
    assert counts, done.stdout
    kills, empty, valid = map(int, counts.groups())
    assert kills >= 15
    assert empty >= 3
    assert valid >= 8
