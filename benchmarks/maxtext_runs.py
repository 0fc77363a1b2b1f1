"""MaxText in an environment of its own: which interpreter, its processes, and what they print.

Installed once below ``~/.cache/muster/benchmarks`` with the JAX and libtpu that Muster runs with, or any
interpreter named by MUSTER_MAXTEXT_PYTHON. Compiled steps are kept there too: one takes minutes.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import environment
from benchmarks.maxtext_pairs import COMMON, MAXTEXT, Pair
from recipes.contract import COMPILED_FACTS_FILE, cache_dir

PYTHON_VARIABLE = "MUSTER_MAXTEXT_PYTHON"
COMPILE = Path(__file__).with_name("maxtext_compile.py")
STEP_LINE = re.compile(r"completed step: (\d+), seconds: ([0-9.]+)")
_VERSIONS = "import importlib.metadata as m; print(*(m.version(n) for n in ('maxtext', 'jax', 'libtpu')))"
_TRAIN = "maxtext.trainers.pre_train.train"
_FOLDER = "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"


def folder() -> Path:
    """Where everything of this release is kept."""
    return cache_dir(os.environ) / "benchmarks" / f"maxtext-{MAXTEXT}"


def interpreter() -> Path:
    """MaxText's Python, installed at the first time.

    Raises:
      RuntimeError: it cannot be had, or is another release or has another JAX or libtpu than Muster.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else _installed()
    wanted = [MAXTEXT, *(importlib.metadata.version(name) for name in ("jax", "libtpu"))]
    found = _output([str(python), "-c", _VERSIONS]).split()
    if found != wanted:
        raise RuntimeError(f"{python} has MaxText, JAX, libtpu {found}, to be compared are {wanted}")
    return python


def compiled(python: Path, pair: Pair) -> Path:
    """The folder with MaxText's ``compiled.txt`` and ``compiled.json``, kept from one call to the next.

    Raises:
      RuntimeError: it does not compile; with the end of what it printed.
    """
    libtpu = importlib.metadata.version("libtpu")
    out = folder() / "compiled" / fingerprint(libtpu, pair)
    if not (out / COMPILED_FACTS_FILE).exists():
        out.mkdir(parents=True, exist_ok=True)
        run = ("run_name=compare", f"base_output_directory={out}")
        argv = [str(python), str(COMPILE), str(out), *run, *COMMON, *pair.settings]
        _output(argv, {**_environment(), **compiler_environment(pair.flags)})
    return out


def fingerprint(libtpu: str, pair: Pair) -> str:
    """Changes with whatever MaxText's compiled step and what is written of it depend on."""
    words = "\0".join((MAXTEXT, libtpu, COMPILE.read_text(), *pair.flags, *COMMON, *pair.settings))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def compiler_environment(flags: Sequence[str]) -> Mapping[str, str]:
    """Lets libtpu compile with ``flags`` on a machine without a TPU, beside other compilers."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(flags),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What a training run printed."""

    first_s: float | None
    """From the process's start until it said that its first step was done; None if it never did."""
    times_s: Sequence[float]
    """Of each step, as it says itself."""
    tail: Sequence[str]
    """The last lines."""


def trained(
    python: Path, settings: Sequence[str], num_devices: int, work: Path
) -> tuple[float, Sequence[float]]:
    """Seconds from the process's start until its first step is done, and those of each step.

    Raises:
      RuntimeError: it failed; with the end of what it printed.
    """
    config = Path(_output([str(python), "-c", _FOLDER], _environment()).strip(), "configs", "base.yml")
    run = ("run_name=compare", f"base_output_directory={work / 'out'}", f"jax_cache_dir={work / 'cache'}")
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    start_s = time.monotonic()
    process = subprocess.Popen(
        [str(python), "-m", _TRAIN, str(config), *run, *settings],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=work,
        env={**_environment(), **devices, "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    with process:
        assert process.stdout is not None
        steps = read_steps(process.stdout, start_s=start_s)
    if process.returncode != 0 or steps.first_s is None:
        raise RuntimeError(f"MaxText ended with {process.returncode}:\n" + "".join(steps.tail))
    return steps.first_s, steps.times_s


def read_steps(lines: Iterable[str], *, start_s: float, now: Callable[[], float] = time.monotonic) -> Steps:
    """Reads lines as they come."""
    first_s: float | None = None
    times_s: list[float] = []
    tail: collections.deque[str] = collections.deque(maxlen=40)
    for line in lines:
        tail.append(line)
        if found := STEP_LINE.search(line):
            first_s = now() - start_s if first_s is None else first_s
            times_s.append(float(found[2]))
    return Steps(first_s=first_s, times_s=times_s, tail=list(tail))


def _installed() -> Path:
    python = folder() / "environment" / "bin" / "python"
    done = folder() / "installed"
    if not done.exists():
        print(f"installing MaxText {MAXTEXT} into {folder()} (2 GB)", file=sys.stderr)
        same = [f"{name}=={importlib.metadata.version(name)}" for name in ("jax", "libtpu")]
        uv = [sys.executable, "-m", "uv"]
        _output([*uv, "venv", "--clear", "--python", "3.12", str(folder() / "environment")])
        _output([*uv, "pip", "install", "--python", str(python), f"maxtext[tpu]=={MAXTEXT}", same[0]])
        # MaxText asks for a libtpu of its own; both sides get one compiler.
        _output([*uv, "pip", "install", "--python", str(python), "--no-deps", same[1]])
        done.touch()
    return python


def _environment() -> Mapping[str, str]:
    """As other measured processes have it, without this repository."""
    return {name: value for name, value in environment(folder()).items() if name != "PYTHONPATH"}


def _output(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout
