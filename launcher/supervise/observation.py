"""What the supervisor sees: machines, and how the run is getting on. Plain data, no cloud."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.ledger import AttemptEnd, AttemptStart, StopRequest
from launcher.supervise.records import Order, Provision, Trouble


class Phase(enum.StrEnum):
    """What a set of machines is to the supervisor, whatever words its service has."""

    WAITING = "waiting"
    """Asked for; no machine is there yet."""
    STARTING = "starting"
    """Machines are being made or are booting."""
    UP = "up"
    """All are there and healthy."""
    DEGRADED = "degraded"
    """Some machine restarts, is being repaired or is unhealthy; it may come back by itself."""
    LEAVING = "leaving"
    """Being taken away by the service; it may not be deleted yet."""
    LOST = "lost"
    """Taken away or never to come: of no use, and holding quota until it is deleted."""
    DELETING = "deleting"
    OVER = "over"
    """The job in it has ended for good (JobSet)."""
    UNKNOWN = "unknown"
    """A state that this Muster does not know: nothing is done about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What the service says went wrong."""

    trouble: Trouble
    code: str
    """Its own word, for example RESOURCE_EXHAUSTED."""
    message: str
    """Its own sentence, in one line."""

    @property
    def sentence(self) -> str:
        """For people: what it means, then the service's words."""
        return f"{MEANING[self.trouble]} ({self.code}: {self.message})"


MEANING = {
    Trouble.NO_CAPACITY: "there are no chips of this kind to be had now",
    Trouble.QUOTA: "the project's quota does not allow it",
    Trouble.PERMISSION: "these credentials may not do it",
    Trouble.RESERVATION: "the reservation cannot be used",
    Trouble.BAD_REQUEST: "the service does not take the request",
    Trouble.UNAVAILABLE: "the service did not answer as it should",
    Trouble.PREEMPTED: "the machines were taken away",
    Trouble.FAILED: "the run does not get going on these machines",
    Trouble.REPLACED: "given back",
}


GAVE_UP = "failed:"
"""What the words of a host begin with that does nothing more until it boots again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """One set of machines that is ours: a queued resource with its nodes, or a JobSet."""

    name: str
    place: str
    provision: int
    """As its labels say; 0 when they say nothing."""
    order: str
    """As its labels say; empty when they say nothing."""
    num_slices: int
    capacity: str
    is_probe: bool
    phase: Phase
    state: str
    """The service's own words, for people: ``SUSPENDED; node run-1 PREEMPTED``."""
    created_s: float
    fault: Fault | None = None
    words: str = ""
    """What its hosts say of themselves before they have a run directory (guest attributes); empty: nothing.
    Begins with :data:`GAVE_UP` when a host has given up."""


def is_of(there: Machines, provision: Provision) -> bool:
    """Whether these are the machines of a provision; those without a number are told by their name."""
    same = there.name == provision.name and there.place == provision.place
    return same and there.provision in (0, provision.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything about one run that a decision depends on, at one moment."""

    machines: Sequence[Machines]
    """Ours, of this run, in every place that was looked at."""
    unseen: Sequence[str] = ()
    """Places that did not answer: nothing is known of them, so nothing new may be created."""
    provisions: Sequence[Provision] = ()
    """The whole ledger, oldest first."""
    ends: Sequence[AttemptEnd] = ()
    """Ends of this order's attempts, oldest first."""
    failing_machines: Sequence[str] = ()
    """Machine of the first failing host of each ended attempt of this provision that failed, oldest first."""
    attempt: AttemptStart | None = None
    """The newest of this order, if it has not ended."""
    beat_s: float | None = None
    """When process 0 last gave a sign of life (Unix time)."""
    is_held: bool = False
    """A process 0 holds the run's lease."""
    stop: StopRequest | None = None
    room: int | None = None
    """Slices that would find chips now, ours included; None: only asking for them tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to get machines."""

    place: str
    capacity: str
    num_slices: int
    num_chips: int
    usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be kept running; from the order and its recipe."""

    run: str
    order: Order
    options: Sequence[Option]
    """Best first: every place and capacity with all slices, then the same with one fewer, ..."""
    num_slices: int
    is_elastic: bool
    restarts_itself: bool
    """The place restarts attempts and ends the run by itself (JobSet)."""
    max_restarts: int
    max_attempts_without_progress: int
    grace_period_s: float
    fallback_after_s: float
    grow_after_s: float
    deadline_s: float | None
    max_cost_usd: float | None
