"""Overrides of the command line: ``key=value`` and ``group=option``, checked against the schema.

Hydra's grammar parses the values (``launcher.compose`` passes its parser in), so quoting means what
Hydra's documentation says. What it would do beyond setting one known key or choosing one known option
is refused here, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.recipe_path import GROUPS, describe, find, names
from launcher.recipe_yaml import interpolation_problem
from recipes.errors import Problem
from recipes.load import keys, nearest

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


class GrammarError(Exception):
    """The text is not an override; the message says why."""


Grammar = Callable[[str], Any]
"""Parses the value of an override; raises GrammarError, also for a sweep."""


def read_overrides(
    texts: Sequence[str], folders: Sequence[Path], grammar: Grammar
) -> tuple[list[Override], list[Problem]]:
    """The overrides that are accepted, parsed, and what is wrong with the others."""
    overrides: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            overrides.append(_read(text, folders, grammar))
        except _RefusedError as refused:
            problems.append(refused.problem)
    problems += _repeated(overrides)
    return list({override.key: override for override in overrides}.values()), problems


class _RefusedError(Exception):
    def __init__(self, key: str, value: object, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.problem = Problem(key=_short(key), value=value, reason=reason, fix=fix, origin="override")


def _read(text: str, folders: Sequence[Path], grammar: Grammar) -> Override:
    key, equals, raw = text.partition("=")
    _refuse_edits(key, raw, bool(equals), folders)
    if len(text) > MAX_LENGTH:
        raise _RefusedError(
            key, "...", f"is longer than {MAX_LENGTH} characters", "write it in a recipe file"
        )
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
    close = nearest(key.rsplit(".", 1)[-1], last_parts)
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
