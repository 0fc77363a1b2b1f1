"""TPU VMs of the stand-in: each worker is a loopback address, a metadata server on it, and its startup script
as a local process group.

Only on Linux is all of 127.0.0.0/8 there. A worker's processes are found by an environment variable, so that
what a script left behind dies with its VM.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

MARK = "STAND_IN_TPU_VM"
_NETWORKS = itertools.count()
_LOCKS: list[socket.socket] = []


def network() -> int:
    """The second byte of the addresses of one stand-in, which no other on this machine uses meanwhile."""
    start = os.getpid() + next(_NETWORKS)
    for offset in range(200):
        number = 16 + (start + offset) % 200
        lock = socket.socket()
        try:
            lock.bind((f"127.{number}.0.1", 1025))
        except OSError:
            lock.close()
            continue
        _LOCKS.append(lock)
        return number
    raise RuntimeError("no network of loopback addresses is free")


class Worker:
    """One VM."""

    def __init__(self, *, ip: str, folder: Path, index: int, node: str, environ: Mapping[str, str]) -> None:
        self.ip, self.folder, self.index, self.node = ip, folder, index, node
        self._environ = dict(environ)
        self.attributes: dict[str, str] = {}
        self.guest: dict[tuple[str, str], str] = {}
        self.preempted, self.maintenance = False, "NONE"
        self.changed = threading.Condition()
        self.process: subprocess.Popen[bytes] | None = None
        self.boots = 0
        self._shutting_down: list[subprocess.Popen[bytes]] = []
        handler = type("Handler", (_Metadata,), {"worker": self})
        self._server = http.server.ThreadingHTTPServer((ip, 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """What a startup script finds; a real VM asks metadata.google.internal instead of these addresses."""
        metadata = f"{self.ip}:{self._server.server_port}"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            MARK: f"{self.node}/{self.index}/{self.ip}",
            **self._environ,
        }

    def boot(self) -> None:
        """Runs the startup script; what earlier boots left on the disk is there."""
        script = self.attributes.get("startup-script")
        if script is None:
            return
        self.boots += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "startup-script"
        path.write_text(script)
        path.chmod(0o700)
        with (self.folder / "serial.log").open("ab") as log:
            self.process = subprocess.Popen(
                [path], cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def notice(self) -> None:
        """A preemption: metadata says so, and the system shuts down."""
        with self.changed:
            self.preempted = True
            self.changed.notify_all()
        script = self.attributes.get("shutdown-script")
        if script is not None and self.process is not None:
            path = self.folder / "shutdown-script"
            path.write_text(script)
            path.chmod(0o700)
            with (self.folder / "serial.log").open("ab") as log:
                script_run = subprocess.Popen(
                    [path], cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
                )
            self._shutting_down.append(script_run)

    def halt(self) -> None:
        """Power off: everything that carries the VM's mark is killed."""
        if self.process is None:
            return
        for _ in range(3):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for each in (self.process, *self._shutting_down):
            each.wait()
        self.process, self._shutting_down = None, []

    def processes(self) -> Iterator[psutil.Process]:
        """What runs on this VM."""
        wanted = self.env[MARK]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == wanted:
                    yield process

    def serial(self) -> str:
        """What its scripts wrote."""
        path = self.folder / "serial.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        self.halt()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Metadata(http.server.BaseHTTPRequestHandler):
    """The part of the metadata server that is used."""

    worker: Worker

    def do_GET(self) -> None:
        self._respond(None)

    def do_PUT(self) -> None:
        self._respond(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())

    def _respond(self, written: str | None) -> None:
        path, _, query = self.path.partition("?")
        parts = path.removeprefix("/computeMetadata/v1/").strip("/").split("/")
        if self.headers.get("Metadata-Flavor") != "Google":
            return self._answer(403, "Missing Metadata-Flavor:Google header.")
        if "wait_for_change=true" in query:
            self._wait(query)
        if written is not None and parts[:2] == ["instance", "guest-attributes"] and len(parts) == 4:
            self.worker.guest[parts[2], parts[3]] = written
            return self._answer(200, "")
        found = self._found(parts)
        return self._answer(404, "") if found is None else self._answer(200, found)

    def _wait(self, query: str) -> None:
        words = dict(part.partition("=")[::2] for part in query.split("&"))
        timeout_s = float(words.get("timeout_sec", 60))
        with self.worker.changed:
            if not self.worker.preempted:
                self.worker.changed.wait(timeout_s)

    def _found(self, parts: list[str]) -> str | None:
        worker = self.worker
        match parts:
            case ["instance", "guest-attributes", namespace, key]:
                return worker.guest.get((namespace, key))
            case ["instance", "attributes", key]:
                return worker.attributes.get(key)
            case ["instance", "preempted"]:
                return str(worker.preempted).upper()
            case ["instance", "maintenance-event"]:
                return worker.maintenance
            case ["instance", "name"] | ["instance", "hostname"]:
                return f"{worker.node}-w-{worker.index}"
            case ["instance", "id"]:
                return str(abs(hash(worker.ip)))
            case ["instance", "network-interfaces", "0", "ip"]:
                return worker.ip
            case ["instance", "service-accounts", "default", "token"]:
                return '{"access_token": "stand-in", "expires_in": 3600, "token_type": "Bearer"}'
        return None

    def _answer(self, status: int, text: str) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def wait_gone(workers: list[Worker], timeout_s: float = 10.0) -> None:
    """Until nothing of these VMs runs any more."""
    deadline_s = time.monotonic() + timeout_s
    while any(True for worker in workers for _ in worker.processes()):
        assert time.monotonic() < deadline_s, "processes of a VM outlived it"
        time.sleep(0.05)


def kill(worker: Worker, number: signal.Signals) -> None:
    """A signal to every process of a VM."""
    for process in worker.processes():
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
