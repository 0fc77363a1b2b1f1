"""Starts and talks to the workers of checkpoint_worker.py: real processes, real storage."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.local.gcs_server import running_gcs_server

ANSWER_TIMEOUT_S = 90.0


class Gone(Exception):
    """The worker ended."""


@dataclass(kw_only=True, slots=True)
class Child:
    """One worker process."""

    pid: int
    channel: socket.socket
    log: Path
    buffer: bytes = b""

    def send(self, do: str, **arguments: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.channel.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def read(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The next line; raises Gone when there will be none."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self.channel], [], [], left_s)[0]:
                raise TimeoutError(f"worker {self.pid} is silent\n{self.tail()}")
            try:
                data = self.channel.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise Gone(self.tail())
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The answer to the last command; events before it are passed over."""
        while "event" in (line := self.read(timeout_s)):
            pass
        return line

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The workers of one attempt, by rank."""

    children: Sequence[Child]

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Give all workers a command and take their answers.

        An argument that is a tuple has one value for each rank.
        """
        for rank, child in enumerate(self.children):
            mine = {
                key: value[rank] if isinstance(value, tuple) else value for key, value in arguments.items()
            }
            child.send(do, **mine)
        return [child.answer() for child in self.children]

    def one(self, do: str, **arguments: Any) -> dict[str, Any]:
        """As ask, for one worker."""
        (answer,) = self.ask(do, **arguments)
        return answer

    def kill(self) -> None:
        for child in self.children:
            child.kill()
            child.channel.close()


class Nursery:
    """Gives birth to workers quickly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sockets = tempfile.TemporaryDirectory()  # a socket's path must be short
        self._numbers = itertools.count()
        self._jobs: list[Job] = []
        env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        path = f"{Path(__file__).parents[2]}:{env.get('PYTHONPATH', '')}"
        with (folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("checkpoint_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            )

    def start(
        self,
        count: int = 1,
        *,
        devices: int = 8,
        env: Mapping[str, str] | None = None,
        distributed: bool = True,
        notices: bool = True,
    ) -> Job:
        """``count`` processes with ``devices`` devices together."""
        coordinator = f"127.0.0.1:{_free_port()}"
        flags = f"--xla_force_host_platform_device_count={devices // count}"
        children = []
        for rank in range(count):
            number = next(self._numbers)
            spec = {
                "rank": rank,
                "count": count,
                "coordinator": coordinator,
                "distributed": distributed,
                "notices": notices,
                "socket": f"{self._sockets.name}/{number}",
                "log": str(self._folder / f"{number}.log"),
                "env": {"XLA_FLAGS": flags, **(env or {})},
            }
            children.append(self._deliver(spec))
        for child in children:
            child.pid = child.read()["pid"]
        job = Job(children=children)
        self._jobs.append(job)
        return job

    def _deliver(self, spec: Mapping[str, Any]) -> Child:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(spec["socket"])
            listener.listen()
            listener.settimeout(ANSWER_TIMEOUT_S)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            self._process.stdin.flush()
            channel, _ = listener.accept()
        return Child(pid=0, channel=channel, log=Path(spec["log"]))

    def close(self) -> None:
        for job in self._jobs:
            job.kill()
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._sockets.cleanup()


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Somewhere for runs, and the same on this machine's disk, to look at and to damage."""

    root: str
    folder: Path
    env: Mapping[str, str]

    def run(self, name: str) -> str:
        return f"{self.root}/{name}"

    def step(self, name: str, step: int | str) -> Path:
        return self.folder / name / "checkpoints" / str(step)


@contextlib.contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[Storage]:
    """``local`` or ``gs``."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "local":
        yield Storage(root=str(folder), folder=folder, env={})
        return
    pytest.importorskip("gcsfs", reason="the trainer reaches gs:// through gcsfs")
    with running_gcs_server(folder) as server:
        root = server.make_bucket("bucket")
        yield Storage(root=root, folder=folder / "gcs" / "bucket", env=server.env)


@contextlib.contextmanager
def nursery_in(folder: Path) -> Iterator[Nursery]:
    folder.mkdir(parents=True, exist_ok=True)
    nursery = Nursery(folder)
    try:
        yield nursery
    finally:
        nursery.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
