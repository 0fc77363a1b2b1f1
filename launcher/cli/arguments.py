"""The arguments that verbs share: RECIPE, OVERRIDES and --recipes, with completion that imports no Hydra."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from launcher.cli.interrupts import ended_by_ctrl_c
from launcher.recipe_path import GROUPS, names, search_path
from recipes.errors import UserError
from recipes.load import keys

if typing.TYPE_CHECKING:
    from launcher.compose import Composed

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


recipes_option = click.option(
    "--recipes",
    "search",
    metavar="DIR",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Search DIR for recipes before ./recipes and the shipped ones.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def recipe_arguments(*, required: bool = True) -> Decorator:
    """RECIPE, any number of OVERRIDES and ``--recipes DIR``, as ``recipe``, ``overrides`` and ``search``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in (
            recipes_option,
            click.argument(
                "overrides", nargs=-1, metavar="[KEY=VALUE|GROUP=OPTION]...", shell_complete=complete_override
            ),
            click.argument("recipe", required=required, shell_complete=complete_recipe),
        ):
            function = decorator(function)
        return function

    return decorate


def compose_recipe(recipe: str, overrides: Sequence[str], search: Sequence[Path]) -> Composed:
    """Composes, and tells the user what is worth knowing."""
    from launcher.cli import output

    with ended_by_ctrl_c():
        from launcher.compose import compose  # imports Hydra

        composed = compose(recipe, overrides, search=search)
    for text in composed.notes:
        output.note(text)
    return composed


def complete_recipe(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of recipes."""
    return [name for name in names(_folders(ctx)) if name.startswith(incomplete)]


def complete_override(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """``key=`` and ``group=``, then the values that can be listed."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={option}" for option in _values(ctx, key) if option.startswith(value)]
    words = [word for word in (*GROUPS, *keys()) if word.startswith(incomplete) and word != "name"]
    if len(words) == 1 and (options := _values(ctx, words[0])):
        return [f"{words[0]}={option}" for option in options]
    return [f"{word}=" for word in words]


def _values(ctx: click.Context, key: str) -> Sequence[str]:
    if key in GROUPS:
        return names(_folders(ctx), key)
    if key not in keys():
        return ()
    hint = keys()[key].type
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    values: list[str] = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            values += typing.get_args(part)
        elif part is bool:
            values += ["true", "false"]
        elif part is type(None):
            values.append("null")
    return values


def _folders(ctx: click.Context) -> Sequence[Path]:
    try:
        return search_path(ctx.params.get("search") or ())
    except UserError:
        return search_path()
