"""Words of the stand-in: refusals, clocks, delays, weather, and what the documentation leaves open."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5litepod": 1, "v6e": 1}
"""What the number in an accelerator type counts: cores (two a chip) or chips."""


class Refused(Exception):
    """An answer other than OK: of an RPC, or of a finished operation."""

    def __init__(self, code: StatusCode, text: str, *, reason: str = "", **metadata: str) -> None:
        self.status = status_pb2.Status(code=code.value[0], message=text)
        if reason:
            info = error_details_pb2.ErrorInfo(reason=reason, domain="tpu.googleapis.com", metadata=metadata)
            self.status.details.add().Pack(info)
        super().__init__(text)


class ManualClock:
    """Time that stands still until it is moved."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long each step takes; a Spot VM really has 30 s, the others are invented."""

    accept_s: float = 1
    queue_s: float = 5
    provision_s: float = 60
    notice_s: float = 30
    suspend_s: float = 20
    delete_s: float = 10


QUICK = Timing(accept_s=0.1, queue_s=0.1, provision_s=0.3, notice_s=30, suspend_s=0.5, delete_s=0.3)
"""For real time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """What the real service does here is not known: a launcher must get on with all of it."""

    lists_nodes_after_suspension: bool = True
    stays_active: bool = False
    """The queued resource of a preempted node stays ACTIVE."""
    refuses_second_delete: bool = True


@dataclass(kw_only=True, slots=True)
class Fault:
    """The next calls of an RPC fail."""

    rpc: str
    refused: Refused
    times: int
    is_committed: bool
    """The work is done all the same, and only the answer is lost."""


@dataclass(kw_only=True, slots=True)
class ZoneState:
    """What a zone has, in slices."""

    quota: int = 1000
    stock: int = 1000


@dataclass(kw_only=True, slots=True)
class Weather:
    """A share of all calls fails, half of them after the work was done."""

    random: random.Random
    rate: float


def hosts_of(accelerator_type: str) -> int:
    """VMs of one slice; ``cpu-HOSTSxDEVICES`` is a rehearsal's."""
    if accelerator_type.startswith("cpu-"):
        return int(accelerator_type.removeprefix("cpu-").partition("x")[0])
    generation, _, number = accelerator_type.rpartition("-")
    chips = int(number) // CORES_PER_CHIP[generation]
    return 1 if chips <= 4 or (chips == 8 and CORES_PER_CHIP[generation] == 1) else chips // 4


def find(kind: Mapping[str, Any], name: str) -> Any:
    """What is there under a full name."""
    if name not in kind:
        raise Refused(StatusCode.NOT_FOUND, f"Resource '{name}' was not found.", reason="RESOURCE_NOT_FOUND")
    return kind[name]


def page(kind: Mapping[str, Any], request: Any, field: str, reply: Any) -> Any:
    """One page of what is in a zone."""
    found = [item for name, item in sorted(kind.items()) if name.startswith(f"{request.parent}/")]
    start, size = int(request.page_token or 0), min(request.page_size or 100, 1000)
    getattr(reply, field).extend(found[start : start + size])
    reply.next_page_token = str(start + size) if start + size < len(found) else ""
    return reply
