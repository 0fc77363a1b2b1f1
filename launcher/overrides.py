"""Overrides of the command line: ``key=value`` and ``group=option``, checked against the schema.

Hydra's grammar parses the values (``launcher.compose`` passes its parser in), so quoting means what
Hydra's documentation says. What it would do beyond setting one known key or choosing one known option
is refused here, all at once. Entries of free-form keys (``target.env.FOO=1``) are texts: they are taken as
typed and never reach Hydra, which would make numbers of them and split names at dots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.recipe_path import GROUPS, describe, find, names, not_a_file
from launcher.recipe_yaml import interpolation_problem
from recipes.errors import Problem
from recipes.kubernetes_names import looks_secret
from recipes.load import free_form, free_form_node, keys, nearest

MAX_LENGTH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One accepted override."""

    text: str
    key: str
    """A dotted key, or a group."""
    value: Any
    is_choice: bool
    """It chooses an option of a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One accepted override of a free-form key."""

    node: str
    """The free-form key, for example ``target.env``."""
    name: str | None
    """Name of the entry; None for all of them."""
    value: str | None
    """None removes the entry."""

    @property
    def key(self) -> str:
        return self.node if self.name is None else f"{self.node}.{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A command line's overrides: what is accepted, and what is wrong with the rest."""

    overrides: Sequence[Override]
    entries: Sequence[Entry]
    problems: Sequence[Problem]


class GrammarError(Exception):
    """The text is not an override; the message says why."""


Grammar = Callable[[str], Any]
"""Parses the value of an override; raises GrammarError, also for a sweep."""


def read_overrides(texts: Sequence[str], folders: Sequence[Path], grammar: Grammar) -> Parsed:
    """Reads every override, the good beside the bad."""
    overrides: list[Override] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            if _node(text) is not None:
                entries += _read_entries(text, grammar)
            else:
                overrides.append(_read(text, folders, grammar))
        except _RefusedError as refused:
            problems.append(refused.problem)
    problems += [*_repeated(overrides), *_repeated_entries(entries)]
    return Parsed(
        overrides=list({override.key: override for override in overrides}.values()),
        entries=list({entry.key: entry for entry in entries}.values()),
        problems=problems,
    )


class _RefusedError(Exception):
    def __init__(self, key: str, value: object, reason: str, fix: str) -> None:
        super().__init__(reason)
        # What someone typed for a secret is not repeated, wherever they put it.
        shown = None if key not in keys() and looks_secret(key) else value
        self.problem = Problem(key=_short(key), value=shown, reason=reason, fix=fix, origin="override")


def _read(text: str, folders: Sequence[Path], grammar: Grammar) -> Override:
    key, equals, raw = text.partition("=")
    _refuse_edits(key, raw, bool(equals), folders)
    _refuse_long(key, text)
    is_choice = key in GROUPS
    if not is_choice and key not in keys():
        raise _unknown(key, raw)
    if key == "name":
        raise _RefusedError(key, raw, "is the name of the recipe's file", "set run.name for another run")
    try:
        value = grammar(text)
    except GrammarError as error:
        raise _RefusedError(
            key, _short(raw), str(error), "quote the value, for example 'data.path=\"a,b\"'"
        ) from None
    for leaf in _texts(value):
        wrong = interpolation_problem(leaf)
        if wrong:
            raise _RefusedError(key, _short(raw), *wrong)
    if is_choice:
        _check_option(key, value, raw, folders)
    return Override(text=text, key=key, value=value, is_choice=is_choice)


def _refuse_long(key: str, text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise _RefusedError(
            key, "...", f"is longer than {MAX_LENGTH} characters", "write it in a recipe file"
        )


def _node(text: str) -> str | None:
    """The free-form key that an override is about."""
    key = text.partition("=")[0].lstrip("+~")
    return key if key in free_form() else free_form_node(key)


def _read_entries(text: str, grammar: Grammar) -> list[Entry]:
    """An override of a free-form key, also with the ``+`` and ``++`` that Hydra wants before new names."""
    signed, equals, raw = text.partition("=")
    key, node = signed.lstrip("+~"), _node(text)
    assert node is not None
    name = None if key == node else key.removeprefix(f"{node}.")
    _refuse_long(key, text)
    if name == "":
        raise _RefusedError(key, None, "names no entry", f"write {node}.NAME=VALUE")
    if signed.startswith("~"):
        if equals:
            raise _RefusedError(signed, None, "removes an entry and takes no value", f"write ~{key}")
        return [Entry(node=node, name=name, value=None)]
    if not equals:
        raise _RefusedError(
            key, None, "is not an override", f"write {node}.{name or 'NAME'}=VALUE, or ~{key} to remove it"
        )
    values = _read_mapping(node, raw, grammar) if name is None else {name: _entry_text(key, raw, grammar)}
    for entry, value in values.items():
        if "${" in value:
            raise _RefusedError(
                f"{node}.{entry}",
                _short(value),
                "interpolates, and a text is not interpolated here",
                "write the value",
            )
    return [Entry(node=node, name=entry, value=value) for entry, value in values.items()]


def _entry_text(key: str, raw: str, grammar: Grammar) -> str:
    """The text of one entry: exactly as typed, unless it is in quotes."""
    if raw.strip() == "null":
        fix = f"write ~{key} to remove it, or '{key}=\"null\"' for the text"
        raise _RefusedError(key, raw, "is not a text", fix)
    if not raw.lstrip().startswith(("'", '"')):
        return raw
    try:
        value = grammar(f"value={raw}")
    except GrammarError:
        value = None
    if not isinstance(value, str):
        fix = "quote the whole value once, or begin it with another character"
        raise _RefusedError(key, _short(raw), "begins with a quote but is not one quoted text", fix)
    return value


def _read_mapping(node: str, raw: str, grammar: Grammar) -> Mapping[str, str]:
    """Several entries at once: a mapping in JSON, or by Hydra's grammar (which has no quoted names)."""
    example = f'write {node}.NAME=VALUE, or \'{node}={{"NAME":"VALUE"}}\''
    try:
        value = json.loads(raw, object_pairs_hook=_unrepeated)
    except (ValueError, RecursionError):
        try:
            value = grammar(f"value={raw}")
        except GrammarError:
            value = None
    if not isinstance(value, dict):
        raise _RefusedError(node, None, "is not a mapping of names to texts", example)
    if not value:
        raise _RefusedError(node, "{}", "is empty", f"write ~{node} to remove all entries")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise _RefusedError(
                f"{node}.{name}", text, "is not a text", f"quote it, or write {node}.{name}=VALUE"
            )
    return value


def _unrepeated(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refuse_edits(key: str, raw: str, has_value: bool, folders: Sequence[Path]) -> None:
    bare = key.lstrip("+~")
    if key.startswith("+"):
        guess = _guess(bare)
        fix = f"write {guess}={_short(raw)}" if guess else "use a key that `muster show --keys` lists"
        raise _RefusedError(key, raw, "adds a key, but the keys of a recipe are fixed", fix)
    if key.startswith("~"):
        raise _RefusedError(
            key,
            raw or None,
            "removes a key, but the keys of a recipe are fixed",
            "set it to null or its default",
        )
    if not has_value:
        guess = _guess(key)
        fix = f"write {guess}=VALUE" if guess else "write key=value or group=option"
        raise _RefusedError(key, None, "is not an override", fix)
    if any(part.startswith("_target_") for part in key.replace("/", ".").split(".")):
        raise _RefusedError(
            key, raw, "would name code to run", "remove it; things are chosen by name in a recipe"
        )
    if key.split(".", 1)[0].split("/", 1)[0].split("@", 1)[0] == "hydra":
        raise _RefusedError(key, raw, "is not part of a recipe", "remove it; a recipe cannot configure Hydra")
    if "@" in key:
        raise _RefusedError(
            key, raw, "moves a group elsewhere", f"write {key.split('@', 1)[0]}={_short(raw)}"
        )


def _check_option(group: str, value: object, raw: str, folders: Sequence[Path]) -> None:
    if isinstance(value, str) and find(folders, value, group):
        return
    if there := not_a_file(folders, str(value), group):
        raise _RefusedError(group, _short(raw), f"is no option: {there} is not a file", "make it a file")
    options = names(folders, group)
    guess = nearest(str(value), options)
    listed = f"one of {', '.join(options)}; searched {describe(folders)}"
    fix = f"did you mean {group}={guess}? ({listed})" if guess else f"use {listed}"
    raise _RefusedError(group, _short(raw), f"is not an option of the group {group}", fix)


def _unknown(key: str, raw: str) -> _RefusedError:
    inside = [path for path in keys() if path.startswith(f"{key}.")]
    if inside:
        return _RefusedError(
            key, _short(raw), "is a section, not a key", f"set its keys, for example {inside[0]}=..."
        )
    guess = _guess(key)
    fix = f"did you mean {guess}?" if guess else "`muster show --keys` lists every key"
    return _RefusedError(key, _short(raw), "is not a key of a recipe", fix)


def _guess(key: str) -> str | None:
    """The key or group that was probably meant: by the whole path, then by its last part alone."""
    last_parts = {path.rsplit(".", 1)[-1]: path for path in keys()}
    last = key.rsplit(".", 1)[-1]
    # Counts are called num_..., which is what people leave out.
    counted = next((name for name in (f"num_{last}", f"num_{last}s") if name in last_parts), None)
    if counted:
        return last_parts[counted]
    close = nearest(last, last_parts)
    return nearest(key, [*keys(), *GROUPS]) or (last_parts[close] if close else None)


def _repeated(overrides: Sequence[Override]) -> Iterator[Problem]:
    """A key given twice is a mistake more often than a wish for the last one."""
    first: dict[str, Override] = {}
    for override in overrides:
        earlier = first.setdefault(override.key, override)
        if earlier is not override:
            fix = f"keep one of {earlier.text} and {override.text}"
            yield Problem(
                key=override.key, value=override.value, reason="is given twice", fix=fix, origin="override"
            )


def _repeated_entries(entries: Sequence[Entry]) -> Iterator[Problem]:
    seen: set[str] = set()
    for entry in entries:
        if entry.key in seen:
            yield Problem(
                key=entry.key, value=None, reason="is given twice", fix="keep one of them", origin="override"
            )
        seen.add(entry.key)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
