"""What a TPU VM knows of itself from its metadata server, and the notices that come from there.

JAX and libtpu read the same attributes (jax/_src/clusters/cloud_tpu_cluster.py). No environment variable is
relied on: whether a startup script gets any is not documented.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.member import Notice
from launcher.tpu import bootstrap
from launcher.tpu.vm import VmSpec
from recipes.contract import ExitCode
from recipes.errors import UserError

WAIT_S = 60
"""How long the metadata server may hold an answer back until a value changes."""
POLL_S, AWAY_S = 1.0, 5.0
IDENTITY_TRIES = 30
"""One each two seconds; attributes can be late after a boot."""
IDENTITY_WAIT_S = 2.0
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"
LINE = re.compile(r"(\w+)\s*:\s*(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Which host of which slice this VM is."""

    slice_id: int
    host_id: int
    address: str
    leader: str
    """Address of process 0."""
    name: str
    """Of this machine, for people: node and worker."""


class NotThere(Exception):
    """The metadata server lacks something, perhaps for now; the message says what."""


def host_facts(
    spec: VmSpec,
    ask: Callable[[str], str] = bootstrap.ask,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> HostFacts:
    """Who this VM is, asked again for a while: attributes may come late.

    Raises:
      UserError: it does not become clear, or does not fit what was launched.
    """
    for _ in range(IDENTITY_TRIES):
        try:
            return _facts(spec, ask)
        except (NotThere, OSError, http.client.HTTPException) as error:
            why = str(error)
        sleep(IDENTITY_WAIT_S)
    raise UserError(
        f"this VM cannot tell which host it is: {why}",
        hint="it needs the metadata of a TPU VM: agent-worker-number, worker-network-endpoints, tpu-env",
        exit_code=ExitCode.INFRASTRUCTURE,
    )


def _facts(spec: VmSpec, ask: Callable[[str], str]) -> HostFacts:
    tpu = parse_tpu_env(_attribute(ask, "tpu-env"))
    host_id = _number(_attribute(ask, "agent-worker-number") or tpu.get("WORKER_ID"), "agent-worker-number")
    peers = parse_endpoints(_attribute(ask, "worker-network-endpoints") or "")
    if len(peers) != spec.hosts_per_slice or host_id >= spec.hosts_per_slice:
        raise NotThere(
            f"it is worker {host_id} of {len(peers)}; launched were slices of {spec.hosts_per_slice} hosts"
        )
    slice_id, leader = 0, peers[0]
    if spec.num_slices > 1:
        slice_id = _slice_id(tpu, spec.num_slices)
        leader = tpu.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
        if not leader and slice_id == 0:
            leader = peers[0]
        if not leader:
            raise NotThere("tpu-env has no MEGASCALE_COORDINATOR_ADDRESS")
    node = tpu.get("NODE_ID") or f"slice-{slice_id}"
    return HostFacts(
        slice_id=slice_id,
        host_id=host_id,
        address=peers[host_id],
        leader=leader,
        name=f"{node}-w{host_id}",
    )


def _slice_id(tpu: dict[str, str], num_slices: int) -> int:
    # Nodes of several slices are numbered by the prefix that they were asked for with.
    text = tpu.get("MEGASCALE_SLICE_ID") or tpu.get("NODE_ID", "").rpartition("-")[2]
    slice_id = _number(text, "MEGASCALE_SLICE_ID of tpu-env")
    if slice_id >= num_slices:
        raise NotThere(f"it is slice {slice_id}, and {num_slices} were launched")
    return slice_id


def parse_tpu_env(text: str | None) -> dict[str, str]:
    """The lines ``KEY: 'value'`` of the attribute tpu-env."""
    matches = (LINE.fullmatch(line.strip()) for line in (text or "").splitlines())
    return {match[1]: match[2].strip().strip("'\"") for match in matches if match}


def parse_endpoints(text: str) -> Sequence[str]:
    """Addresses of a slice's hosts from ``a:b:10.0.0.2,a:b:10.0.0.3``."""
    parts = (entry.split(":", 2) for entry in text.split(",") if entry)
    return [part[2] for part in parts if len(part) == 3 and part[2]]


def _attribute(ask: Callable[[str], str], name: str) -> str | None:
    try:
        return ask(f"instance/attributes/{name}").strip() or None
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise


def _number(text: str | None, what: str) -> int:
    if text is None or not (text.isascii() and text.isdigit()):
        raise NotThere(f"{what} is {text!r}")
    return int(text)


# Notices


def is_notice(path: str, value: str) -> bool:
    """Whether a value of the metadata server says that this VM will be gone soon."""
    value = value.strip().upper()
    return value == "TRUE" if path == PREEMPTED else value.startswith("TERMINATE")


class Watch:
    """Sets a notice when the metadata server gives one; a thread for each value that may tell."""

    def __init__(self, notice: Notice, say: Callable[[str], None]) -> None:
        self._notice, self._say = notice, say

    def start(self) -> None:
        for path in (PREEMPTED, MAINTENANCE):
            threading.Thread(target=self._watch, args=(path,), name=path, daemon=True).start()

    def _watch(self, path: str) -> None:
        query = ""
        while True:
            began_s = time.monotonic()
            pause_s = POLL_S
            try:
                value = bootstrap.ask(path + query, timeout_s=WAIT_S + 30)
                if is_notice(path, value):
                    self._say(f"notice: {path} is {value.strip()}")
                    self._notice.came = True
                    return
                query = f"?wait_for_change=true&timeout_sec={WAIT_S}"
            except (OSError, http.client.HTTPException):
                # Also where there is no such value; another look costs nothing.
                query, pause_s = "", AWAY_S
            # A server that does not hold its answer back is asked once a second.
            time.sleep(max(0.0, pause_s - (time.monotonic() - began_s)))
