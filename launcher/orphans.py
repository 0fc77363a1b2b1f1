"""What a killed launcher left running on this machine: found by its records, ended before the next attempt.

Two attempts must never write one run directory at once. Each agent notes itself and its trainer, with
start times, under ``attempts/NNNN/processes/`` before the trainer can write anything.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher import ledger
from launcher.processes import ProcessId, is_running, kill_group, process_id, signal_process, wait_until_gone
from launcher.rundir import RunDir
from launcher.storage import Storage
from recipes.contract import attempt_path


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProcesses:
    """``attempts/NNNN/processes/<host>.json``: an agent and its trainer."""

    agent: ProcessId
    trainer: ProcessId | None


def write_processes(storage: Storage, attempt: int, host: str, trainer_pid: int | None) -> None:
    """Notes the calling agent and its trainer."""
    agent = process_id(os.getpid())
    assert agent is not None
    trainer = process_id(trainer_pid) if trainer_pid is not None else None
    record = HostProcesses(agent=agent, trainer=trainer)
    storage.replace(f"{_folder(attempt)}/{host}.json", ledger.encode(record))


def end_orphans(run: RunDir, *, grace_period_s: float, say: Callable[[str], None]) -> None:
    """Ends every agent and trainer of earlier attempts that still runs on this machine."""
    attempts = run.attempts()
    # An attempt that its launcher saw to the end left nothing; the newest are looked at all the same.
    suspects = [
        attempt for attempt in attempts if attempt in attempts[-2:] or run.attempt_end(attempt) is None
    ]
    found = [each for number in suspects for each in host_processes(run.storage, number).values()]
    running = [process for record in found for process in _processes(record) if is_running(process)]
    if not running:
        return
    numbers = ", ".join(str(process.pid) for process in running)
    say(f"an earlier launch left processes running ({numbers}); ending them, at most {grace_period_s:.0f} s")
    for record in found:
        if is_running(record.agent):
            signal_process(record.agent.pid, signal.SIGTERM)
    left = wait_until_gone(running, grace_period_s)
    for process in left:
        if is_running(process):
            kill_group(process.pid)
            signal_process(process.pid, signal.SIGKILL)
    wait_until_gone(left, grace_period_s)


def host_processes(storage: Storage, attempt: int) -> Mapping[str, HostProcesses]:
    """What the agents of an attempt noted, by host."""
    names = [name for name in storage.children(_folder(attempt)) if name.endswith(".json")]
    return {
        name.removesuffix(".json"): ledger.read_record(storage, f"{_folder(attempt)}/{name}", HostProcesses)
        for name in names
    }


def _processes(record: HostProcesses) -> Sequence[ProcessId]:
    return [record.agent, *([record.trainer] if record.trainer else [])]


def _folder(attempt: int) -> str:
    return f"{attempt_path(attempt)}/processes"
