"""``muster show``: every value of a recipe with where it comes from, one key explained, or all keys.

What it prints for a recipe is a recipe again, without groups.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from launcher.text import one_line
from recipes.errors import UserError
from recipes.load import MISSING, Key, flatten, keys, nearest, recipe_to_dict

if typing.TYPE_CHECKING:
    from launcher.compose import Composed

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./:@-]*[A-Za-z0-9_/]|[A-Za-z]|[0-9]+(x[0-9]+)+")
_WORDS = ("null", "true", "false", "yes", "no", "on", "off")


@click.command("show")
@recipe_arguments(required=False)
@click.option(
    "--key", metavar="KEY", help="Explain this one key.", shell_complete=lambda *a: _complete_key(a[2])
)
@click.option("--keys", "all_keys", is_flag=True, help="List every key of a recipe with its meaning.")
@json_option
def command(
    recipe: str | None,
    overrides: Sequence[str],
    search: Sequence[Path],
    key: str | None,
    all_keys: bool,
    as_json: bool,
) -> None:
    """Show a recipe's values and where each comes from."""
    if all_keys:
        if recipe or key:
            raise click.UsageError("--keys takes no recipe and no --key", click.get_current_context())
        _show_keys(as_json)
        return
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'", click.get_current_context())
    if key is not None and key not in keys():
        guess = nearest(key, keys())
        raise UserError(
            f"no key {key!r}",
            hint=f"did you mean {guess}?" if guess else "`muster show --keys` lists every key",
        )
    composed = compose_recipe(recipe, overrides, search)
    if key is not None:
        _show_key(composed, keys()[key], as_json)
    else:
        _show_recipe(composed, as_json)


def _show_recipe(composed: Composed, as_json: bool) -> None:
    values = recipe_to_dict(composed.recipe)
    if as_json:
        output.data_json({"recipe": values, "origins": dict(composed.origins)})
        return
    output.data(f"# {composed.recipe.name} ({composed.origins['name'].rsplit(':', 1)[0]})")
    for line in _yaml_lines(values, composed.origins):
        output.data(line)


def _yaml_lines(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    written: dict[str, str] = {}
    for path, value in flatten(values).items():
        _, _, leaf = path.partition(".")
        if isinstance(value, Mapping) and value:
            written[path] = f"  {leaf}:"
            written |= {
                f"{path}.{name}": f"    {yaml_scalar(name)}: {yaml_scalar(text)}"
                for name, text in value.items()
            }
        elif leaf:
            written[path] = f"  {leaf}: {yaml_scalar(value)}"
    width = max(len(line) for line in written.values() if len(line) <= 50)
    section = ""
    for path, line in written.items():
        if path.split(".", 1)[0] != section:
            section = path.split(".", 1)[0]
            yield f"{section}:"
        # A mapping's entries each say where they come from.
        yield line if line.endswith(":") else f"{line.ljust(width)}  # {one_line(origins[path])}"


def yaml_scalar(value: object) -> str:
    """A leaf as YAML that both YAML 1.1 and 1.2 read back as the same value."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and ": " not in value
        return value if plain else _quoted(value)
    if isinstance(value, Mapping):
        entries = ", ".join(f"{yaml_scalar(name)}: {yaml_scalar(text)}" for name, text in value.items())
        return f"{{{entries}}}"
    text = json.dumps(value)
    # YAML 1.1 takes a number with an exponent but without a point for a text.
    return (
        text.replace("e", ".0e", 1) if isinstance(value, float) and "e" in text and "." not in text else text
    )


def _quoted(text: str) -> str:
    """A double-quoted YAML scalar; what a terminal cannot show is escaped by YAML's rules, not by JSON's."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    if char in "\n\t":
        return {"\n": "\\n", "\t": "\\t"}[char]
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\U{ord(char):08x}"


def _show_key(composed: Composed, key: Key, as_json: bool) -> None:
    value = flatten(recipe_to_dict(composed.recipe))[key.path]
    origin = composed.origins[key.path]
    if as_json:
        output.data_json({**_key_to_json(key), "value": value, "origin": origin})
        return
    rows = [("value", yaml_scalar(value)), ("from", origin), *_key_rows(key)]
    output.data(key.path)
    output.data(output.table(rows, indent=2))


def _show_keys(as_json: bool) -> None:
    if as_json:
        output.data_json([_key_to_json(key) for key in keys().values()])
        return
    for key in keys().values():
        output.data(key.path)
        output.data(output.table(_key_rows(key), indent=2))


def _key_rows(key: Key) -> list[tuple[str, str]]:
    default = "must be given" if key.default == MISSING else yaml_scalar(key.default)
    rows = [("meaning", key.doc), ("type", type_name(key.type)), ("default", default)]
    bounds = _bounds(key)
    return [*rows, *([("bounds", bounds)] if bounds else []), ("on resume", key.effect.value)]


def _key_to_json(key: Key) -> dict[str, object]:
    return {
        "key": key.path,
        "meaning": key.doc,
        "type": type_name(key.type),
        "required": key.default == MISSING,
        "default": None if key.default == MISSING else key.default,
        "minimum": key.minimum,
        "above": key.above,
        "maximum": key.maximum,
        "effect": key.effect.name.lower(),
    }


def _bounds(key: Key) -> str:
    parts = [
        f"at least {key.minimum:g}" if key.minimum is not None else "",
        f"above {key.above:g}" if key.above is not None else "",
        f"at most {key.maximum:g}" if key.maximum is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def type_name(hint: Any) -> str:
    """A type in words: ``whole number``, ``one of adamw``, ``text or null``."""
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    if typing.get_origin(hint) is Mapping:
        return "mapping of names to texts"
    if typing.get_origin(hint) is Sequence:
        return "list of texts"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}[
        hint
    ]


def _complete_key(incomplete: str) -> list[str]:
    return [path for path in keys() if path.startswith(incomplete)]
