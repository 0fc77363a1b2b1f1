"""Plain data -> Recipe, and back: strict, and every problem at once.

Used by the launcher on what Hydra composed and by the trainer on a resolved ``recipe.yaml``, so both
accept exactly the same recipes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recipes.errors import Problem, RecipeError
from recipes.kubernetes_names import looks_secret
from recipes.schema import Recipe
from recipes.schema_key import Effect

INT32_MAX = 2**31 - 1
"""Largest whole number of a recipe where no other bound is given: steps and seeds are int32 on devices."""

MISSING = "???"
"""What Hydra and OmegaConf write for a value that must be given."""

_INVALID = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One leaf of the schema."""

    path: str
    """Dotted path, for example ``optimizer.learning_rate``."""
    type: Any
    default: Any
    """MISSING when the key must be given."""
    doc: str
    effect: Effect
    minimum: float | None
    maximum: float | None
    above: float | None


@functools.cache
def keys() -> Mapping[str, Key]:
    """All leaves of the schema by dotted path, in schema order."""
    return {key.path: key for key in _walk(Recipe, "")}


@functools.cache
def free_form() -> Sequence[str]:
    """Keys that hold a mapping whose names are the user's own, for example ``target.env``."""
    return [path for path, key in keys().items() if _is_mapping(key.type)]


def free_form_node(path: str) -> str | None:
    """The free-form key that ``path`` is an entry of: ``target.env`` of ``target.env.FOO``.

    What follows the key is the entry's name, whole: it may hold dots and slashes.
    """
    return next((node for node in free_form() if path.startswith(f"{node}.")), None)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def _walk(cls: type[Any], prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type[Any], hint), f"{path}.")
            continue
        yield Key(path=path, type=hint, default=_default(field), **field.metadata)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def defaults() -> dict[str, Any]:
    """The schema's defaults as nested plain data; what must be given is MISSING."""
    return nest({path: key.default for path, key in keys().items()})


def recipe_from_dict(data: object, *, origins: Mapping[str, str] | None = None) -> Recipe:
    """Reads nested plain data strictly.

    Args:
      data: nested mappings with the schema's keys; absent keys take their defaults.
      origins: where each dotted key came from, for messages.

    Raises:
      RecipeError: unknown keys, missing values, wrong types or values out of bounds; all of them.
    """
    reader = _Reader(origins or {})
    recipe = reader.read(Recipe, data, "")
    if reader.problems:
        name = data.get("name") if isinstance(data, Mapping) else None
        raise RecipeError(str(name or "?"), reader.problems)
    return typing.cast(Recipe, recipe)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Nested plain data in schema order; ``recipe_from_dict`` reads it back."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(recipe)))


def _plain(value: object) -> object:
    """Tuples as lists, which YAML and JSON have."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted path to leaf. A free-form key is one leaf: the mapping itself."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and path not in free_form():
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`; also takes single entries, ``target.env.FOO``."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        parents, leaf = _split(path)
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = dict(value) if isinstance(value, Mapping) else value
    return nested


def _split(path: str) -> tuple[Sequence[str], str]:
    free = free_form_node(path)
    if free is not None:
        return free.split("."), path.removeprefix(f"{free}.")
    *parents, leaf = path.split(".")
    return parents, leaf


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``word`` was probably meant to be, or None."""
    pool = list(candidates)
    found = difflib.get_close_matches(word, pool, n=1, cutoff=0.6)
    if found:
        return found[0]
    last = word.rsplit(".", 1)[-1]
    same_leaf = [name for name in pool if name.rsplit(".", 1)[-1] == last]
    return same_leaf[0] if len(same_leaf) == 1 else None


class _Reader:
    def __init__(self, origins: Mapping[str, str]) -> None:
        self.origins = origins
        self.problems: list[Problem] = []

    def report(self, path: str, value: object, reason: str, fix: str) -> object:
        self.problems.append(
            Problem(key=path, value=value, reason=reason, fix=fix, origin=self.origins.get(path, ""))
        )
        return _INVALID

    def read(self, cls: type[Any], data: object, prefix: str) -> object:
        """Reads one dataclass; returns _INVALID when anything below it is wrong."""
        if not isinstance(data, Mapping):
            return self.report(
                prefix.rstrip(".") or "recipe", data, "is not a mapping", "give keys and values"
            )
        hints = typing.get_type_hints(cls)
        for name in data:
            if name not in hints:
                self._unknown(f"{prefix}{name}", data[name], [f"{prefix}{known}" for known in hints])
        values = {
            field.name: self._field(field, hints[field.name], data, prefix)
            for field in dataclasses.fields(cls)
        }
        return _INVALID if any(v is _INVALID for v in values.values()) else cls(**values)

    def _unknown(self, path: str, value: object, siblings: Sequence[str]) -> None:
        guess = nearest(path, siblings) or nearest(path, keys())
        fix = f"did you mean {guess}?" if guess else "remove it; `muster show RECIPE` lists every key"
        self.report(path, value, "is not a key of a recipe", fix)

    def _field(
        self, field: dataclasses.Field[Any], hint: Any, data: Mapping[str, Any], prefix: str
    ) -> object:
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            return self.read(typing.cast(type[Any], hint), data.get(field.name, {}), f"{path}.")
        value = data.get(field.name, keys()[path].default)
        if isinstance(value, str) and value == MISSING:
            return self.report(path, None, "must be given", f"set {path} ({field.metadata['doc']})")
        return self._value(keys()[path], hint, value)

    def _value(self, key: Key, hint: Any, value: object) -> object:
        if isinstance(hint, types.UnionType):
            options = [option for option in typing.get_args(hint) if option is not type(None)]
            return None if value is None else self._value(key, options[0], value)
        if typing.get_origin(hint) is Literal:
            return self._choice(key, typing.get_args(hint), value)
        if _is_mapping(hint):
            return self._entries(key, value)
        if typing.get_origin(hint) is Sequence:
            return self._texts(key, value)
        converted = _convert(hint, value)
        if converted is _INVALID:
            wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]
            fix = f"give {wanted}: {key.doc}"
            if hint is int and isinstance(value, float) and value.is_integer():
                fix = f"write {int(value)}"
            return self.report(key.path, value, f"is not {wanted}", fix)
        return self._bounded(key, converted)

    def _entries(self, key: Key, value: object) -> object:
        """A free-form mapping of texts, sorted by name: what it was merged from leaves no trace."""
        if not isinstance(value, Mapping):
            return self.report(
                key.path, value, "is not a mapping", f"give names and texts, or leave it out: {key.doc}"
            )
        for name, text in value.items():
            if not isinstance(name, str):
                self.report(f"{key.path}.{name}", None, "has a name that is not a text", "quote the name")
            elif not isinstance(text, str):
                shown = "..." if looks_secret(f"{key.path}.{name}") else text
                self.report(f"{key.path}.{name}", shown, "is not a text", _quote_it(name, shown))
        if not all(isinstance(part, str) for entry in value.items() for part in entry):
            return _INVALID
        return dict(sorted(value.items()))

    def _texts(self, key: Key, value: object) -> object:
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
            return self.report(key.path, value, "is not a list of texts", f"give [TEXT, ...]: {key.doc}")
        return tuple(value)

    def _choice(self, key: Key, options: tuple[str, ...], value: object) -> object:
        if value in options:
            return value
        guess = nearest(str(value), options)
        listed = ", ".join(options)
        fix = f"did you mean {guess}? (one of {listed})" if guess else f"use one of {listed}"
        return self.report(key.path, value, "is not an option", fix)

    def _bounded(self, key: Key, value: Any) -> object:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            return self.report(key.path, value, "is not finite", "give a finite number")
        if key.minimum is not None and value < key.minimum:
            return self.report(key.path, value, f"is below {key.minimum:g}", f"give at least {key.minimum:g}")
        if key.above is not None and value <= key.above:
            return self.report(
                key.path, value, f"is not above {key.above:g}", f"give more than {key.above:g}"
            )
        most = INT32_MAX if key.maximum is None and isinstance(value, int) else key.maximum
        if most is not None and value > most:
            return self.report(key.path, value, f"is above {most:,.12g}", f"give at most {most:,.12g}")
        return value


def _convert(hint: Any, value: object) -> object:
    """``value`` as ``hint`` without loss, or _INVALID. YAML 1.1 reads ``3e-4`` as a text."""
    if hint is float and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            return _INVALID
        except OverflowError:
            return math.inf
    if type(value) is hint:
        return value
    return _INVALID


def _quote_it(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f'quote it: {name}: "{str(value).lower()}"'
    if isinstance(value, int):
        return f'quote it: {name}: "{value}"'
    return (
        f'quote it, for example {name}: "1e-3"' if isinstance(value, float) else f'give a text: {name}: "..."'
    )
