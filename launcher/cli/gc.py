"""``muster gc``: lists what is provably ours and of no use, and after confirmation deletes it."""

from __future__ import annotations

import os
import re
import sys
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import click
from click.core import ParameterSource

from launcher.cli import output, runs
from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.jobsets import cluster_options, list_runs, open_cluster, plain, table
from launcher.storage import Storage, StorageError, is_remote, open_storage
from recipes.contract import ExitCode
from recipes.errors import UserError

if typing.TYPE_CHECKING:
    from launcher.gke.client import Cluster
    from launcher.gke.gc import Garbage
    from launcher.gke.objects import Object

HEADER = ("RUN", "STATE", "AGE", "RUN DIRECTORY", "WHY")
TPU_AGE_S = 600.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE = re.compile(r"([0-9]{1,6})([smhd])")


def _seconds(_ctx: click.Context, _parameter: click.Parameter, text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no age; write for example 7d, 12h, 30m or 90s")
    return int(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What the command line asks for."""

    root: Storage | None
    older_than_s: float
    now: float
    everywhere: bool


@click.command()
@cluster_options
@click.option(
    "--root",
    default=lambda: os.environ.get(runs.ROOT_VARIABLE),
    show_default=f"${runs.ROOT_VARIABLE}",
    help="Folder of all runs, to look at run directories; without it only the cluster is looked at.",
)
@click.option(
    "--older-than",
    callback=_seconds,
    default="7d",
    metavar="AGE",
    show_default=True,
    help="Only what is of no use for so long; TPU VMs, which cost by the hour: made 10m ago unless given.",
)
@click.option("--project", metavar="P", help="TPU VMs of this project instead of a cluster; needs --root.")
@click.option(
    "--zone", "zones", multiple=True, metavar="ZONE", help="With --project; otherwise those of the runs."
)
@click.option("--bundles", is_flag=True, help="Also code in ROOT/.bundles that no run names, after 30 days.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.option("--dry-run", is_flag=True, help="List only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    cluster: str | None,
    namespace: str | None,
    everywhere: bool,
    root: str | None,
    older_than: float,
    project: str | None,
    zones: Sequence[str],
    bundles: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Clear away JobSets, or TPU VMs, that are Muster's and that nothing stands behind any more.

    Lists them and asks; without a terminal it refuses unless --yes is given. Run directories and
    checkpoints are never touched.
    """
    if zones and project is None:
        raise click.UsageError("--zone needs --project")
    if bundles and root is None:
        raise click.UsageError(f"--bundles needs --root, or {runs.ROOT_VARIABLE}")
    if project is None:
        on_cluster = _OnCluster(cluster=cluster, namespace=namespace, everywhere=everywhere, bundles=bundles)
        exit_code = _clear_cluster(on_cluster, root, older_than, yes=yes, dry_run=dry_run, as_json=as_json)
    else:
        if cluster or namespace or everywhere or bundles:
            raise click.UsageError(
                "--project is for TPU VMs, without --cluster, --namespace, -A or --bundles"
            )
        exit_code = _clear_project(
            project, zones, root, older_than, yes=yes, dry_run=dry_run, as_json=as_json
        )
    click.get_current_context().exit(exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OnCluster:
    cluster: str | None
    namespace: str | None
    everywhere: bool
    bundles: bool


def _clear_cluster(
    where: _OnCluster, root: str | None, older_than: float, *, yes: bool, dry_run: bool, as_json: bool
) -> int:
    from launcher.gke.gc import find_garbage, unused_bundles

    everywhere = where.everywhere
    api = open_cluster(where.cluster, where.namespace, everywhere=everywhere)
    asked = _Asked(root=_open(root), older_than_s=older_than, now=time.time(), everywhere=everywhere)
    ours = list_runs(api, everywhere=everywhere)
    garbage = find_garbage(ours, asked.root, now=asked.now, older_than_s=older_than)
    code = (
        unused_bundles(asked.root, _waiting(api, ours), now=asked.now) if where.bundles and asked.root else ()
    )
    if not as_json:
        _show(api, garbage, code, asked)
    gone: set[str] = set()
    exit_code: int = ExitCode.COMPLETE
    if (garbage or code) and not dry_run:
        _confirm(len(garbage) + len(code), assume_yes=yes)
        gone, exit_code = _delete(api, garbage, code, asked)
    if as_json:
        output.data_json(_to_json(api, garbage, code, gone, asked))
    return exit_code


def _clear_project(
    project: str,
    zones: Sequence[str],
    root: str | None,
    older_than: float,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    from launcher.cli.gc_tpu import Asked, clear

    storage = _open(root)
    if storage is None:
        raise UserError(
            "without run directories nothing proves that TPU VMs are of no use",
            hint=f"give the folder of all runs with --root or {runs.ROOT_VARIABLE}",
        )
    source = click.get_current_context().get_parameter_source("older_than")
    is_given = source is not ParameterSource.DEFAULT
    asked = Asked(
        root=storage,
        project=project,
        zones=zones,
        older_than_s=older_than if is_given else TPU_AGE_S,
        dry_run=dry_run,
        as_json=as_json,
    )
    return clear(asked, lambda number: _confirm(number, assume_yes=yes))


def _open(root: str | None) -> Storage | None:
    """The root, if it can be looked at; otherwise says that run directories are not."""
    if root is None:
        output.say(f"run directories are not looked at: no --root, no {runs.ROOT_VARIABLE}")
        return None
    storage = open_storage(root)
    if not is_remote(root) and not os.path.isdir(storage.url):
        raise UserError(f"there is no folder {storage.url}", hint="give the folder of all runs with --root")
    try:
        storage.modified("")
    except StorageError as error:
        output.note(f"run directories are not looked at: {error.message}")
        return None
    return storage


def _waiting(cluster: Cluster, ours: Sequence[Object]) -> Sequence[Object]:
    """JobSets whose code must stay, of every namespace that may be read."""
    from launcher.gke.api_errors import Denied
    from launcher.gke.owned import list_ours

    try:
        return list_ours(cluster, everywhere=True)
    except Denied as error:
        output.note(f"{error.message}: code of runs that wait there may be listed; launching sends it again")
        return ours


def _show(cluster: Cluster, garbage: Sequence[Garbage], code: Sequence[str], asked: _Asked) -> None:
    from launcher.gke.owned import describe

    if garbage:
        found = [describe(each.jobset) for each in garbage]
        rows = [
            (
                each.name,
                each.state.value,
                runs.duration(asked.now - (each.ended_s if each.ended_s is not None else each.created_s)),
                each.run_dir,
                why.why,
            )
            for each, why in zip(found, garbage, strict=True)
        ]
        output.data(table(rows, found, everywhere=asked.everywhere, header=HEADER))
    for path in code:
        output.data(f"{asked.root.url if asked.root else ''}/{path}")
    if not garbage and not code:
        output.say(f"nothing to clear away in cluster {cluster.context}")


def _confirm(number: int, *, assume_yes: bool) -> None:
    """Raises UserError when the answer is no, or there is no terminal to ask on."""
    if assume_yes:
        return
    noun = "this" if number == 1 else f"these {number}"
    if not sys.stdin.isatty():
        raise UserError(
            f"there is no terminal to ask on whether to delete {noun}; nothing was changed",
            hint="give --yes to delete, or --dry-run to list only",
        )
    if not click.confirm(f"Delete {noun}?", err=True):
        raise UserError("nothing was deleted", exit_code=INTERRUPTED)


def _delete(
    cluster: Cluster, garbage: Sequence[Garbage], code: Sequence[str], asked: _Asked
) -> tuple[set[str], int]:
    """Uids and paths of what is gone, and the exit code; one that stays does not keep the others."""
    from launcher.gke.gc import remove, remove_bundle, unused_bundles
    from launcher.gke.objects import name, text, uid
    from launcher.gke.owned import list_ours

    gone, exit_code = set[str](), int(ExitCode.COMPLETE)
    for each in garbage:
        where = cluster.inside(text(each.jobset, "metadata", "namespace"))
        try:
            if remove(where, each, _still(asked), say=output.say, sleep=time.sleep, monotonic=time.monotonic):
                gone.add(uid(each.jobset))
                output.say(f"{name(each.jobset)}: gone")
            else:
                output.say(f"{name(each.jobset)}: stays, it changed meanwhile")
        except UserError as error:
            output.user_error(error)
            exit_code = error.exit_code
    if code and asked.root:
        # A run may have begun since.
        ours = list_ours(cluster, everywhere=asked.everywhere)
        for path in sorted({*unused_bundles(asked.root, _waiting(cluster, ours), now=asked.now)} & {*code}):
            if remove_bundle(asked.root, path):
                gone.add(path)
                output.say(f"{path}: gone")
    return gone, exit_code


def _still(asked: _Asked) -> typing.Callable[[Object], bool]:
    from launcher.gke.gc import find_garbage

    return lambda found: bool(
        find_garbage([found], asked.root, now=asked.now, older_than_s=asked.older_than_s)
    )


def _to_json(
    cluster: Cluster, garbage: Sequence[Garbage], code: Sequence[str], gone: set[str], asked: _Asked
) -> dict[str, object]:
    from launcher.gke.objects import uid
    from launcher.gke.owned import describe

    return {
        "cluster": cluster.context,
        "namespace": None if asked.everywhere else cluster.namespace,
        "jobsets": [
            {**plain(describe(each.jobset), asked.now), "why": each.why, "deleted": uid(each.jobset) in gone}
            for each in garbage
        ],
        "bundles": [{"path": path, "deleted": path in gone} for path in code],
    }
