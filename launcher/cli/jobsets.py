"""What the verbs that look at a cluster's JobSets share: how to say which cluster, and rows."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Sequence
from typing import Any

import click

from launcher.cli import output, runs
from recipes import kubernetes_names

if typing.TYPE_CHECKING:
    from launcher.gke.client import Cluster
    from launcher.gke.objects import Object
    from launcher.gke.owned import Owned

DEFAULT_NAMESPACE = "default"
HEADER = ("RUN", "STATE", "RESTARTS", "SLICES", "CHIPS", "AGE", "QUEUE", "RUN DIRECTORY")


def _namespace(_ctx: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
    if given is not None and not kubernetes_names.is_dns_label(given):
        rule = "lower-case letters, digits and hyphens, at most 63, no hyphen at an end"
        raise click.BadParameter(f"{given!r} is not a namespace; use {rule}")
    return given


def _cluster(_ctx: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
    if given is not None and not kubernetes_names.is_cluster(given):
        raise click.BadParameter(f"{given!r} is not a cluster; give a context of the kubeconfig, or its name")
    return given


def cluster_options[F: Callable[..., Any]](function: F) -> F:
    """The same for every verb; ``cluster`` is None where the current context is meant."""
    for option in (
        click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="JobSets of all namespaces."),
        click.option(
            "--namespace",
            "-n",
            metavar="NAMESPACE",
            callback=_namespace,
            help=f"Of the JobSets; {DEFAULT_NAMESPACE} unless given.",
        ),
        click.option(
            "--cluster",
            metavar="CLUSTER",
            callback=_cluster,
            help="As target.cluster: the current context unless given.",
        ),
    ):
        function = option(function)
    return function


def open_cluster(cluster: str | None, namespace: str | None, *, everywhere: bool) -> Cluster:
    """Connects.

    Raises:
      UsageError: one namespace and all are asked for.
    """
    from launcher.gke.client import connect

    if namespace is not None and everywhere:
        raise click.UsageError("--namespace and --all-namespaces exclude each other")
    return connect(cluster, namespace or DEFAULT_NAMESPACE)


def list_runs(cluster: Cluster, *, everywhere: bool) -> Sequence[Object]:
    """The JobSets that are Muster's, by namespace and name.

    Raises:
      Missing: there is no such namespace, as far as the user may see.
    """
    from launcher.gke.api_errors import Denied, no_namespace
    from launcher.gke.objects import NAMESPACES
    from launcher.gke.owned import list_ours

    found = list_ours(cluster, everywhere=everywhere)
    if not found and not everywhere:
        # An empty list is all that the API has to say of a namespace that does not exist.
        with contextlib.suppress(Denied):
            if cluster.get(NAMESPACES, cluster.namespace) is None:
                raise no_namespace(cluster.context, cluster.namespace)
    return found


def show_runs(
    cluster: str | None, namespace: str | None, *, everywhere: bool, now: float, as_json: bool
) -> None:
    """``muster ls`` of a cluster."""
    from launcher.gke.owned import describe

    api = open_cluster(cluster, namespace, everywhere=everywhere)
    found = [describe(each) for each in list_runs(api, everywhere=everywhere)]
    where = "all namespaces" if everywhere else f"namespace {api.namespace}"
    if as_json:
        output.data_json(
            {
                "cluster": api.context,
                "namespace": None if everywhere else api.namespace,
                "runs": [plain(each, now) for each in found],
            }
        )
    elif found:
        output.data(table([row(each, now) for each in found], found, everywhere=everywhere, header=HEADER))
    else:
        output.say(f"no runs in {where} of cluster {api.context}")


def row(found: Owned, now: float) -> output.Row:
    return (
        found.name,
        found.state.value,
        str(found.restarts),
        str(found.slices),
        str(found.chips),
        runs.duration(now - found.created_s),
        found.queue,
        found.run_dir,
    )


def table(rows: Sequence[output.Row], found: Sequence[Owned], *, everywhere: bool, header: output.Row) -> str:
    """With a column of namespaces where there may be several."""
    if everywhere:
        rows = [(each.namespace, *cells) for each, cells in zip(found, rows, strict=True)]
        header = ("NAMESPACE", *header)
    return output.table(rows, header=header)


def plain(found: Owned, now: float) -> dict[str, object]:
    return {
        "name": found.name,
        "namespace": found.namespace,
        "state": found.state.value,
        "restarts": found.restarts,
        "slices": found.slices,
        "chips": found.chips,
        "age_s": round(now - found.created_s),
        "ended_s": found.ended_s,
        "queue": found.queue or None,
        "run_dir": found.run_dir,
    }
