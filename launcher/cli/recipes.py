"""``muster recipes``: what can be launched, and what the groups offer. Reads no more than first lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from launcher.cli import output
from launcher.cli.arguments import json_option, recipes_option
from launcher.recipe_path import GROUPS, Entry, entries, search_path


@click.command("recipes")
@click.option("--group", type=click.Choice(GROUPS), help="List the options of this group instead.")
@recipes_option
@json_option
def command(group: str | None, search: Sequence[Path], as_json: bool) -> None:
    """List the recipes, or the options of a group, with what each is for."""
    found = entries(search_path(search), group)
    if as_json:
        output.data_json([_to_json(entry) for entry in found])
        return
    output.data(output.table([(entry.name, _describe(entry)) for entry in found]))


def _describe(entry: Entry) -> str:
    """What it is for; and its file when it is not a shipped one."""
    own = "" if entry.label.startswith("recipes/") else f" [{entry.label}]"
    hidden = f" (hides {', '.join(entry.shadows)})" if entry.shadows else ""
    return f"{entry.comment}{own}{hidden}".strip()


def _to_json(entry: Entry) -> dict[str, object]:
    return {"name": entry.name, "path": entry.label, "comment": entry.comment, "hides": list(entry.shadows)}
