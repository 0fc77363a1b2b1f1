"""What a user waits for at the prompt: help, a plan of the largest recipe, a refusal. Best of five."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from benchmarks.figures import Figure, best
from benchmarks.machine import MUSTER, REPO

NUM_RUNS = 5


def command_line() -> Sequence[Figure]:
    """CPU time of help; wall time of the others."""
    help_ms = [_run(["--help"], exit_code=0)[1] for _ in range(NUM_RUNS)]
    plan_ms = [_run(["plan", "llama3-405b-v5p-8x8x8-x2"], exit_code=0)[0] for _ in range(NUM_RUNS)]
    refusal_ms = [_run(["plan", "quickstart", "mesh.fsdp=7"], exit_code=2)[0] for _ in range(NUM_RUNS)]
    return [
        best("`muster --help`, CPU time", "ms", help_ms, aim=150),
        best("`muster plan llama3-405b-v5p-8x8x8-x2`", "ms", plan_ms, aim=700),
        best("a refusal: `muster plan quickstart mesh.fsdp=7`", "ms", refusal_ms, aim=1000),
    ]


def _run(words: Sequence[str], *, exit_code: int) -> tuple[float, float]:
    """Wall and CPU milliseconds of the whole process, Python's own start included."""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [*MUSTER, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != exit_code:
        raise RuntimeError(f"muster {' '.join(words)} ended with {process.returncode}, not {exit_code}")
    return 1e3 * wall_s, 1e3 * (usage.ru_utime + usage.ru_stime)
