"""The TPU compiler on a recipe's train step: in a process of its own, within limits, its answer kept.

compiled = compile_step(recipe, limits=Limits())

What it answers depends on the recipe (not on its name, target or checkpoints), the code of `trainer/` and
`recipes/`, and the versions of what compiles; a second call with the same content reads the first answer.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml

from launcher.preflight.compiled import Compiled, read_compiled
from launcher.processes import kill_group, spawn_leashed
from recipes.contract import COMPILE_PROBLEM_FILE, CompileProblem, ExitCode, cache_dir
from recipes.errors import UserError
from recipes.flags import flag_arguments, libtpu_env
from recipes.load import flatten, keys, recipe_to_dict
from recipes.schema import Recipe
from recipes.schema_key import Effect

GIB = 2**30
_KEPT_ANSWERS = 100
_WORK_PREFIX = "compiling-"
_ABANDONED_S = 86_400.0
"""After so long a folder of work belongs to a process that was killed."""
_POLL_S = 0.25
_TAIL_LINES = 20
_UNKNOWN_FLAG = re.compile(r"Unknown command line flag '([\w.-]+)'")
_VERSIONS = ("jax", "jaxlib", "libtpu", "flax", "optax", "qwix")
_SOURCES = ("trainer", "recipes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the compiler may take before it is stopped."""

    time_s: float = 3600.0
    memory_bytes: int = 8 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What it has taken so far."""

    time_s: float
    memory_bytes: int


class CompileError(UserError):
    """The step was not compiled, as the compiler says."""

    def __init__(self, problem: CompileProblem) -> None:
        super().__init__(problem.message, hint=problem.hint, exit_code=problem.exit_code)
        self.problem = problem


Command = Callable[[Path, Path], Sequence[str]]
"""(resolved recipe, folder for the answer) -> what to run."""


def aot_command(recipe: Path, out: Path) -> Sequence[str]:
    """`trainer/aot.py` with this interpreter, not one of that name in the folder of the user."""
    return (sys.executable, "-P", "-m", "trainer.aot", str(recipe), "--out", str(out))


def compile_step(
    recipe: Recipe,
    *,
    limits: Limits,
    watch: Callable[[Usage], None] = lambda usage: None,
    fresh: bool = False,
    command: Command = aot_command,
) -> Compiled:
    """Compiles, or reads what was compiled before from the same content; ``fresh`` does not read.

    Raises:
      CompileError: it does not fit, the compiler refuses it, or there is no compiler or topology for it.
      UserError: a limit was reached, the compiler was killed, or the answer cannot be kept.
    """
    folder = cache_dir(os.environ) / "preflight"
    answer = folder / content_key(recipe)
    if not fresh and (found := _kept(answer)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_WORK_PREFIX) as work:
            out = Path(work) / "answer"
            _run(command, recipe, Path(work), out, limits, watch)
            _raise_what_may_change(out)
            shutil.rmtree(answer, ignore_errors=True)
            _keep(out, answer)
        _forget_oldest(folder)
    except OSError as error:
        raise UserError(
            f"cannot keep what the compiler says in {folder}: {error.strerror or error}",
            hint="make room there, or set XDG_CACHE_HOME to another folder",
        ) from error
    return _read(answer)


def content_key(recipe: Recipe) -> str:
    """Changes with whatever the compiled step depends on."""
    flat = flatten(recipe_to_dict(recipe))
    facts = {
        "recipe": {path: flat[path] for path, key in keys().items() if key.effect is not Effect.OPERATION},
        "hardware": [recipe.hardware.generation, recipe.hardware.topology, recipe.multislice.num_slices],
        "flags": list(flag_arguments(recipe)),
        "versions": {name: _version(name) for name in _VERSIONS},
        "code": source_digest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def source_digest() -> str:
    """Of every source and data file that the compiled step comes from."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        for path in sorted((*root.rglob("*.py"), *root.glob("*.json"))):
            digest.update(f"{package}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _kept(answer: Path) -> Compiled | None:
    """What was compiled before; None when nothing whole is there.

    Raises:
      CompileError: it was refused then.
    """
    try:
        return _read(answer)
    except CompileError:
        raise
    except UserError:
        return None


def _read(answer: Path) -> Compiled:
    problem = _problem(answer)
    if problem is not None:
        raise CompileError(problem)
    return read_compiled(answer)


def _problem(answer: Path) -> CompileProblem | None:
    try:
        return CompileProblem(**json.loads((answer / COMPILE_PROBLEM_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _raise_what_may_change(answer: Path) -> None:
    """A compiler or topology that is missing is none of the step's; that it does not compile is."""
    problem = _problem(answer)
    if problem is not None and problem.exit_code != ExitCode.EXPERIMENT_FAILED:
        raise CompileError(problem)


def _keep(out: Path, answer: Path) -> None:
    """Unless another process has kept the same answer in the meantime."""
    try:
        out.replace(answer)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _forget_oldest(folder: Path) -> None:
    """Leaves the newest answers, and what is being compiled."""
    times_s = {}
    for path in folder.iterdir():
        # Another process may be clearing up too.
        with contextlib.suppress(FileNotFoundError):
            times_s[path] = path.stat().st_mtime
    working = {path for path in times_s if path.name.startswith(_WORK_PREFIX)}
    abandoned = {path for path in working if times_s[path] < time.time() - _ABANDONED_S}
    answers = sorted(times_s.keys() - working, key=lambda path: times_s[path], reverse=True)
    for old in (*answers[_KEPT_ANSWERS:], *abandoned):
        shutil.rmtree(old, ignore_errors=True)


def _run(
    command: Command,
    recipe: Recipe,
    work: Path,
    out: Path,
    limits: Limits,
    watch: Callable[[Usage], None],
) -> None:
    """Leaves the answer in ``out``: the compiled step, or why there is none."""
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False), encoding="utf-8")
    process = spawn_leashed(command(path, out), env={**_environment(os.environ), **libtpu_env(recipe)})
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    assert process.stdout is not None
    reader = threading.Thread(target=tail.extend, args=(_lines(process.stdout),), daemon=True)
    reader.start()
    try:
        code = _wait(process, limits, watch)
    finally:
        kill_group(process.pid)
        process.wait()
        reader.join()
        process.stdout.close()
    if code == ExitCode.COMPLETE or (out / COMPILE_PROBLEM_FILE).exists():
        return
    raise _died(code, list(tail))


def _environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Without what would change the compiler behind the recipe's back."""
    return {name: value for name, value in environ.items() if name not in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")}


def _lines(stream: IO[bytes]) -> Iterator[str]:
    for line in stream:
        yield line.decode(errors="replace").rstrip()


def _wait(process: subprocess.Popen[bytes], limits: Limits, watch: Callable[[Usage], None]) -> int:
    start_s = time.monotonic()
    while True:
        try:
            return process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            usage = Usage(time_s=time.monotonic() - start_s, memory_bytes=resident_bytes(process.pid))
            watch(usage)
            check_limits(usage, limits)


def check_limits(usage: Usage, limits: Limits) -> None:
    """Raises a UserError once the compiler has taken more than it may."""
    if usage.time_s > limits.time_s:
        raise UserError(
            f"the TPU compiler was stopped after {usage.time_s:.0f} s, its limit",
            hint="give it longer with --time-limit SECONDS; xla_tpu_scoped_vmem_limit_kib makes it slow,"
            " and hardware.tuned_flags=false leaves it out",
            exit_code=ExitCode.INFRASTRUCTURE,
        )
    if usage.memory_bytes > limits.memory_bytes:
        raise UserError(
            f"the TPU compiler was stopped at {usage.memory_bytes / GIB:.1f} GiB of memory, its limit",
            hint="give it more with --memory-limit GIB",
            exit_code=ExitCode.INFRASTRUCTURE,
        )


def resident_bytes(pid: int) -> int:
    """Memory of a process in RAM; 0 where that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _died(code: int, tail: Sequence[str]) -> UserError:
    unknown = next((found[1] for line in tail if (found := _UNKNOWN_FLAG.search(line))), None)
    if unknown is not None:
        return UserError(
            f"libtpu {_version('libtpu')} does not know the compiler flag --{unknown}",
            hint=f"correct or remove hardware.compiler_flags.{unknown}; `muster hardware` has others",
        )
    said = "\n".join(f"  {line}" for line in tail)
    cause = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return UserError(
        f"the TPU compiler {cause} without an answer; it said last:\n{said}",
        hint="the kernel kills what takes more memory than there is: free some, or try on a larger machine"
        if code == -9
        else "the last line often names a flag or an operation; hardware.tuned_flags=false leaves flags out",
        exit_code=ExitCode.INFRASTRUCTURE,
    )
