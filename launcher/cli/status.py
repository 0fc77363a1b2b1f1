"""``muster status RUN``: one run, its hosts, and why it failed if it did."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Sequence

import click

from launcher.cli import output, runs
from launcher.gke.observe import JobState
from launcher.gke.of_run import ClusterView, last_launch, view
from launcher.standing import short_place
from launcher.storage import is_remote, open_storage
from launcher.summary import SHOWN_HOSTS, HostRow, RunState, RunSummary, hosts_that_matter, plain, summary
from launcher.text import one_line
from recipes.contract import ExitCode

WATCH_PERIOD_S = 2.0
LIVE = (RunState.RUNNING, RunState.WAITING, RunState.STARTING)
HOST_HEADER = ("HOST", "MACHINE", "PROCESS", "PHASE", "STEP", "SEEN", "EXIT", "REASON")


@click.command()
@runs.run_argument
@runs.root_option
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout; with --watch one document a line.")
@click.option("--watch", is_flag=True, help="Again every 2 seconds, until nothing of the run goes on.")
@click.option("--all-hosts", is_flag=True, help=f"Every host; otherwise at most {SHOWN_HOSTS}.")
def command(run: str, root: str, as_json: bool, watch: bool, all_hosts: bool) -> None:
    """Show what RUN (a name, a path or a gs:// address) is doing."""
    found = runs.find_run(run, root)
    while True:
        # A run that was never launched onto a cluster is in no bucket.
        launched = last_launch(found) if is_remote(found.url) else None
        now = time.time()
        overseer = runs.overseer(open_storage(found.url.rpartition("/")[0]), now)
        seen = summary(found, now, all_hosts=all_hosts, stand_in=launched, overseer=overseer)
        is_on_cluster = launched is not None and launched.target.kind == "gke"
        cluster = view(found, seen.name, launched.target) if launched and is_on_cluster else None
        _show(seen, cluster, as_json=as_json, watch=watch, all_hosts=all_hosts)
        sys.stdout.flush()
        if not watch or not _is_live(seen, cluster):
            return
        time.sleep(WATCH_PERIOD_S)


def _is_live(seen: RunSummary, cluster: ClusterView | None) -> bool:
    if cluster is None or seen.state is RunState.COMPLETE:
        return seen.state in LIVE
    return cluster.seen is None or not cluster.seen.state.is_over


def _state(seen: RunSummary, cluster: ClusterView | None) -> str:
    """The cluster's word where the run directory cannot know; empty where it does."""
    if cluster is None or cluster.seen is None or seen.state is RunState.COMPLETE:
        return ""
    is_there = cluster.seen.state not in (JobState.ABSENT, JobState.COMPLETED)
    return cluster.seen.state.value if is_there else ""


def _show(
    seen: RunSummary, cluster: ClusterView | None, *, as_json: bool, watch: bool, all_hosts: bool
) -> None:
    if as_json:
        document = {**plain(seen), "cluster": cluster and _plain(cluster)}
        output.data_json(document, indent=None if watch else 2)
        return
    if watch and sys.stdout.isatty():
        click.clear()
    output.data_as_it_is(runs.heading(seen, _state(seen, cluster)))
    if sys.stdout.isatty() or not watch:
        output.data(_details(seen, cluster, all_hosts=all_hosts))


def _plain(cluster: ClusterView) -> dict[str, object]:
    """One flat object: where, and what was seen or why nothing was."""
    seen = dataclasses.asdict(cluster.seen) if cluster.seen else {}
    return {
        "context": cluster.context or None,
        "namespace": cluster.namespace,
        "problem": cluster.problem or None,
        **seen,
    }


def _cluster_lines(cluster: ClusterView) -> list[str]:
    where = f"{cluster.context or 'the current one'}, namespace {cluster.namespace}"
    if cluster.seen is None:
        return [f"  cluster     {where}", f"  unknown     {cluster.problem}"]
    seen = cluster.seen
    lines = [f"  cluster     {where}", f"  jobset      {seen.state.value}"]
    if seen.state is JobState.ABSENT:
        return lines
    if seen.why:
        lines.append(f"  because     {seen.why}")
    uncounted = max(0, seen.restarts - seen.counted_restarts)
    return [
        *lines,
        f"  hosts up    {seen.ready} of {seen.total}",
        f"  restarts    {seen.restarts} ({seen.counted_restarts} counted, {uncounted} preemptions)",
    ]


def _machine_lines(seen: RunSummary, now: float) -> list[str]:
    """Where its machines are, why there are none, and who gets them."""
    there, lines = seen.machines, list[str]()
    if there.place is not None and there.asked_s is not None:
        slices = f"{there.num_slices} slice{'' if there.num_slices == 1 else 's'}"
        if there.up_since_s is not None:
            since = f"up for {runs.duration(now - there.up_since_s)}"
        elif there.gone_s is not None:
            since = f"gone for {runs.duration(now - there.gone_s)}"
        else:
            since = f"asked for {runs.duration(now - there.asked_s)} ago"
        which = f"provision {there.provision} of {there.num_provisions}"
        where = f"{short_place(there.place)} {there.capacity}, {slices}"
        lines.append(f"  machines    {one_line(where)}: {since} ({which})")
    if there.why_not and seen.state is not RunState.COMPLETE:
        lines.append(f"  because     {one_line(there.why_not)}")
    if seen.supervisor:
        lines.append(f"  supervised  by {one_line(seen.supervisor)}")
    elif seen.is_abandoned:
        again = f"run `muster supervise {shlex.quote(seen.url)}`"
        lines.append(f"  supervised  by nobody: it will not come back after a preemption; {again}")
    return lines


def _cost_lines(seen: RunSummary) -> list[str]:
    cost = seen.cost
    if cost.usd_per_hour is None and cost.spent_usd is None:
        return []
    parts = []
    if cost.usd_per_hour is not None:
        parts.append(f"USD {runs.dollars(cost.usd_per_hour)} an hour now")
    if cost.spent_usd is not None:
        parts.append(f"{runs.dollars(cost.spent_usd)} spent")
    if cost.to_finish_usd is not None and cost.to_finish_hours is not None and cost.to_finish_hours > 0:
        parts.append(f"{runs.dollars(cost.to_finish_usd)} to finish ({cost.to_finish_hours:.3g} h)")
    source = f"; {cost.price_source}" if cost.price_source else ""
    return [f"  cost        {', '.join(parts)}{source}"]


def _details(seen: RunSummary, cluster: ClusterView | None, *, all_hosts: bool) -> str:
    """What follows the heading."""
    committed = "none yet" if seen.committed_step < 0 else f"step {seen.committed_step}"
    lines = [
        f"  directory   {seen.url}",
        f"  checkpoint  {committed}",
        f"  attempts    {seen.attempts}",
    ]
    lines += _cluster_lines(cluster) if cluster else []
    lines += _machine_lines(seen, time.time()) + _cost_lines(seen)
    if seen.holder:
        lines.append(f"  held by     {seen.holder}")
    if losses := runs.learned(seen):
        lines.append(f"  learned     {losses}")
    if speed := _speed(seen):
        lines.append(f"  speed       {speed}")
    if seen.logs:
        lines.append(f"  logs        {seen.logs}")
    if seen.failure:
        host = f"{seen.failure.host}: " if seen.failure.host else ""
        lines.append(f"  failure     {host}{seen.failure.message}")
        lines += [f"  hint        {seen.failure.hint}"] if seen.failure.hint else []
    lines += [f"  unreadable  {problem}" for problem in seen.damaged]
    return "\n".join([*lines, *(["", *_host_lines(seen, all_hosts)] if seen.hosts else [])])


def _speed(seen: RunSummary) -> str:
    parts = [
        ("{} s a step", seen.step_time_s, ".4g"),
        ("{} tokens/s", seen.tokens_per_s, ",.0f"),
    ]
    return ", ".join(
        text.format(runs.number(value, form)) for text, value, form in parts if value is not None
    )


def _host_lines(seen: RunSummary, all_hosts: bool) -> list[str]:
    rows = seen.hosts if all_hosts else _rows_that_matter(seen)
    total = max(seen.num_hosts, len(seen.hosts))
    more = [f"{len(rows)} of {total:,} hosts; --all-hosts shows all"] if len(rows) < total else []
    return [_host_table(rows), *more]


def _rows_that_matter(seen: RunSummary) -> Sequence[HostRow]:
    """Those that failed, process 0, and those that have been silent for longest, in their order."""
    if len(seen.hosts) <= SHOWN_HOSTS:
        return seen.hosts
    fine = (None, ExitCode.COMPLETE, ExitCode.PREEMPTED)
    failed = {host.host: -math.inf for host in seen.hosts if host.exit_code not in fine}
    times = {host.host: -(host.age_s or 0.0) for host in seen.hosts} | failed
    chosen = hosts_that_matter(times, None)
    return [host for host in seen.hosts if host.host in chosen]


def _host_table(hosts: Sequence[HostRow]) -> str:
    rows = [
        (
            host.host,
            host.hostname,
            "-" if host.pid is None else str(host.pid),
            host.phase.value if host.phase else "-",
            "-" if host.step is None else str(host.step),
            runs.duration(host.age_s),
            "-" if host.exit_code is None else str(host.exit_code),
            one_line(host.reason),
        )
        for host in hosts
    ]
    return output.table(rows, header=HOST_HEADER)
