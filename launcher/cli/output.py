"""What the user sees: data on stdout, talk on stderr. Every verb writes through here.

Colour is decoration only, and only on a terminal without NO_COLOR. Control characters never reach the
terminal, whatever a file name, a run directory or an override contains.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import click

from launcher.text import printable
from recipes.errors import UserError

type Row = Sequence[str]


class StdoutError(OSError):
    """The answer cannot be written, though its reader is there: the disk is full, or the terminal gone."""


def data(text: str) -> None:
    """Prints a line, or several, of the answer."""
    _write(sys.stdout, printable(text))


def data_as_it_is(text: str) -> None:
    """The same for text that is harmless already, or that no terminal will see."""
    _write(sys.stdout, text)


def data_json(value: object, *, indent: int | None = 2) -> None:
    """Prints the answer for machines: strict JSON, numbers that it does not know become null."""
    _write(sys.stdout, json.dumps(_finite(value), indent=indent, ensure_ascii=True, allow_nan=False))


def say(text: str) -> None:
    """Prints what is going on, beside the answer."""
    _write(sys.stderr, printable(text))


def note(text: str) -> None:
    """Prints something worth knowing, beside the answer."""
    _write(sys.stderr, f"{_label(sys.stderr, 'note:', 'yellow')} {printable(text)}")


def error(message: str, hint: str = "") -> None:
    """Prints why the command failed, and what to do."""
    _write(sys.stderr, f"{_label(sys.stderr, 'error:', 'red')} {printable(message)}")
    if hint:
        _write(sys.stderr, f"{_label(sys.stderr, 'hint:', 'cyan')} {printable(hint)}")


def user_error(failure: UserError) -> None:
    error(failure.message, failure.hint)


def table(rows: Sequence[Row], *, header: Row | None = None, indent: int = 0) -> str:
    """Columns, aligned; the last one is not padded. Every cell is one harmless line."""
    cells = [[_cell(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(f"{'':{indent}}{line}".rstrip() for line in lines)


def use_color(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user has nothing against colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _cell(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t") or "-"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _label(stream: TextIO, text: str, color: str) -> str:
    return click.style(text, fg=color, bold=True) if use_color(stream) else text


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "ascii"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    except OSError as error:
        _lost(stream, error)


def flush() -> None:
    """Hands over what was printed.

    Raises:
      BrokenPipeError: the reader went away, as in `muster ls | head`.
      StdoutError: it cannot be written.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _lost(sys.stdout, error)


@contextlib.contextmanager
def not_essential() -> Iterator[None]:
    """Around talk of a verb whose exit code says more: whether anybody hears it does not change the code."""
    with contextlib.suppress(OSError):
        yield
        flush()


def _lost(stream: TextIO, error: OSError) -> None:
    """``stream`` leads nowhere from now on, so that the interpreter does not complain of it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    if stream is sys.stdout:
        raise error if isinstance(error, BrokenPipeError) else StdoutError(error.errno, error.strerror)
