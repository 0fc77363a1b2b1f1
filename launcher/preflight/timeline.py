"""When a device does what in one step: the schedule walked under the rates of a generation.

The TensorCore goes through the program in order. A start puts its work on another lane, after what is
there already; a wait holds the TensorCore until that is done, which is the exposed part. Rounds of a loop
are alike, so one is walked and counts as often as there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.preflight.program import Lane, Op
from launcher.preflight.rates import Rates, dcn_s, exchange_s, kernel_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that a lane does, or that the TensorCore waits for."""

    op: Op
    lane: Lane
    category: str
    axes: str
    start_s: float
    """After the start of the round of the loop, or of the step, that it is in."""
    duration_s: float
    is_wait: bool = False
    inside: Sequence[Event] = ()
    """One round of a loop, of ``op.rounds`` alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step of one device."""

    duration_s: float
    events: Sequence[Event]


def timeline(program: Sequence[Op], rates: Rates, *, attended_share: float) -> Timeline:
    """Walks a program.

    Args:
      attended_share: of the score matrices of attention kernels, what a mask leaves to compute.
    """
    walk = _Walk(rates, attended_share)
    events = tuple(walk.events(program))
    return Timeline(duration_s=walk.now_s, events=events)


class _Walk:
    """One computation: its time so far, and until when each lane is busy."""

    def __init__(self, rates: Rates, attended_share: float) -> None:
        self._rates, self._attended_share = rates, attended_share
        self.now_s = 0.0
        self._busy_until_s: dict[tuple[Lane, str], float] = {}
        self._started: dict[str, tuple[Op, float]] = {}

    def events(self, program: Sequence[Op]) -> Iterator[Event]:
        for op in program:
            if op.body:
                yield self._loop(op)
            elif op.category == "wait":
                yield from self._wait(op)
            elif op.is_start:
                yield self._start(op)
            else:
                yield self._run(op)

    def _loop(self, op: Op) -> Event:
        inner = _Walk(self._rates, self._attended_share)
        inside = tuple(inner.events(op.body))
        return self._on_core(op, inner.now_s * op.rounds, inside=inside)

    def _run(self, op: Op) -> Event:
        if op.lane == "core":
            return self._on_core(op, self._seconds(op))
        # Nothing else runs: until the lane is free, and then for as long as it takes.
        start_s, duration_s = self._occupy(op)
        waited_s = start_s + duration_s - self.now_s
        return self._on_core(op, waited_s, is_wait=True)

    def _start(self, op: Op) -> Event:
        start_s, duration_s = self._occupy(op)
        self._started[op.name] = (op, start_s + duration_s)
        return Event(
            op=op, lane=op.lane, category=op.category, axes=op.axes, start_s=start_s, duration_s=duration_s
        )

    def _wait(self, op: Op) -> Iterator[Event]:
        started, end_s = self._started.pop(op.awaits, (op, self.now_s))
        if started.lane in ("ici", "dcn"):
            # What went on beside it was slowed down by the memory and the issue slots that it took.
            end_s = max(end_s, self.now_s + self._rates.beside_share * self._seconds(started))
        if end_s > self.now_s:
            yield self._on_core(started, end_s - self.now_s, is_wait=True)

    def _occupy(self, op: Op) -> tuple[float, float]:
        # Axes of the mesh lie along different sides of the torus, so each has links of its own.
        # Permutations go round both ways at once.
        lane = (op.lane, op.name if op.category == "collective-permute" else op.axes)
        start_s = max(self.now_s, self._busy_until_s.get(lane, 0.0))
        duration_s = self._seconds(op)
        self._busy_until_s[lane] = start_s + duration_s
        return start_s, duration_s

    def _on_core(
        self, op: Op, duration_s: float, *, is_wait: bool = False, inside: Sequence[Event] = ()
    ) -> Event:
        event = Event(
            op=op,
            lane="core",
            category=op.category,
            axes=op.axes,
            start_s=self.now_s,
            duration_s=duration_s,
            is_wait=is_wait,
            inside=inside,
        )
        self.now_s += duration_s
        return event

    def _seconds(self, op: Op) -> float:
        rates = self._rates
        match op.lane:
            case "ici":
                assert op.link is not None
                return exchange_s(rates, op.category, op.size_bytes, op.group_size, op.link)
            case "dcn":
                return dcn_s(rates, op.category, op.size_bytes, op.group_size)
            case "host":
                return op.size_bytes / rates.host_bytes_per_s
            case "hbm":
                return op.size_bytes / rates.hbm_bytes_per_s
            case "core":
                return self._core_s(op)

    def _core_s(self, op: Op) -> float:
        rates = self._rates
        if op.kernel is not None:
            return kernel_s(rates, op.kernel, self._attended_share)
        if op.cycles:
            return op.cycles * rates.cycle_s
        return max(op.flops / rates.matmul_flops_per_s, op.size_bytes / rates.hbm_bytes_per_s)


def core_events(line: Timeline) -> Iterator[tuple[Event, float]]:
    """What the TensorCore spends the step on, with seconds in all rounds; loops opened."""
    yield from _opened(line.events, 1)


def _opened(events: Sequence[Event], rounds: int) -> Iterator[tuple[Event, float]]:
    for event in events:
        if event.inside:
            yield from _opened(event.inside, rounds * event.op.rounds)
        elif event.lane == "core":
            yield event, event.duration_s * rounds
