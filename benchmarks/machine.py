"""The machine that figures come from, and the processes that are measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
MUSTER = (sys.executable, "-P", "-c", "import sys; from launcher.cli import main; sys.exit(main())")
BUSY_LOAD_PER_CORE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What figures depend on."""

    num_cores: int
    load: float
    """Load average of the last minute, before the first measurement."""
    system: str
    python: str
    jax: str

    @property
    def is_busy(self) -> bool:
        return self.load > BUSY_LOAD_PER_CORE * self.num_cores

    def describe(self) -> str:
        return (
            f"{self.num_cores} cores, load average {self.load:.2f} at the start, {self.system}, "
            f"Python {self.python}, JAX {self.jax}"
        )


def this_machine() -> Machine:
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        jax=importlib.metadata.version("jax"),
    )


def environment(cache: Path, **more: str) -> Mapping[str, str]:
    """For a measured process: this tree, compiled as users have it, and caches of its own below ``cache``."""
    left_out = ("JAX_", "XLA_", "MUSTER_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {
        **inherited,
        "PYTHONPATH": str(REPO),
        "XDG_CACHE_HOME": str(cache),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "xla"),
        **more,
    }


def run_module(words: Sequence[str], env: Mapping[str, str]) -> str:
    """What ``python -m WORDS`` prints.

    Raises:
      RuntimeError: it failed; with its stderr.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words], cwd=REPO, env=env, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout
