"""A small process that obeys the contract without JAX: steps, saves, stops, dies and hangs as it is told.

``STAND_IN`` (JSON, in the environment) says how: ``step_s``, ``trace`` (a file that every step is written
to), ``profile_step`` (after it there is a profile), and ``faults``: ``{"attempt": 1, "host": "s0-h1",
"step": 5, "do": ...}``; attempt 0 is every one.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import yaml

from launcher.rundir import COMMIT_MARKER, committed_step
from launcher.storage import is_remote, open_storage
from recipes.contract import (
    FAILURE_FILE,
    METRICS_DIR,
    PROFILES_DIR,
    PROGRESS_FILE,
    STACKS_FILE,
    HostContext,
    RunPath,
)

FATAL = "F1130 client.h:86] Terminating process because the JAX distributed service detected fatal errors."


class StandIn:
    def __init__(self, recipe: dict[str, Any], context: HostContext, script: dict[str, Any]) -> None:
        self.recipe, self.context, self.script = recipe, context, script
        self.store, self.scratch = open_storage(context.run_dir), Path(context.scratch_dir)
        self.saved = committed_step(self.store)
        self.notice = False
        self.num_steps = int(recipe["train"]["num_steps"])
        self.interval = int(recipe["checkpoint"]["save_interval_steps"])
        self.shared_notice = self.scratch.parent / "notice"
        signal.signal(signal.SIGTERM, self._on_notice)
        hidden = self.scratch / f".{STACKS_FILE}"
        faulthandler.register(signal.SIGUSR1, hidden.open("wb", buffering=0), all_threads=True)
        hidden.rename(self.scratch / STACKS_FILE)

    def _on_notice(self, *_: object) -> None:
        self.notice = True

    def main(self) -> int:
        self._claim()
        print(f"stand-in {self.context.host_name} pid {os.getpid()}", flush=True)
        first = max(self.saved, 0)
        self.progress("starting", 0)
        self.fault(0)
        for done in range(first + 1, self.num_steps + 1):
            time.sleep(self.script.get("step_s", 0.02))
            self.trace(done)
            self.progress("training", done)
            if done % self.interval == 0 or done == self.num_steps:
                self.commit(done)
            if done == self.script.get("profile_step"):
                self.profile(done)
            self.fault(done)
            if self.told_to_stop():
                time.sleep(self.script.get("save_s", 0.0))
                self.commit(done)
                self.progress("saving", done)
                return 42
        self.progress("done", self.num_steps)
        return 0

    def told_to_stop(self) -> bool:
        """A notice to one rank stops them all, as JAX's sync point does."""
        if self.notice:
            self.shared_notice.touch()
        return self.shared_notice.exists()

    def fault(self, step: int) -> None:
        for fault in self.script.get("faults", []):
            if (
                fault["step"] == step
                and fault.get("attempt", 0) in (0, self.context.attempt)
                and fault.get("host", self.context.host_name) == self.context.host_name
            ):
                self.do(fault["do"])

    def do(self, what: str) -> None:
        kind, _, detail = what.partition(" ")
        if kind == "exit":
            if detail in ("1", "2"):
                self.fail(int(detail))
            os._exit(int(detail))
        elif kind == "signal":
            os.kill(os.getpid(), int(detail))
        elif kind == "peer-lost":
            print(FATAL, file=sys.stderr, flush=True)
            os.abort()
        elif kind == "deaf":
            # As in gloo with a dead peer: SIGTERM is only noted.
            time.sleep(1000)
        elif kind == "sleep":
            time.sleep(float(detail))
        else:
            raise ValueError(what)

    def fail(self, code: int) -> NoReturn:
        failure = {"exit_code": code, "message": "the loss is NaN", "hint": "lower it", "time_s": time.time()}
        (self.scratch / FAILURE_FILE).write_text(json.dumps(failure))
        os._exit(code)

    def progress(self, phase: str, step: int) -> None:
        body = {
            "phase": phase,
            "step": step,
            "num_steps": self.num_steps,
            "committed_step": self.saved,
            "time_s": time.time(),
            "metrics": metrics(step) if step else {},
        }
        temporary = self.scratch / f"{PROGRESS_FILE}.tmp"
        temporary.write_text(json.dumps(body))
        temporary.replace(self.scratch / PROGRESS_FILE)
        if self.context.process_id == 0 and phase == "training":
            folder = self.scratch / METRICS_DIR
            folder.mkdir(exist_ok=True)
            with (folder / f"{self.context.attempt:04d}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")

    def commit(self, step: int) -> None:
        self.saved = step
        if self.context.process_id == 0:
            self.store.replace(f"{RunPath.CHECKPOINTS}/{step}/{COMMIT_MARKER}", b"done")

    def profile(self, step: int) -> None:
        folder = self.scratch / PROFILES_DIR / f"attempt-{self.context.attempt:04d}"
        files = folder / f".step-{step:08d}" / "plugins/profile/one"
        files.mkdir(parents=True)
        (files / f"{self.context.host_name}.xplane.pb").write_bytes(b"x" * 2**20)
        (folder / f".step-{step:08d}").rename(folder / f"step-{step:08d}")

    def trace(self, step: int) -> None:
        if path := self.script.get("trace"):
            with open(path, "a") as file:
                file.write(f"{self.context.attempt} {self.context.host_name} {step}\n")

    def _claim(self) -> None:
        """A second writer for the same host is what must never be."""
        if is_remote(self.context.run_dir):
            return
        run = Path(self.context.run_dir)
        lock = os.open(run / f".{self.context.host_name}.writer", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (run / "TWO-WRITERS").touch()
            os._exit(1)


def metrics(step: int) -> dict[str, float]:
    return {
        "train/loss": 61.0 / (1 + step),
        "eval/loss": 122.0 / (1 + step),
        "data/eval_unigram_entropy_nats": 3.2188,
        "perf/tokens_per_s": 1000.0,
    }


def main() -> int:
    context = HostContext.from_env(os.environ)
    assert context is not None
    recipe = yaml.safe_load(Path(sys.argv[1]).read_text())
    return StandIn(recipe, context, json.loads(os.environ.get("STAND_IN", "{}"))).main()


if __name__ == "__main__":
    sys.exit(main())
