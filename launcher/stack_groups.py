"""Stacks of many hosts as few groups: hosts that do the same, and those that do something else.

Pure. Two hosts do the same when their main threads have the same frames and their other threads the same
kinds of stacks: how many idle workers a pool has says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.ledger import HostStacks
from launcher.rundir import host_order
from launcher.text import one_line

type Frames = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """One or more threads with the same frames."""

    is_main: bool
    count: int
    frames: Sequence[str]
    """The innermost first."""


@dataclass(kw_only=True, slots=True)
class StackGroup:
    """Hosts that do the same."""

    threads: Sequence[Thread]
    """Of its first host; the main thread first."""
    problem: str
    """Why there are no threads."""
    hosts: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Last step that each had reported."""
    phases: set[str] = field(default_factory=set)


class StackGroups:
    """Takes the stacks of one host after another; keeps one copy of those that are the same."""

    def __init__(self) -> None:
        self._groups: dict[object, StackGroup] = {}
        self.hosts: set[str] = set()

    def add(self, stacks: HostStacks) -> None:
        """Takes the stacks of one more host."""
        threads = _threads(stacks.threads)
        others = frozenset(tuple(thread.frames) for thread in threads[1:])
        key = (stacks.problem, tuple(threads[0].frames) if threads else (), others)
        group = self._groups.setdefault(key, StackGroup(threads=threads, problem=one_line(stacks.problem)))
        group.hosts.append(stacks.host)
        group.steps.append(stacks.step)
        group.phases.add(one_line(stacks.phase) or "starting")
        self.hosts.add(stacks.host)

    def sorted(self) -> Sequence[StackGroup]:
        """Without stacks, then the rarest: who waits for others is one of many, who is waited for is not."""
        groups = list(self._groups.values())
        for group in groups:
            group.hosts.sort(key=host_order)
        return sorted(
            groups, key=lambda group: (not group.problem, len(group.hosts), host_order(group.hosts[0]))
        )


def _threads(stacks: Sequence[Sequence[str]]) -> Sequence[Thread]:
    if not stacks:
        return ()
    *others, main = [tuple(map(one_line, frames)) for frames in stacks]
    counts: Counter[Frames] = Counter(others)
    return [
        Thread(is_main=True, count=1, frames=main),
        *(Thread(is_main=False, count=count, frames=frames) for frames, count in counts.most_common()),
    ]
