"""``muster stacks RUN``: what every process of a run is doing, hosts that do the same shown once.

The request and the answers go through the run directory, so it works wherever the run is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import click

from launcher import lease
from launcher.cli import output, runs
from launcher.ledger import Damaged, StacksRequest
from launcher.rundir import RunDir, host_order
from launcher.stack_groups import StackGroup, StackGroups
from launcher.stacks import HANG, SHIP_PERIOD_S, STACKS_S, is_request_id, poll_s
from launcher.storage import is_remote
from launcher.storage_types import Names
from launcher.summary import run_name, summary
from launcher.text import one_line
from recipes.contract import ExitCode, attempt_path, host_name
from recipes.errors import UserError
from recipes.load import nearest

LOCAL_LOOK_S, REMOTE_LOOK_S = 0.5, 2.0
PATIENCE_S = 10.0
"""Beyond what agents need when nothing is slow."""
SHOWN_HOSTS = 8
MISSING_READ = 64
"""Of so many hosts that gave no answer it is looked up why."""
_HOST = re.compile(r"s[0-9]{1,6}-h[0-9]{1,6}", re.ASCII)
_PLACE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


@click.command()
@runs.run_argument
@runs.root_option
@click.option("--host", "hosts", multiple=True, help="Only this host, s0-h1 or 0/1 (slice/host); repeatable.")
@click.option("--attempt", type=click.IntRange(min=1), help="Show what was saved when this attempt hung.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.0),
    show_default="as long as agents may need",
    help="How long to wait for hosts.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    run: str, root: str, hosts: Sequence[str], attempt: int | None, timeout_s: float | None, as_json: bool
) -> None:
    """Show the stacks of every process of RUN (a name, a path or a gs:// address).

    The rarest come first: who waits for others does what many do. Exit code 1 when some host gave none.
    """
    found = runs.find_run(run, root)
    if attempt is None:
        answers = Asking(found, hosts, time.sleep, time.time).ask(timeout_s)
    else:
        answers = saved(found, attempt, hosts)
    if as_json:
        output.data_json(_document(answers))
    else:
        output.data(_text(answers))
    is_whole = not answers.missing and not any(group.problem for group in answers.groups)
    click.get_current_context().exit(ExitCode.COMPLETE if is_whole else ExitCode.EXPERIMENT_FAILED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What the hosts of one attempt were doing."""

    run: str
    attempt: int
    groups: Sequence[StackGroup]
    missing: Mapping[str, str]
    """Why, by host."""
    damaged: Sequence[str]


class Asking:
    """One request and its answers."""

    def __init__(
        self,
        run: RunDir,
        hosts: Sequence[str],
        sleep: Callable[[float], None],
        now: Callable[[], float],
    ) -> None:
        self._run, self._sleep, self._now = run, sleep, now
        self._attempt = _attempt_under_way(run, now())
        self._all_hosts = _hosts_of(run, self._attempt)
        self._hosts = choose(hosts, self._all_hosts)
        self._requests = [secrets.token_hex(8)]
        """Ours first."""
        self._groups, self._damaged = StackGroups(), Names()

    def ask(self, timeout_s: float | None) -> Answers:
        """Asks and waits: for all hosts, until the time is up, or until the attempt has ended."""
        run, wanted, began_s = self._run, len(self._hosts), self._now()
        wait_s = wait_for_s(run.url, len(self._all_hosts)) if timeout_s is None else timeout_s
        self._request()
        output.say(f"asked {_count(wanted)} of attempt {self._attempt}; waiting at most {wait_s:.0f} s")
        told = 0
        while True:
            # Looked at first: what is collected after the end is complete.
            is_over = self._now() >= began_s + wait_s or not self._is_under_way()
            self._collect()
            answered = len(self._groups.hosts)
            if is_over or answered == wanted:
                break
            if answered != told:
                told = answered
                output.say(f"{answered:,} of {_count(wanted)}")
            self._sleep(REMOTE_LOOK_S if is_remote(run.url) else LOCAL_LOOK_S)
            self._notice_others()
        return Answers(
            run=run_name(run.url),
            attempt=self._attempt,
            groups=self._groups.sorted(),
            missing=self._missing(),
            damaged=self._damaged,
        )

    def _request(self) -> None:
        is_everybody = len(self._hosts) == len(self._all_hosts)
        request = StacksRequest(
            id=self._requests[0],
            attempt=self._attempt,
            hosts=() if is_everybody else tuple(self._hosts),
            requested_s=self._now(),
            by=runs.asker(),
        )
        self._run.request_stacks(request)

    def _notice_others(self) -> None:
        """Somebody else's request, or that of a hang, takes the place of ours: its answers are as good."""
        with contextlib.suppress(Damaged):
            other = self._run.stacks_request()
            is_ours = other is None or other.attempt != self._attempt or other.id in self._requests
            if other is not None and not is_ours and is_request_id(other.id):
                self._requests.append(other.id)

    def _is_under_way(self) -> bool:
        return is_held(self._run, self._now()) and self._run.attempt_end(self._attempt) is None

    def _collect(self) -> None:
        for request in self._requests:
            _collect(self._run, self._attempt, request, self._hosts, self._groups, self._damaged)

    def _missing(self) -> Mapping[str, str]:
        """Why hosts gave no answer, as far as the run directory tells."""
        missing = [host for host in self._hosts if host not in self._groups.hosts]
        if not missing:
            return {}
        records = self._run.hosts(self._attempt, only=missing[:MISSING_READ])
        ended = {record.host: record.reason for record in records if record.exit_code is not None}
        beats, now = self._run.beat_times(), self._now()

        def why(host: str) -> str:
            if host in ended:
                return f"it ended: {one_line(ended[host])}"
            seen = f"{runs.duration(now - beats[host])} ago" if host in beats else "never"
            return f"no answer; last heartbeat: {seen}"

        return {host: why(host) for host in missing}


def saved(run: RunDir, attempt: int, hosts: Sequence[str]) -> Answers:
    """What was saved when an attempt hung.

    Raises:
      UserError: nothing was, or there was no such attempt.
    """
    attempts = run.attempts()
    if attempt not in attempts:
        hint = f"it has attempts {attempts[0]} to {attempts[-1]}" if attempts else "it has never started"
        raise UserError(f"{run_name(run.url)} has no attempt {attempt}", hint=hint)
    if not run.stacks_hosts(attempt, HANG):
        raise UserError(
            f"attempt {attempt} of {run_name(run.url)} left no stacks: it did not hang",
            hint="`muster stacks` without --attempt asks the processes of a running one",
        )
    chosen = choose(hosts, _hosts_of(run, attempt))
    groups, damaged = StackGroups(), Names()
    _collect(run, attempt, HANG, chosen, groups, damaged)
    missing = {host: "saved none" for host in chosen if host not in groups.hosts}
    return Answers(
        run=run_name(run.url), attempt=attempt, groups=groups.sorted(), missing=missing, damaged=damaged
    )


def is_held(run: RunDir, now: float) -> bool:
    """Whether somebody runs it."""
    return lease.is_held(lease.read(run.storage), now)


def wait_for_s(url: str, num_hosts: int) -> float:
    """How long hosts may take to see a request, to heed it and to bring what came of it."""
    return poll_s(url, num_hosts) + STACKS_S + 2 * SHIP_PERIOD_S + PATIENCE_S


def choose(hosts: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Names of hosts as somebody typed them; all that are known when none is given.

    Raises:
      UserError: there is no such host.
    """
    names = [
        host_name(int(place[1]), int(place[2])) if (place := _PLACE.fullmatch(host)) else host
        for host in hosts
    ]
    for typed, name in zip(hosts, names, strict=True):
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean {guess}?" if guess else f"it has {known[0]} to {known[-1]}"
            raise UserError(f"there is no host {typed}", hint=hint)
    return sorted(set(names), key=host_order) or known


def _attempt_under_way(run: RunDir, now: float) -> int:
    attempts = run.attempts()
    if not is_held(run, now):
        seen = summary(run, now)
        hung = [number for number in attempts[-1:] if run.stacks_hosts(number, HANG)]
        raise UserError(
            f"{seen.name} is not running: it is {seen.state.value}",
            hint=f"`muster stacks {seen.name} --attempt {hung[0]}` shows what it did when it hung"
            if hung
            else "`muster logs` shows what its hosts wrote",
        )
    if not attempts or run.attempt_start(attempts[-1]) is None or run.attempt_end(attempts[-1]) is not None:
        raise UserError(
            f"no attempt of {run_name(run.url)} is under way just now",
            hint="`muster status` shows when its hosts are up; then try again",
            exit_code=ExitCode.INFRASTRUCTURE,
        )
    return attempts[-1]


def _hosts_of(run: RunDir, attempt: int) -> Sequence[str]:
    start = run.attempt_start(attempt)
    named = [host for host in start.hosts if _HOST.fullmatch(host)] if start else []
    if not named:
        raise UserError(
            f"{run.url}/{attempt_path(attempt)} names no hosts",
            hint="whoever launched it died at once; `muster status` shows the newest attempt",
        )
    return sorted(named, key=host_order)


def _collect(
    run: RunDir, attempt: int, request: str, hosts: Sequence[str], groups: StackGroups, damaged: Names
) -> None:
    """Reads what has come since."""
    new = {*hosts} & {*run.stacks_hosts(attempt, request)} - groups.hosts
    problems = Names()
    for stacks in run.stacks(attempt, request, problems, only=new):
        if stacks.host in new:
            groups.add(stacks)
    damaged += [problem for problem in problems if problem not in damaged]


def _document(answers: Answers) -> Mapping[str, object]:
    return {
        "run": answers.run,
        "attempt": answers.attempt,
        "groups": [
            {
                "hosts": group.hosts,
                "phases": sorted(group.phases),
                "steps": group.steps,
                "problem": group.problem or None,
                "main_thread": group.frames,
                "other_threads": [
                    {"hosts": hosts, "frames": frames} for frames, hosts in group.sorted_others().items()
                ],
            }
            for group in answers.groups
        ],
        "missing": answers.missing,
        "damaged": answers.damaged,
    }


def _text(answers: Answers) -> str:
    num_hosts = sum(len(group.hosts) for group in answers.groups)
    kinds = len(answers.groups)
    lines = [
        f"{answers.run}, attempt {answers.attempt}: {_count(num_hosts)}"
        f" in {kinds} group{'' if kinds == 1 else 's'}"
    ]
    for group in answers.groups:
        lines += ["", *_group_lines(group)]
    if answers.missing:
        lines += ["", f"no stacks of {_count(len(answers.missing))}"]
        shown = list(answers.missing.items())[:SHOWN_HOSTS]
        lines += [f"  {host}: {why}" for host, why in shown]
        more = len(answers.missing) - len(shown)
        lines += [f"  and {more:,} more"] if more else []
    lines += [f"unreadable: {problem}" for problem in answers.damaged]
    return "\n".join(lines)


def _group_lines(group: StackGroup) -> Sequence[str]:
    first, last = min(group.steps), max(group.steps)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    hosts = f"{_count(len(group.hosts))} ({', '.join(sorted(group.phases))}, {steps})"
    lines = [f"{hosts}: {_names(group.hosts)}"]
    if group.problem:
        return [*lines, f"  no stacks: {group.problem}"]
    lines += ["  main thread", *(f"    {frame}" for frame in group.frames)]
    for frames, owners in group.sorted_others().items():
        of_whom = "" if len(owners) == len(group.hosts) else f" of {_names(owners)}"
        lines += [f"  other thread{of_whom}", *(f"    {frame}" for frame in frames)]
    return lines


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - SHOWN_HOSTS
    return ", ".join(hosts[:SHOWN_HOSTS]) + (f" and {more:,} more" if more > 0 else "")


def _count(num_hosts: int) -> str:
    return f"{num_hosts:,} host{'' if num_hosts == 1 else 's'}"
