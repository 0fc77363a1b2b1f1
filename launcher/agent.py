"""The small process that runs the trainer on one host: PID 1 of a pod, or a child of the local launcher.

    python -P -m launcher.agent            # everything else comes by environment (recipes/contract.py)

It starts the trainer without a shell, forwards SIGTERM at once, kills it before the grace period ends,
watches its progress, ships log, heartbeat and metrics, and exits with one code of the contract. SIGQUIT
means hurry: kill now.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import yaml

from launcher import ledger, processes
from launcher.exits import TrainerEnd, Verdict, classify
from launcher.hangs import HangWatch
from launcher.ledger import Heartbeat, HostRecord
from launcher.orphans import write_processes
from launcher.rundir import RunDir, read_recipe
from launcher.shipping import LOG_FILE, Cargo, LatestCargo, Shipper, output_cargo, period_s, profile_cargo
from launcher.stacks import SHIP_PERIOD_S, STACKS_S, StackDumps
from launcher.storage import StorageError, open_storage
from launcher.tee import Tee
from recipes.contract import (
    FAILURE_FILE,
    PROGRESS_FILE,
    ExitCode,
    Failure,
    HostContext,
    Phase,
    PodEnv,
    Progress,
    attempt_path,
    heartbeat_path,
)
from recipes.errors import UserError
from recipes.flags import libtpu_env
from recipes.load import recipe_to_dict
from recipes.schema import Recipe, RunConfig

TICK_S = 0.1
PIPE_S = 2.0
"""How long the rest of the output may take once the trainer has ended."""
NOTHING_TO_SAVE = (Phase.STARTING, Phase.CONNECTING, Phase.COMPILING, Phase.RESTORING)
"""Phases before the first step of an attempt: what a trainer has is in storage already."""
NOTICE_S = 2.0
"""How long a trainer with nothing to save may take after a notice, to tell its peers and to stop."""
FINAL_SHIPPING_S = 20.0
RECIPE_FILE = "recipe.yaml"


def shipping_reserve_s(grace_period_s: float) -> float:
    """The part of the grace period that is kept for shipping: the trainer is killed before it begins."""
    return min(5.0, grace_period_s / 4)


type Orders = Callable[[], signal.Signals | None]
"""SIGTERM to stop, SIGQUIT to hurry, asked at each tick: what the agent's surroundings want of it."""


class Agent:
    """Runs one trainer to its end. Only the main thread touches processes."""

    def __init__(
        self, context: HostContext, run: RunDir, tee: Tee, *, parent: int | None, orders: Orders
    ) -> None:
        self._context, self._run, self._tee, self._parent = context, run, tee, parent
        self._orders = orders
        self._scratch = Path(context.scratch_dir)
        self._stacks = StackDumps(context, run, signal=lambda: self._signal(signal.SIGUSR1), say=tee.say)
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_s: float | None = None
        """When SIGTERM came (monotonic)."""
        self._hurry = self._out_of_time = self._needless = False
        self._hang, self._hung_s = "", 0.0
        self._progress: Progress | None = None
        self._progress_version: tuple[int, int] | None = None
        self._record = HostRecord(
            host=context.host_name,
            hostname=os.environ.get(PodEnv.NODE_NAME) or socket.gethostname(),
            pid=os.getpid(),
            start_s=time.time(),
        )

    def listen(self) -> None:
        """From here on signals ask for a stop."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._on_signal)

    def run(self, argv: Sequence[str], env: Mapping[str, str], limits: RunConfig) -> HostRecord:
        """Starts the trainer, sees it through and tells how it ended."""
        # Noted first, looked around second: whoever takes over from a dead launcher finds every writer.
        self._note_processes()
        self._check_orders()
        if not self._stopping():
            # No thread may exist before the fork.
            self._process = processes.spawn_leashed(argv, env=env)
            if self._stopping():
                self._signal(signal.SIGTERM)
            with contextlib.suppress(StorageError):
                # Best effort: the trainer of a noted agent dies with it.
                self._note_processes()
        period = period_s(self._run.url, self._context.num_processes)
        # Each with a thread: what a large trace delays must not be a heartbeat.
        shippers = [
            Shipper(self._cargo(), period_s=period, say=self._tee.say),
            Shipper([self._stacks], period_s=SHIP_PERIOD_S, say=self._tee.say),
            Shipper([profile_cargo(self._context, self._run)], period_s=period, say=self._tee.say),
        ]
        for shipper in shippers:
            shipper.start()
        try:
            verdict = self._see_through(limits)
        except Exception:
            self._tee.say(f"the agent failed:\n{traceback.format_exc()}")
            verdict = Verdict(exit_code=ExitCode.INFRASTRUCTURE, status=0, reason="the agent itself failed")
        finally:
            self._kill()
        self._finish(verdict, shippers)
        return self._record

    def _see_through(self, limits: RunConfig) -> Verdict:
        process = self._process
        if process is None:
            return Verdict(
                exit_code=ExitCode.PREEMPTED, status=0, reason="stopped before the trainer started"
            )
        assert process.stdout is not None
        pump = threading.Thread(target=processes.drain, args=(process.stdout, self._tee.take), daemon=True)
        pump.start()
        watch = HangWatch(factor=limits.hang_factor, minimum_s=limits.hang_minimum_s, now_s=time.monotonic())
        while (returncode := processes.reap(process)) is None:
            self._tick(watch)
            time.sleep(TICK_S)
        self._kill()
        pump.join(PIPE_S)
        self._stacks.close(self._progress)
        return classify(
            TrainerEnd(
                returncode=returncode,
                stopping=self._stopping(),
                out_of_time=self._out_of_time,
                needless=self._needless,
                hang=self._hang,
                fatal_line=self._tee.fatal_line,
                failure=self._failure(),
                tail=self._tee.tail(),
            )
        )

    def _tick(self, watch: HangWatch) -> None:
        now_s = time.monotonic()
        self._check_orders()
        self._read_progress()
        self._stacks.tick(self._progress)
        if self._hang:
            patience_s = STACKS_S if self._stopping() else self._stacks.hang_patience_s
            if self._hurry or now_s > self._hung_s + patience_s:
                self._kill()
        elif self._stop_s is not None:
            grace_s = self._context.grace_period_s
            if self._hurry or now_s > self._stop_s + grace_s - shipping_reserve_s(grace_s):
                self._out_of_time = True
                self._kill()
            elif now_s > self._stop_s + NOTICE_S and self._nothing_to_save():
                # A compilation cannot be interrupted and may take longer than the grace.
                self._needless = True
                self._kill()
        elif hang := watch.observe(self._progress, now_s):
            self._hang, self._hung_s = hang, now_s
            self._tee.say(f"{hang}; asking for all stacks, then killing the trainer")
            self._stacks.hang()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            self._hurry = True
        if self._stop_s is None:
            self._stop_s = time.monotonic()
            self._signal(signal.SIGTERM)

    def _stopping(self) -> bool:
        return self._stop_s is not None

    def _nothing_to_save(self) -> bool:
        return self._progress is None or self._progress.phase in NOTHING_TO_SAVE

    def _check_orders(self) -> None:
        order = self._orders()
        if order is not None and not (self._hurry if order == signal.SIGQUIT else self._stopping()):
            self._on_signal(order, None)
        if self._parent is not None and self._stop_s is None and os.getppid() != self._parent:
            self._tee.say("the launcher is gone; stopping")
            self._on_signal(signal.SIGTERM, None)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            processes.signal_process(self._process.pid, number)

    def _kill(self) -> None:
        if self._process is not None:
            processes.kill_group(self._process.pid)

    def _note_processes(self) -> None:
        if self._parent is not None:
            trainer = self._process.pid if self._process else None
            write_processes(self._run.storage, self._context.attempt, self._context.host_name, trainer)

    def _read_progress(self) -> None:
        path = self._scratch / PROGRESS_FILE
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_ino)
            if version != self._progress_version:
                self._progress = ledger.decode(path.read_bytes(), Progress, str(path))
                self._progress_version = version
        except FileNotFoundError:
            return
        except (StorageError, OSError) as error:
            self._tee.say(f"progress cannot be read: {error}")

    def _failure(self) -> Failure | None:
        path = self._scratch / FAILURE_FILE
        try:
            return ledger.decode(path.read_bytes(), Failure, str(path))
        except (StorageError, OSError):
            return None

    def _cargo(self) -> Sequence[Cargo]:
        store, context = self._run.storage, self._context
        attempt, host = context.attempt, context.host_name
        record = f"{attempt_path(attempt)}/hosts/{host}.json"
        return [
            LatestCargo(self._heartbeat, store, heartbeat_path(host)),
            LatestCargo(lambda: ledger.encode(self._record), store, record),
            *output_cargo(context, self._run),
        ]

    def _heartbeat(self) -> bytes | None:
        progress = self._progress
        if progress is None:
            return None
        host, attempt = self._context.host_name, self._context.attempt
        return ledger.encode(Heartbeat(host=host, attempt=attempt, progress=progress))

    def _finish(self, verdict: Verdict, shippers: Sequence[Shipper]) -> None:
        self._read_progress()
        failure = self._failure()
        self._record = dataclasses.replace(
            self._record,
            end_s=failure.time_s if failure else time.time(),
            exit_code=int(verdict.exit_code),
            status=verdict.status,
            reason=verdict.reason,
            hint=verdict.hint,
            collateral=verdict.collateral,
            hung=bool(self._hang),
        )
        self._tee.say(
            f"trainer: {verdict.reason}; exit code {verdict.exit_code:d} ({verdict.exit_code.name.lower()})"
        )
        until_s = time.monotonic() + FINAL_SHIPPING_S
        if self._stop_s is not None:
            until_s = max(time.monotonic() + 1.0, self._stop_s + self._context.grace_period_s - 0.5)
        delivered = [shipper.finish(max(0.0, until_s - time.monotonic())) for shipper in shippers]
        if self._parent is not None and all(delivered):
            shutil.rmtree(self._scratch, ignore_errors=True)
            with contextlib.suppress(OSError):
                # The launcher removes it too, unless it is gone.
                self._scratch.parent.rmdir()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launcher.agent", allow_abbrev=False, description=__doc__)
    parser.add_argument("--parent", type=int, help="local launcher: stop when this process is gone")
    options = parser.parse_args(arguments)
    try:
        context = HostContext.from_env(os.environ)
    except ValueError as error:
        return _refuse(str(error))
    if context is None:
        return _refuse("the environment of the contract is missing")
    try:
        record = run_agent(context, parent=options.parent)
        return ExitCode.INFRASTRUCTURE if record.exit_code is None else record.exit_code
    except UserError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{context.host_name}: {error}", file=sys.stderr)
        return ExitCode.INFRASTRUCTURE


def run_agent(
    context: HostContext, *, parent: int | None = None, orders: Orders = lambda: None
) -> HostRecord:
    """Runs the trainer of ``context`` to its end and tells how it ended."""
    processes.adopt_orphans()
    scratch = Path(context.scratch_dir)
    scratch.mkdir(parents=True, exist_ok=True)
    tee = Tee(scratch / LOG_FILE, echo=sys.stdout.buffer)
    run = RunDir(open_storage(context.run_dir))
    agent = Agent(context, run, tee, parent=parent, orders=orders)
    agent.listen()
    recipe = read_recipe(run.storage, run.attempt_recipe_path(context.attempt))
    argv = [sys.executable, "-P", "-m", "trainer", str(_write_recipe(scratch, recipe))]
    env = {**os.environ, **context.to_env(), **libtpu_env(recipe)}
    return agent.run(argv, env, recipe.run)


def _write_recipe(scratch: Path, recipe: Recipe) -> Path:
    path = scratch / RECIPE_FILE
    path.write_text(yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False))
    return path


def _refuse(reason: str) -> int:
    print(f"error: launcher.agent: {reason}\nhint: it is started by `muster launch`", file=sys.stderr)
    return ExitCode.BAD_INPUT


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A storage client may still wait for an answer in its thread; nothing is left to be done.
    os._exit(code)
