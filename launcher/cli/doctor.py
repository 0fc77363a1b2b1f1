"""``muster doctor RECIPE``: whether the recipe can run on its cluster, before anything is launched."""

from __future__ import annotations

import dataclasses
import time
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from recipes.contract import ExitCode
from recipes.errors import UserError

if typing.TYPE_CHECKING:
    from launcher.gke.doctor_checks import Result

LEVELS = ("failed", "warning", "unknown", "ok")
"""In the order in which they are counted."""


@click.command()
@recipe_arguments()
@json_option
def command(recipe: str, overrides: Sequence[str], search: Sequence[Path], as_json: bool) -> None:
    """Check RECIPE against its cluster, changing nothing.

    One line a check, with a fix where one failed. Exit code 0 when nothing failed, 2 otherwise, 75 when
    the cluster does not answer.
    """
    from launcher.gke.client import connect
    from launcher.gke.doctor import examine
    from launcher.plan import make_plan

    resolved = compose_recipe(recipe, overrides, search).recipe
    target = resolved.target
    if target.kind != "gke":
        raise UserError(
            f"target.kind={target.kind}: doctor compares a recipe with a GKE cluster",
            hint=f"`muster doctor {recipe} target=gke target.cluster=CLUSTER` names one",
        )
    cluster = connect(target.cluster, target.namespace)
    results = examine(cluster, resolved, make_plan(resolved), now=time.time)
    counts = Counter(str(result.level) for result in results)
    if as_json:
        output.data_json(
            {
                "recipe": resolved.name,
                "cluster": cluster.context,
                "namespace": cluster.namespace,
                "failed": counts["failed"],
                "checks": [dataclasses.asdict(result) for result in results],
            }
        )
    else:
        output.data(output.table(list(_rows(results))))
        output.say(", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level]))
    click.get_current_context().exit(ExitCode.BAD_INPUT if counts["failed"] else ExitCode.COMPLETE)


def _rows(results: Sequence[Result]) -> Iterator[output.Row]:
    for result in results:
        yield (str(result.level), result.check, result.message)
        if result.fix:
            yield (" ", " ", f"fix: {result.fix}")
