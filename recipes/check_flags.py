"""Rules of `check.py` on compiler flags: an unknown or refused one would end every host at its start.

libtpu reads its flags from one text that it splits at blanks, without any quoting; so values are plain words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from recipes.errors import Problem
from recipes.flags import DEFAULT, LIBTPU_ARGS, RefusedFlag, flag_catalogue, flags_of, tuned_flags
from recipes.hardware import CPU
from recipes.load import nearest
from recipes.schema import Recipe

_NAME = re.compile(r"(xla|megascale)_[a-z0-9_]{1,120}", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9_.,:/+-]{1,200}", re.ASCII)
_TRUE = ("1", "t", "true", "y", "yes", "enabled")
_FALSE = ("0", "f", "false", "n", "no", "disabled")


def check_flags(recipe: Recipe) -> Iterator[Problem]:
    """Problems of `hardware.compiler_flags`, and of flags that come another way."""
    own = recipe.hardware.compiler_flags
    malformed = {name: list(_form_problems(name, value)) for name, value in own.items()}
    for problems in malformed.values():
        yield from problems
    yield from _environment_problems(recipe)
    if recipe.hardware.generation == CPU:
        return
    yield from _dropped_problems(recipe)
    in_effect = {flag.name: flag.value for flag in flags_of(recipe)}
    for name, value in own.items():
        if not malformed[name] and value != DEFAULT:
            yield from _refused_problems(name, value, recipe.hardware.generation, in_effect)


def _problem(name: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(key=f"hardware.compiler_flags.{name}", value=value, reason=reason, fix=fix)


def _form_problems(name: str, value: str) -> Iterator[Problem]:
    if _NAME.fullmatch(name) is None:
        bare = name.strip().lstrip("-")
        well_formed = _NAME.fullmatch(bare) is not None
        fix = f"write {bare}" if well_formed else "use xla_... or megascale_... in a-z, 0-9 and _"
        yield _problem(name, value, "is not the name of a compiler flag", fix)
    elif _VALUE.fullmatch(value) is None:
        fix = "use letters, digits and _ . , : / + - (libtpu splits its flags at blanks and knows no quotes)"
        yield _problem(name, value, "is not the value of a compiler flag", fix)


def _environment_problems(recipe: Recipe) -> Iterator[Problem]:
    for section in ("env", "secrets"):
        if LIBTPU_ARGS in getattr(recipe.target, section):
            value = None if section == "secrets" else recipe.target.env[LIBTPU_ARGS]
            yield Problem(
                key=f"target.{section}.{LIBTPU_ARGS}",
                value=value,
                reason="would replace the flags that Muster sets, unchecked",
                fix="remove it, and set hardware.compiler_flags.NAME=VALUE for each flag",
            )


def _dropped_problems(recipe: Recipe) -> Iterator[Problem]:
    known = {flag.name for flag in tuned_flags(recipe.hardware.generation)}
    for name, value in recipe.hardware.compiler_flags.items():
        if value == DEFAULT and name not in known:
            guess = nearest(name, known)
            fix = f"did you mean {guess}?" if guess else "remove it"
            reason = f"is not among the tuned flags of {recipe.hardware.generation}, so nothing is dropped"
            yield _problem(name, value, reason, fix)


def _refused_problems(
    name: str, value: str, generation: str, in_effect: Mapping[str, str]
) -> Iterator[Problem]:
    for refused in flag_catalogue().refused:
        if refused.name == name and generation in refused.generations and _is_refused(value, refused):
            yield _problem(name, value, refused.reason, refused.fix)
            return
    for exclusive in flag_catalogue().exclusive:
        others = [other for other in exclusive.names if other != name and is_on(in_effect.get(other, ""))]
        if name in exclusive.names and is_on(value) and others:
            reason = f"does not go with {others[0]}={in_effect[others[0]]}: {exclusive.reason}"
            yield _problem(name, value, reason, "set one of them to false")


def _is_refused(value: str, refused: RefusedFlag) -> bool:
    return refused.value is None or same_value(value, refused.value)


def same_value(value: str, other: str) -> bool:
    """Whether libtpu reads the same from both: it knows several words for true and false."""
    return _word(value) == _word(other)


def is_on(value: str) -> bool:
    """Whether libtpu takes ``value`` for true."""
    return _word(value) == "true"


def _word(value: str) -> str:
    lower = value.lower()
    if lower in _TRUE:
        return "true"
    return "false" if lower in _FALSE else lower
