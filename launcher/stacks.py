"""The stacks of one host's trainer: asked for by a request in the run directory, or at a hang.

A request reaches every agent through one small object, looked at far less often than a heartbeat is
written. The agent sends SIGUSR1; the trainer writes its stacks to a file of the scratch directory; what
came is logged and brought to ``attempts/NNNN/stacks/REQUEST/<host>.json``.
"""

from __future__ import annotations

import collections
import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.ledger import Damaged, HostStacks, StacksRequest
from launcher.rundir import RunDir
from launcher.storage import is_remote
from recipes.contract import STACKS_FILE, HostContext, Progress

HANG = "hang"
"""Id of the request that an agent makes of all hosts when nothing moves."""
STACKS_S = 2.0
"""How long a trainer may take to write its stacks."""
QUIET_S = 0.3
"""A file that has not grown for so long is complete: nothing waits while it is written."""
LOCAL_POLL_S = 1.0
REMOTE_POLL_S = 10.0
REMOTE_POLLS_PER_S = 1000
"""Of all hosts of a run together."""
SHIP_PERIOD_S = 1.0
MAX_DUMP_BYTES = 2**20

_ID = re.compile(r"[a-z0-9]{1,32}", re.ASCII)
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")


def poll_s(url: str, num_hosts: int) -> float:
    """Seconds between two looks of one of so many hosts for a request."""
    return max(REMOTE_POLL_S, num_hosts / REMOTE_POLLS_PER_S) if is_remote(url) else LOCAL_POLL_S


def is_request_id(text: str) -> bool:
    """Whether ``text`` may name a request, and so a folder."""
    return _ID.fullmatch(text) is not None


def parse_threads(text: str) -> Sequence[Sequence[str]]:
    """Frames of each thread in what faulthandler wrote, in its order."""
    threads: list[list[str]] = []
    frames: list[str] | None = None
    for line in text.splitlines():
        if _THREAD.fullmatch(line):
            frames = []
            threads.append(frames)
        elif not line.startswith("  "):
            frames = None
        elif frames is not None:
            frames.append(line.strip())
    return threads


class StackDumps:
    """Gets stacks of one trainer and brings them where they are wanted.

    ``hang`` and ``tick`` belong to the thread that may signal the trainer, ``ship`` to that of the shipper.
    """

    def __init__(
        self,
        context: HostContext,
        run: RunDir,
        *,
        signal: Callable[[], None],
        say: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._run = context, run
        self._signal, self._say, self._monotonic = signal, say, monotonic
        self._file = Path(context.scratch_dir) / STACKS_FILE
        self._poll_s = poll_s(run.url, context.num_processes)
        self._next_poll_s = 0.0
        self._newest = ""
        """Of the requests seen, whether it was meant for this host or not."""
        self._hung, self._passed_over = False, ""
        self._wanted: collections.deque[str] = collections.deque()
        self._waiting: list[str] = []
        self._signalled_s = self._grown_s = 0.0
        self._read_bytes = self._size_bytes = 0
        self._done: collections.deque[tuple[str, HostStacks]] = collections.deque()

    @property
    def hang_patience_s(self) -> float:
        """How long a hung trainer lives on: as long as the others may need to see that stacks are wanted.

        Once one is killed the others die of it and have no stacks any more.
        """
        return STACKS_S + (1.5 * self._poll_s if self._context.num_processes > 1 else 0.0)

    # Of the thread that may signal

    def hang(self) -> None:
        """Wants the stacks of all hosts, because nothing moves here."""
        self._hung = True
        self._wanted.append(HANG)

    def tick(self, progress: Progress | None) -> None:
        """Signals, and takes what has come."""
        now_s = self._monotonic()
        while self._wanted:
            self._ask(self._wanted.popleft(), now_s, progress)
        size_bytes = self._written_bytes()
        if size_bytes != self._size_bytes:
            self._size_bytes, self._grown_s = size_bytes, now_s
        elif size_bytes > self._read_bytes and now_s >= self._grown_s + QUIET_S:
            self._take(progress)
        elif self._waiting and now_s > self._signalled_s + STACKS_S:
            self._answer(progress, problem=f"the trainer wrote no stacks within {STACKS_S:g} s")

    def close(self, progress: Progress | None) -> None:
        """The trainer has ended: takes what it wrote, and answers whoever still waits."""
        self._size_bytes = self._written_bytes()
        if self._size_bytes > self._read_bytes:
            self._take(progress)
        self._waiting += self._wanted
        self._answer(progress, problem="the trainer ended before it wrote its stacks")

    def _ask(self, request: str, now_s: float, progress: Progress | None) -> None:
        is_asked = bool(self._waiting)
        self._waiting.append(request)
        if not self._file.exists():
            # Before it listens the signal would kill it.
            self._answer(progress, problem="the trainer has only just begun: it cannot be asked yet")
        elif not is_asked:
            self._signalled_s = now_s
            self._signal()

    def _written_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return self._file.stat().st_size
        return 0

    def _take(self, progress: Progress | None) -> None:
        data, start_bytes, self._read_bytes = b"", self._read_bytes, self._size_bytes
        with contextlib.suppress(OSError), self._file.open("rb") as file:
            file.seek(start_bytes)
            data = file.read(MAX_DUMP_BYTES)
        text = data.decode(errors="replace").strip("\n")
        self._say(f"stacks of the trainer:\n{text}")
        threads = parse_threads(text)
        self._answer(progress, threads=threads, problem="" if threads else "what it wrote holds no stacks")

    def _answer(
        self, progress: Progress | None, *, threads: Sequence[Sequence[str]] = (), problem: str = ""
    ) -> None:
        stacks = HostStacks(
            host=self._context.host_name,
            time_s=time.time(),
            phase=progress.phase.value if progress else "",
            step=progress.step if progress else 0,
            threads=threads,
            problem=problem,
        )
        self._done.extend((request, stacks) for request in self._waiting)
        self._waiting.clear()

    # Of the shipper's thread

    def ship(self, *, final: bool) -> None:
        """See :class:`launcher.shipping.Cargo`."""
        if not final and self._monotonic() >= self._next_poll_s:
            self._next_poll_s = self._monotonic() + self._poll_s
            self._look()
        if self._hung and self._newest != HANG and not final:
            self._call_everybody()
        while self._done:
            request, stacks = self._done[0]
            self._run.write_stacks(self._context.attempt, request, stacks)
            self._done.popleft()

    def _look(self) -> None:
        """Sees a new request. One that is not understood is no reason to stop shipping."""
        context = self._context
        try:
            request = self._run.stacks_request()
        except Damaged as error:
            if error.message != self._passed_over:
                self._say(f"passed over: {error.message}")
            self._passed_over = error.message
            return
        if request is None or request.attempt != context.attempt or request.id == self._newest:
            return
        self._newest = request.id
        if is_request_id(request.id) and (not request.hosts or context.host_name in request.hosts):
            self._wanted.append(request.id)

    def _call_everybody(self) -> None:
        context = self._context
        request = StacksRequest(
            id=HANG, attempt=context.attempt, hosts=(), requested_s=time.time(), by=context.host_name
        )
        self._run.request_stacks(request)
        self._newest = HANG
