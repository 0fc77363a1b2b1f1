"""Stacks of many hosts as few groups: hosts that do the same, and those that do something else.

Pure. Two hosts do the same when their main threads have the same frames. Of the other threads it is kept
which hosts have such a one; how many, as of the idle workers of a pool, says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.ledger import HostStacks
from launcher.rundir import host_order
from launcher.text import one_line

type Frames = tuple[str, ...]
"""The innermost first."""


@dataclass(kw_only=True, slots=True)
class StackGroup:
    """Hosts whose main threads do the same."""

    frames: Frames
    problem: str
    """Why there are no frames; else empty."""
    hosts: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Last step that each had reported."""
    phases: set[str] = field(default_factory=set)
    others: dict[Frames, list[str]] = field(default_factory=dict)
    """Hosts that have such another thread."""

    def sorted_others(self) -> Mapping[Frames, Sequence[str]]:
        """Other threads, those of the fewest hosts first."""
        return dict(sorted(self.others.items(), key=lambda item: len(item[1])))


class StackGroups:
    """Takes the stacks of one host after another; keeps one copy of those that are the same."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Frames, str], StackGroup] = {}
        self.hosts: set[str] = set()

    def add(self, stacks: HostStacks) -> None:
        """Takes the stacks of one more host."""
        threads = [tuple(map(one_line, frames)) for frames in stacks.threads]
        main, problem = threads[-1] if threads else (), one_line(stacks.problem)
        group = self._groups.setdefault((main, problem), StackGroup(frames=main, problem=problem))
        group.hosts.append(stacks.host)
        group.steps.append(stacks.step)
        group.phases.add(one_line(stacks.phase) or "starting")
        for frames in dict.fromkeys(threads[:-1]):
            group.others.setdefault(frames, []).append(stacks.host)
        self.hosts.add(stacks.host)

    def sorted(self) -> Sequence[StackGroup]:
        """Those without stacks, then the rarest: who waits is one of many, who is waited for is not.

        Of equally many, those that got least far.
        """
        groups = list(self._groups.values())
        for group in groups:
            for hosts in (group.hosts, *group.others.values()):
                hosts.sort(key=host_order)
        return sorted(
            groups,
            key=lambda group: (
                not group.problem,
                len(group.hosts),
                min(group.steps),
                host_order(group.hosts[0]),
            ),
        )
