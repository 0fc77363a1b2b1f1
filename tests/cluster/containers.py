"""One container of the process kubelet: a process whose end is the end of all that it started.

SIGTERM goes to the first process only, as to PID 1. Difference to a real one: an unhandled SIGTERM ends it
(143), where PID 1 of a container ignores it until SIGKILL (137).
"""

from __future__ import annotations

import datetime
import subprocess
import threading
import uuid

from tests.cluster.api import Json
from tests.cluster.children import Children
from tests.cluster.kubelet_env import Sandbox

MESSAGE_BYTES, TAIL_BYTES = 4096, 2048
"""Limits of a termination message, from its file and from the end of the log."""
PUMP_S = 10.0


def now() -> str:
    """Kubernetes' MicroTime in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Container:
    """Made when its environment is known; `start` runs it."""

    def __init__(self, spec: Json, sandbox: Sandbox, children: Children) -> None:
        self._spec, self._children = spec, children
        self.env = sandbox.env(spec)
        self._argv = sandbox.argv(spec, self.env)
        self._cwd = sandbox.working_folder(spec)
        self._termination = sandbox.termination_file(spec)
        for path in sandbox.mounts(spec).values():
            folder = path.parent if path == self._termination else path
            folder.mkdir(parents=True, exist_ok=True)
        self._termination.touch()
        self.log = sandbox.folder / f"{spec['name']}.log"
        """One line of output a line, each with its time before it."""
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._pump = threading.Thread(target=self._copy_output, daemon=True)
        self._started = self._ended = ""

    def start(self) -> None:
        self._started = now()
        self._process = self._children.spawn(
            self._argv, env=self.env, output=subprocess.PIPE, cwd=self._cwd, mark=self._mark
        )
        self._pump.start()

    def poll(self) -> bool:
        """Whether it has ended; once it has, nothing of it is left and its log is whole."""
        if self._process is None or self._process.poll() is None:
            return False
        if not self._ended:
            self._children.kill(self._mark)
            self._pump.join(PUMP_S)
            self._ended = now()
        return True

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None and not self._ended:
            self._process.kill()
            self._children.kill(self._mark)

    @property
    def pids(self) -> list[int]:
        """Of all its processes."""
        return self._children.pids(self._mark)

    @property
    def exit_code(self) -> int | None:
        code = self._process.returncode if self._process is not None and self._ended else None
        return None if code is None else 128 - code if code < 0 else code

    def status(self) -> Json:
        code = self.exit_code
        if self._process is None:
            state: Json = {"waiting": {"reason": "PodInitializing"}}
        elif code is None:
            state = {"running": {"startedAt": self._started}}
        else:
            times = {"startedAt": self._started, "finishedAt": self._ended}
            reason = "Error" if code else "Completed"
            state = {"terminated": {"exitCode": code, "reason": reason, "message": self._message(), **times}}
        return container_status(self._spec, state)

    def _message(self) -> str:
        text = self._termination.read_bytes()[:MESSAGE_BYTES]
        fallback = self._spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not text and fallback and self.exit_code:
            lines = [line.partition(b" ")[2] for line in self.log.read_bytes().splitlines(keepends=True)]
            text = b"".join(lines)[-TAIL_BYTES:]
        return text.decode(errors="replace")

    def _copy_output(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as output, self.log.open("ab", buffering=0) as log:
            for line in output:
                log.write(f"{now()} ".encode() + line.removesuffix(b"\n") + b"\n")


def container_status(spec: Json, state: Json) -> Json:
    running = "running" in state
    return {
        "name": spec["name"],
        "image": spec.get("image", "none"),
        "imageID": "",
        "ready": running,
        "started": running,
        "restartCount": 0,
        "state": state,
    }
