"""``muster ls``: the runs of a folder or bucket, or the JobSets of a cluster, one a line."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import click
from click.core import ParameterSource

from launcher.cli import output, runs
from launcher.cli.jobsets import cluster_options, show_runs
from launcher.rundir import RunDir
from launcher.storage import Storage, Unavailable, is_remote, open_storage
from launcher.summary import RunSummary, plain, summary
from recipes.contract import is_run_name
from recipes.errors import UserError

THREADS = 16
"""Runs read at once; each takes several requests to a bucket."""

HEADER = ("RUN", "STATE", "STEP", "SAVED", "LOSS", "ATTEMPTS", "SEEN")
COST_HEADER = ("USD/H", "SPENT", "TO GO")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A run that could not be read."""

    name: str
    url: str
    problem: str


@click.command()
@runs.root_option
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def command(
    ctx: click.Context, root: str, cluster: str | None, namespace: str | None, everywhere: bool, as_json: bool
) -> None:
    """List the runs under a root; with --cluster, --namespace or -A, the runs in a cluster."""
    if cluster is not None or namespace is not None or everywhere:
        if ctx.get_parameter_source("root") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--root is for the runs of a folder, without --cluster, --namespace or -A")
        show_runs(cluster, namespace, everywhere=everywhere, now=time.time(), as_json=as_json)
        return
    storage = open_storage(root)
    _check_folder(root, storage)
    now = time.time()
    found = read_runs(storage, now)
    if as_json:
        output.data_json({"root": storage.url, "runs": [_plain(entry) for entry in found]})
    elif found:
        output.data(_table(found, now))
    else:
        output.say(f"no runs in {storage.url}")
    for entry in found:
        if isinstance(entry, Damaged) and not as_json:
            output.say(f"{entry.name}: {entry.problem}")


def _check_folder(root: str, storage: Storage) -> None:
    """A bucket has no folders, and where nothing was launched yet there is no default one."""
    if is_remote(root) or os.path.isdir(storage.url):
        return
    there = os.path.lexists(storage.url)
    if root == runs.DEFAULT_ROOT and not there:
        return
    raise UserError(
        f"there is no folder {storage.url}" + (": that is a file" if there else ""),
        hint=f"give the folder of all runs with --root or {runs.ROOT_VARIABLE}",
    )


def read_runs(storage: Storage, now: float) -> Sequence[RunSummary | Damaged]:
    """Every run below ``storage``, by name; other folders are passed over."""
    names = [name for name in storage.children() if is_run_name(name)]
    overseer = runs.overseer(storage, now)
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: _read(RunDir(storage.child(name)), name, now, overseer), names)
        return [entry for entry in entries if entry is not None]


def _read(run: RunDir, name: str, now: float, overseer: str | None) -> RunSummary | Damaged | None:
    try:
        return summary(run, now, overseer=overseer) if run.exists() else None
    except Unavailable:
        raise
    except UserError as error:
        return Damaged(name=name, url=run.url, problem=error.message)


def _plain(entry: RunSummary | Damaged) -> dict[str, object]:
    if isinstance(entry, Damaged):
        return {"name": entry.name, "url": entry.url, "state": "damaged", "problem": entry.problem}
    return plain(entry)


def _table(found: Sequence[RunSummary | Damaged], now: float) -> str:
    """With what it costs where that is known of any run."""
    costs = [_costs(entry) for entry in found]
    if all(each is None for each in costs):
        return output.table([_row(entry, now) for entry in found], header=HEADER)
    rows = [(*_row(entry, now), *(each or ("-", "-", "-"))) for entry, each in zip(found, costs, strict=True)]
    return output.table(rows, header=(*HEADER, *COST_HEADER))


def _costs(entry: RunSummary | Damaged) -> tuple[str, str, str] | None:
    if isinstance(entry, Damaged) or (entry.cost.usd_per_hour is None and entry.cost.spent_usd is None):
        return None
    cost = entry.cost
    return runs.dollars(cost.usd_per_hour), runs.dollars(cost.spent_usd), runs.dollars(cost.to_finish_usd)


def _row(entry: RunSummary | Damaged, now: float) -> output.Row:
    if isinstance(entry, Damaged):
        return (entry.name, "damaged", "-", "-", "-", "-", "-")
    seen_s = None if entry.updated_s is None else now - entry.updated_s
    return (
        entry.name,
        entry.state.value,
        f"{entry.step}/{entry.num_steps}",
        "-" if entry.committed_step < 0 else str(entry.committed_step),
        runs.number(entry.loss),
        str(entry.attempts),
        runs.duration(seen_s),
    )
