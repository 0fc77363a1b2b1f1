"""One recipe file, read as data: strictly, within limits, with the line of every key.

YAML is read from parser events, so no object is ever constructed from it: no tags, no aliases (a few
lines of them can expand to gigabytes), no second value for a key, no interpolation that reads the
environment. Plain scalars follow the YAML 1.2 core schema: ``3e-4`` is a number, ``no`` is a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.errors import Problem, RecipeError, UserError
from recipes.kubernetes_names import looks_secret
from recipes.load import free_form, free_form_node, keys, nearest

MAX_SIZE_BYTES = 1 << 20
MAX_DEPTH = 16

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_.]*)\}")
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeFile:
    """The contents of one file."""

    label: str
    """How messages call the file, for example ``recipes/model/llama3-8b.yaml``."""
    comment: str
    """The first comment line: what the file is for."""
    package: str | None
    """``_global_`` when the header says so: the keys then start at the root of the recipe."""
    data: Mapping[str, Any]
    lines: Mapping[str, int]
    """Line of each key, by its dotted path in this file."""


def read_recipe_file(path: Path, label: str, *, group: str = "") -> RecipeFile:
    """Reads ``path``; ``group`` is where its keys go, unless its header says otherwise.

    Raises:
      UserError: it cannot be read, is too large or is not YAML.
      RecipeError: it is YAML, but not a recipe; every such problem of the file.
    """
    text = _read_text(path, label)
    builder = _Builder(label)
    comment, package = _header(text, builder)
    is_root = not group or package is not None
    builder.prefix = "" if is_root else f"{group}."
    data = builder.document(_events(text, label))
    if is_root:
        _check_top(data, builder)
    if builder.problems:
        raise RecipeError(path.stem, builder.problems)
    return RecipeFile(label=label, comment=comment, package=package, data=data, lines=builder.lines)


def interpolation_problem(text: str) -> tuple[str, str] | None:
    """Reason and fix when ``text`` interpolates anything but another key of the recipe."""
    if "${" in _REFERENCE.sub("", text):
        return "interpolates more than another key of the recipe", "write the value, or ${section.key}"
    known = keys().keys() - {"name", *free_form()}
    unknown = next((name for name in _REFERENCE.findall(text) if name not in known), None)
    if unknown is None:
        return None
    guess = nearest(unknown, known)
    fix = f"did you mean ${{{guess}}}?" if guess else "write the value, or ${section.key}"
    return f"interpolates {unknown}, which is not a key that has a value", fix


def first_comment(path: Path) -> str:
    """The first comment line of a file, for lists; empty when there is none or it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return _comment(file.read(4096))
    except (OSError, UnicodeDecodeError):
        return ""


def _read_text(path: Path, label: str) -> str:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_SIZE_BYTES:
            raise UserError(
                f"{label} is larger than {MAX_SIZE_BYTES} bytes", hint="a recipe is a few lines of YAML"
            )
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{label} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"cannot read {label}: {error.strerror}", hint="check the path and its permissions"
        ) from None


def _events(text: str, label: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{label}:{mark.line + 1}" if mark else label
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
        raise UserError(
            f"{where} is not YAML: {reason}", hint="check indentation, colons and quotes"
        ) from None


def _comment(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("#") and not _PACKAGE.fullmatch(line):
            return line.lstrip("# ").strip()
        if line.strip() and not line.startswith("#"):
            break
    return ""


def _header(text: str, builder: _Builder) -> tuple[str, str | None]:
    package = None
    for number, line in enumerate(text.splitlines(), start=1):
        found = _PACKAGE.fullmatch(line.strip())
        if found:
            package = found[1]
            if package != "_global_":
                builder.report(
                    "@package", package, number, "is not a package of a recipe", "write _global_ or nothing"
                )
        elif line.strip() and not line.startswith("#"):
            break
    return _comment(text), package


def _check_top(data: Mapping[str, Any], builder: _Builder) -> None:
    if "hydra" in data:
        fix = "remove it; a recipe cannot configure Hydra"
        builder.report("hydra", "...", builder.lines["hydra"], "is not part of a recipe", fix)
    if "name" in data:
        fix = "remove it, and set run.name for another run"
        builder.report("name", data["name"], builder.lines["name"], "is given by the name of the file", fix)
    for section in {path.partition(".")[0] for path in keys() if "." in path} & data.keys():
        if not isinstance(data[section], dict):
            fix = f"give the keys of {section}, or leave it out"
            builder.report(section, data[section], builder.lines[section], "is not a mapping", fix)


class _TooDeepError(Exception):
    """The document nests deeper than any recipe does."""


@dataclass(slots=True)
class _Builder:
    label: str
    prefix: str = ""
    """Of the file's keys within the recipe."""
    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    def report(self, key: str, value: object, line: int, reason: str, fix: str) -> None:
        shown = value if isinstance(value, (str, int, float, type(None))) else "..."
        self.problems.append(
            Problem(key=key, value=shown, reason=reason, fix=fix, origin=f"{self.label}:{line}")
        )

    def document(self, events: Iterator[yaml.Event]) -> dict[str, Any]:
        data: object = None
        try:
            for event in events:
                if isinstance(event, yaml.DocumentStartEvent):
                    if self.lines or data is not None:
                        self.report("---", None, _line(event), "starts a second document", "keep one a file")
                        break
                elif isinstance(event, yaml.NodeEvent):
                    data = self._node(event, events, "", 0)
        except _TooDeepError:
            return {}
        if isinstance(data, dict) and data:
            return data
        if not self.problems:
            self.report(
                "recipe",
                None,
                1,
                "has no keys",
                "give keys and values, for example `train: {num_steps: 100}`",
            )
        return {}

    def _node(self, event: yaml.NodeEvent, events: Iterator[yaml.Event], path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            self.report(
                path[:80], "...", _line(event), "is nested too deeply", "keys of a recipe are two levels deep"
            )
            raise _TooDeepError
        if isinstance(event, yaml.AliasEvent):
            self.report(
                path, f"*{event.anchor}", _line(event), "is a YAML alias", "repeat the value, or use a group"
            )
            return None
        if getattr(event, "tag", None) is not None:
            self.report(
                path, getattr(event, "tag", None), _line(event), "has a YAML tag", "write plain values"
            )
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(events, path, depth, _line(event))
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(events, path, depth)
        assert isinstance(event, yaml.ScalarEvent)
        return self._scalar(event, path)

    def _mapping(self, events: Iterator[yaml.Event], path: str, depth: int, line: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_event in events:
            if isinstance(key_event, yaml.MappingEndEvent):
                break
            if not isinstance(key_event, yaml.ScalarEvent):
                self._node(_node_event(key_event), events, path, depth + 1)
                key = "?"
                self.report(path, key, _line(key_event), "has a key that is not a word", "write name: value")
            else:
                key = key_event.value
            key_path = f"{path}.{key}" if path else key
            self._check_key(key, path, data, _line(key_event))
            data[key] = self._node(_node_event(next(events)), events, key_path, depth + 1)
            self.lines[key_path] = _line(key_event)
        if not data and path and not self._is_free_form(path):
            self.report(path, "{}", line, "is empty", "give its keys, or leave it out")
        return data

    def _is_free_form(self, path: str) -> bool:
        return f"{self.prefix}{path}" in free_form()

    def _check_key(self, key: str, parent: str, data: Mapping[str, Any], line: int) -> None:
        path = f"{parent}.{key}" if parent else key
        if key in data:
            self.report(path, None, line, "is given twice", "keep one of them")
        elif key.startswith("_target_"):
            self.report(
                path, None, line, "would name code to run", "remove it; things are chosen by name in a recipe"
            )
        elif "." in key and not self._is_free_form(parent):
            self.report(path, None, line, "is written with dots", "nest it: one mapping for each part")

    def _sequence(self, events: Iterator[yaml.Event], path: str, depth: int) -> list[Any]:
        items: list[Any] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            item_path = f"{path}[{len(items)}]"
            items.append(self._node(_node_event(event), events, item_path, depth + 1))
            self.lines[item_path] = _line(event)
        return items

    def _scalar(self, event: yaml.ScalarEvent, path: str) -> object:
        wrong = interpolation_problem(event.value)
        if "${" in event.value and free_form_node(f"{self.prefix}{path}"):
            wrong = "interpolates, and a text is not interpolated here", "write the value"
        if wrong:
            self.report(path, None if looks_secret(path) else event.value, _line(event), *wrong)
            return None
        return event.value if event.style else plain_scalar(event.value)


def plain_scalar(text: str) -> object:
    """An unquoted scalar by the YAML 1.2 core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        # Python refuses to convert thousands of digits; such a number is a mistake, not a value.
        return int(text) if len(text) <= 40 else text
    if _FLOAT.fullmatch(text):
        return float(
            text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf").replace(".NaN", "nan")
        )
    return text


def _node_event(event: yaml.Event) -> yaml.NodeEvent:
    assert isinstance(event, yaml.NodeEvent)
    return event


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1
