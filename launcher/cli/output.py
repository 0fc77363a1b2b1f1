"""What the user sees: data on stdout, talk on stderr.

Colour is decoration only, and only on a terminal without NO_COLOR. Control characters never reach the
terminal, whatever a file name or an override contains.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

from recipes.errors import UserError


def data(text: str) -> None:
    """Prints a line of the answer."""
    _write(sys.stdout, text)


def data_json(value: Any) -> None:
    """Prints the answer for machines."""
    _write(sys.stdout, json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def note(text: str) -> None:
    """Prints something worth knowing, beside the answer."""
    _write(sys.stderr, f"{_label(sys.stderr, 'note:', 'yellow')} {text}")


def error(message: str, hint: str = "") -> None:
    """Prints why the command failed, and what to do."""
    _write(sys.stderr, f"{_label(sys.stderr, 'error:', 'red')} {printable(message)}")
    if hint:
        _write(sys.stderr, f"{_label(sys.stderr, 'hint:', 'cyan')} {printable(hint)}")


def user_error(failure: UserError) -> None:
    error(failure.message, failure.hint)


def table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns; the last column is not padded."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        data("  ".join([*cells, row[-1]]).rstrip())


def use_color(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user has nothing against colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """``text`` with control characters, line ends apart, as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _label(stream: TextIO, text: str, color: str) -> str:
    return click.style(text, fg=color, bold=True) if use_color(stream) else text


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
