"""`muster` as a child of a rehearsal: its answer and its talk in files, and nothing left when we go."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.processes import POLL_S, kill_group, spawn_leashed
from recipes.contract import cache_dir
from recipes.errors import UserError

_CPU_FLAGS = "--xla_backend_optimization_level=0"
"""A rehearsal spends most of its time in XLA's compiler for CPUs; bits are equal at any level."""
_ASK_AGAIN_S = 1.0
_PATIENCE_S = 15.0
"""How long a launch may take to end its agents once it was told twice to stop."""
_ERROR, _HINT = "error: ", "hint: "


class Child:
    """One `muster` command under way."""

    def __init__(self, process: subprocess.Popen[bytes], answer: Path, talk: Path) -> None:
        self._process, self._answer, self._talk = process, answer, talk

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        return self._process.poll()

    def wait(self, say: Callable[[str], None] = lambda line: None) -> int:
        """Its exit code; ``say`` hears what it talks of until then, but for its errors."""
        with self._talk.open(encoding="utf-8", errors="replace") as talk:
            while True:
                code = self.poll()
                for line in talk:
                    if not line.startswith((_ERROR, _HINT, "  ")):
                        say(line.rstrip())
                if code is not None:
                    return code
                time.sleep(POLL_S)

    def answer(self) -> Mapping[str, Any]:
        """The JSON object that it printed; empty when it printed none."""
        try:
            found = json.loads(self._answer.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def error(self) -> UserError:
        """The error that it ended with, as far as it told one."""
        lines = self._talk.read_text(encoding="utf-8", errors="replace").splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith(_ERROR)), None)
        hint = next((line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)), "")
        code = self._process.returncode
        if first is None:
            return UserError(f"ended with {code}; {self._talk} has what it said", exit_code=code)
        # What belongs to the message is indented below it.
        rest = lines[first + 1 :]
        end = next((i for i, line in enumerate(rest) if not line.startswith("  ")), len(rest))
        message = "\n".join([lines[first].removeprefix(_ERROR), *rest[:end]])
        return UserError(message, hint=hint, exit_code=code)

    def end(self) -> None:
        """Stops it, if it still runs, and all that it has started, as Ctrl-C twice would."""
        deadline_s, asked_s = time.monotonic() + _PATIENCE_S, -_ASK_AGAIN_S
        while self.poll() is None and time.monotonic() < deadline_s:
            if time.monotonic() >= asked_s + _ASK_AGAIN_S:
                asked_s = time.monotonic()
                self._process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
        if self.poll() is None:
            # Agents whose launcher is gone stop by themselves.
            kill_group(self._process.pid)
            self._process.wait()


@contextlib.contextmanager
def child(words: Sequence[str], *, directory: Path, name: str, env: Mapping[str, str]) -> Iterator[Child]:
    """`muster WORDS`; stdout goes to ``name.json``, stderr to ``name.txt``. Ended on the way out."""
    answer, talk = directory / f"{name}.json", directory / f"{name}.txt"
    with answer.open("wb") as stdout, talk.open("wb") as stderr:
        argv = [sys.executable, "-P", "-m", "launcher", *words]
        process = spawn_leashed(argv, env=env, stdout=stdout, stderr=stderr)
    started = Child(process, answer, talk)
    try:
        yield started
    finally:
        started.end()


def child_env(environ: Mapping[str, str], directory: Path) -> Mapping[str, str]:
    """The environment of a child whose temporary files are to be below ``directory``."""
    temporary = str(_folder(directory, "tmp"))
    # The TPU compiler's logs are in /tmp otherwise, whatever TMPDIR says.
    return {"TPU_LOG_DIR": temporary, **environ, "TMPDIR": temporary}


def run_env(environ: Mapping[str, str], directory: Path) -> Mapping[str, str]:
    """The same for runs, which write nothing elsewhere but compiled programs."""
    programs = environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_dir(environ) / "xla")
    return {
        **child_env(environ, directory),
        "XLA_FLAGS": f"{_CPU_FLAGS} {environ.get('XLA_FLAGS', '')}".strip(),
        "JAX_COMPILATION_CACHE_DIR": programs,
        "XDG_CACHE_HOME": str(_folder(directory, "cache")),
    }


def _folder(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir(exist_ok=True)
    return path
