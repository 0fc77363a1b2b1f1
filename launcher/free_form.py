"""Free-form keys of a recipe (``target.env`` and the like): merged here from files and overrides.

OmegaConf never sees them. It would take ``???`` for a missing value, resolve what looks like an
interpolation and split names at dots; here every text is carried exactly. Later files add entries to
those of earlier ones and win where names are the same; then comes the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.origins import Layer
from launcher.overrides import Entry
from recipes.errors import Problem
from recipes.load import free_form, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeForm:
    """What files and overrides say together."""

    values: Mapping[str, Any]
    """By free-form key: its entries; or what a file has instead of a mapping, for the reader to refuse."""
    problems: Sequence[Problem]


def merge(layers: Sequence[Layer], entries: Sequence[Entry]) -> FreeForm:
    """The entries of every free-form key."""
    values: dict[str, Any] = {}
    for node in free_form():
        values[node] = {}
        for layer in layers:
            found = _section(layer.contents.data, layer.package, node)
            leaf = node.rpartition(".")[2]
            if leaf not in found:
                continue
            both = isinstance(found[leaf], dict) and isinstance(values[node], dict)
            values[node] = {**values[node], **found[leaf]} if both else found[leaf]
    # `~target.env target.env.A=1` means the same in either order.
    ordered = sorted(entries, key=lambda entry: entry.name is not None)
    problems = [problem for entry in ordered for problem in _apply(entry, values)]
    return FreeForm(values=values, problems=problems)


def without(data: Mapping[str, Any], package: str) -> dict[str, Any]:
    """The contents of a file whose keys go under ``package``, without the free-form keys."""
    kept = dict(data)
    for node in free_form():
        section, _, leaf = node.rpartition(".")
        rest = {name: value for name, value in _section(kept, package, node).items() if name != leaf}
        if package == section:
            kept = rest
        elif rest or section in kept:
            kept[section] = rest
    return kept


def put(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A composed recipe with its free-form keys in place."""
    whole = dict(data)
    for node, value in values.items():
        section, _, leaf = node.rpartition(".")
        if isinstance(whole.get(section), dict):
            whole[section] = {**whole[section], leaf: value}
    return whole


def _section(data: Mapping[str, Any], package: str, node: str) -> Mapping[str, Any]:
    """What a file says for the section that ``node`` is a key of."""
    section = node.rpartition(".")[0]
    if package:
        return data if package == section else {}
    found = data.get(section)
    return found if isinstance(found, dict) else {}


def _apply(entry: Entry, values: dict[str, Any]) -> list[Problem]:
    """Changes ``values`` as one override says; what cannot be is returned."""
    entries = values[entry.node]
    if not isinstance(entries, dict):
        return []
    if entry.name is None:
        values[entry.node] = {}
    elif entry.value is not None:
        values[entry.node] = {**entries, entry.name: entry.value}
    elif entry.name in entries:
        values[entry.node] = {name: value for name, value in entries.items() if name != entry.name}
    else:
        guess = nearest(entry.name, entries)
        fix = (
            f"did you mean ~{entry.node}.{guess}?"
            if guess
            else f"leave it out; {_listed(entry.node, entries)}"
        )
        return [Problem(key=f"~{entry.key}", value=None, reason="is not set", fix=fix, origin="override")]
    return []


def _listed(node: str, entries: Mapping[str, Any]) -> str:
    return f"{node} has {', '.join(sorted(entries)) or 'no entries'}"
