"""``muster status RUN``: one run, its hosts, and why it failed if it did."""

from __future__ import annotations

import dataclasses
import sys
import time

import click

from launcher.cli import output, runs
from launcher.summary import RunState, RunSummary, summary
from launcher.text import one_line

WATCH_PERIOD_S = 2.0
HOST_HEADER = ("HOST", "MACHINE", "PROCESS", "PHASE", "STEP", "SEEN", "EXIT", "REASON")


@click.command()
@runs.run_argument
@runs.root_option
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout; with --watch one document a line.")
@click.option("--watch", is_flag=True, help="Again every 2 seconds, until the run is no longer running.")
def command(run: str, root: str, as_json: bool, watch: bool) -> None:
    """Show what RUN (a name, a path or a gs:// address) is doing."""
    found = runs.find_run(run, root)
    while True:
        seen = summary(found, time.time())
        _show(seen, as_json=as_json, watch=watch)
        sys.stdout.flush()
        if not watch or seen.state is not RunState.RUNNING:
            return
        time.sleep(WATCH_PERIOD_S)


def _show(seen: RunSummary, *, as_json: bool, watch: bool) -> None:
    if as_json:
        output.data_json(dataclasses.asdict(seen), indent=None if watch else 2)
        return
    if watch and sys.stdout.isatty():
        click.clear()
    output.data_as_it_is(runs.heading(seen))
    if sys.stdout.isatty() or not watch:
        output.data(_details(seen))


def _details(seen: RunSummary) -> str:
    """What follows the heading."""
    committed = "none yet" if seen.committed_step < 0 else f"step {seen.committed_step}"
    lines = [
        f"  directory   {seen.url}",
        f"  checkpoint  {committed}",
        f"  attempts    {seen.attempts}",
    ]
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
    return "\n".join([*lines, *(["", _host_table(seen)] if seen.hosts else [])])


def _speed(seen: RunSummary) -> str:
    parts = [
        ("{} s a step", seen.step_time_s, ".4g"),
        ("{} tokens/s", seen.tokens_per_s, ",.0f"),
    ]
    return ", ".join(
        text.format(runs.number(value, form)) for text, value, form in parts if value is not None
    )


def _host_table(seen: RunSummary) -> str:
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
        for host in seen.hosts
    ]
    return output.table(rows, header=HOST_HEADER)
