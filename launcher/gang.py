"""How the hosts of one attempt meet: process 0 waits for all of them, then tells each its attempt number.

JobSet's restart-attempt label stays the same over suspension, so it cannot number attempts; the run
directory can, but only one host may ask it. That host is process 0, and the others ask it over TCP:
a line of JSON there, a line back. At their end they tell it how they ended. Where the hosts outlive the
attempt, as TPU VMs do, they meet again for the next one: a new Gang behind the same server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher import ledger
from launcher.exits import HostEnd
from launcher.storage_types import StorageError

GATHER_TIMEOUT_S = 1800.0
"""How long hosts that are there wait for the others; as long as Kueue's waitForPodsReady."""
ANSWER_S = 5.0
LINE_BYTES = 16 * 1024
POLL_S = 0.25
HOSTS_PER_POLL_S = 1000
"""So that process 0 answers about this many hosts a second, however many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a host says to process 0."""

    incarnation: str
    """Of its JobSet and restart, or of its VMs; another one is another attempt."""
    host: str
    pod: str
    """Uid of its pod, or of one boot of its VM: a host that was replaced is another one."""
    attempt: int = 0
    """The one that it was in last, and whose end it may tell; 0: none of this incarnation."""
    end: HostEnd | None = None
    """How it ended; None while it wants to know its attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What process 0 says."""

    attempt: int = 0
    """0: not yet."""
    refused: str = ""
    over: str = ""
    """Why there will be no other attempt; empty while there may be."""


class Gang:
    """Who is here for one attempt, and how they ended: the state of process 0, safe in any thread."""

    def __init__(self, incarnation: str, hosts: Sequence[str], *, own: str) -> None:
        self._incarnation, self._expected, self._own = incarnation, frozenset(hosts), own
        self._lock = threading.Lock()
        self._pods: dict[str, str] = {own: ""}
        self._ends: dict[str, HostEnd] = {}
        self._attempt, self._over = 0, ""

    def answer(self, call: Call) -> Answer:
        """What to answer one host; notes that it is here, or how it ended."""
        with self._lock:
            if call.incarnation != self._incarnation:
                return Answer(refused="this is another incarnation of the job")
            if call.host not in self._expected or call.host == self._own:
                return Answer(refused=f"{call.host[:40]} is not one of the other hosts")
            if call.end is not None:
                return self._note(call, call.end)
            if self._over:
                self._pods.pop(call.host, None)
                return Answer(over=self._over)
            if self._attempt and call.attempt >= self._attempt:
                # It is back for the next attempt before process 0 is.
                return Answer()
            if self._attempt and self._pods.get(call.host) != call.pod:
                return Answer(refused=f"attempt {self._attempt} is under way without this pod")
            self._pods[call.host] = call.pod
            return Answer(attempt=self._attempt)

    def _note(self, call: Call, end: HostEnd) -> Answer:
        if call.attempt != self._attempt or self._pods.get(call.host) != call.pod:
            return Answer(refused=f"attempt {call.attempt} is not under way")
        self._ends[call.host] = end
        return Answer(attempt=self._attempt)

    def missing(self) -> Sequence[str]:
        """Hosts that have not called yet."""
        with self._lock:
            return sorted(self._expected - self._pods.keys())

    def open(self, attempt: int) -> None:
        """From here on everybody is told this number, and nobody else may come."""
        with self._lock:
            self._attempt = attempt

    def end(self, why: str) -> None:
        """From here on everybody is told that there will be no other attempt."""
        with self._lock:
            self._over = why

    def untold(self) -> int:
        """How many hosts of the attempt have not been told so yet."""
        with self._lock:
            return len(self._pods.keys() - {self._own})

    def ends(self) -> Mapping[str, HostEnd]:
        """How hosts ended that said so."""
        with self._lock:
            return dict(self._ends)


class GangServer:
    """Answers hosts in a thread of its own, until the process ends; ``gang`` may be replaced meanwhile."""

    def __init__(self, gang: Gang, address: str, port: int) -> None:
        self.gang, self._address, self._port = gang, address, port
        self._listening = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="gang", daemon=True)

    def start(self) -> None:
        """Listens.

        Raises:
          OSError: the address cannot be listened on.
        """
        self._thread.start()
        self._listening.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(
                self._take, self._address, self._port, limit=LINE_BYTES, backlog=1024
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._listening.set()
        async with server:
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), ANSWER_S)
            writer.write(_line(self._reply(line)))
            await asyncio.wait_for(writer.drain(), ANSWER_S)
        except (OSError, TimeoutError, ValueError):
            # A caller that went away, or a line without end; it calls again.
            pass
        finally:
            writer.close()

    def _reply(self, line: bytes) -> Answer:
        try:
            return self.gang.answer(ledger.decode(line, Call, "call"))
        except StorageError as error:
            return Answer(refused=error.message)


def call(address: str, port: int, what: Call, *, timeout_s: float = ANSWER_S) -> Answer:
    """Calls process 0 once.

    Raises:
      OSError: it is not there (yet), does not answer, or what answers is something else.
    """
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        connection.sendall(_line(what))
        with connection.makefile("rb") as file:
            line = file.readline(LINE_BYTES)
    try:
        return ledger.decode(line, Answer, f"{address}:{port}")
    except StorageError as error:
        raise OSError(error.message) from error


class RunOver(Exception):
    """There will be no other attempt; the message says why."""


class NeverMet(Exception):
    """The hosts of an attempt did not all come; the message says who is missing, or why."""


def join(
    ask: Callable[[], Answer],
    num_hosts: int,
    *,
    stopping: Callable[[], bool],
    say: Callable[[str], None],
    after: int = 0,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The attempt's number, as process 0 tells it and later than ``after``; 0 when asked to stop first.

    Raises:
      NeverMet: it did not within GATHER_TIMEOUT_S.
      RunOver: there will be no other attempt.
    """
    deadline_s, told = monotonic() + GATHER_TIMEOUT_S, ""
    while not stopping():
        try:
            answer = ask()
            state = answer.refused or "the other hosts are not all here yet"
            if answer.over:
                raise RunOver(answer.over)
            if answer.attempt > after:
                return answer.attempt
        except OSError as error:
            state = f"process 0 does not answer ({error})"
        if state != told:
            say(f"waiting for the attempt to begin: {state}")
            told = state
        if monotonic() > deadline_s:
            raise NeverMet(f"no attempt began within {GATHER_TIMEOUT_S:.0f} s: {state}")
        sleep(max(POLL_S, num_hosts / HOSTS_PER_POLL_S))
    return 0


def gather(
    gang: Gang,
    num_hosts: int,
    *,
    stopping: Callable[[], bool],
    say: Callable[[str], None],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until every host has called; False when asked to stop first.

    Raises:
      NeverMet: they did not within GATHER_TIMEOUT_S; the message names some of the missing.
    """
    deadline_s, told = monotonic() + GATHER_TIMEOUT_S, -1
    while missing := gang.missing():
        if stopping():
            return False
        listed = ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else "")
        if len(missing) != told:
            say(f"{num_hosts - len(missing)} of {num_hosts} hosts are here; waiting for {listed}")
            told = len(missing)
        if monotonic() > deadline_s:
            raise NeverMet(f"{listed} did not come within {GATHER_TIMEOUT_S:.0f} s")
        sleep(POLL_S)
    return not stopping()


def _line(record: Call | Answer) -> bytes:
    return (json.dumps(dataclasses.asdict(record)) + "\n").encode()
