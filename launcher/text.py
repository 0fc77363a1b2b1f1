"""Text from elsewhere (logs, run directories) made harmless for a terminal, and sizes in words."""

from __future__ import annotations

_KEPT = "\n\t"


def printable(text: str) -> str:
    """``text`` with everything that could steer a terminal or reorder a line shown as an escape."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(char if char in _KEPT or char.isprintable() else _escaped(char) for char in text)


def one_line(text: str, limit: int = 300) -> str:
    """``text`` printable, on one line and not longer than ``limit`` characters."""
    joined = " ".join(printable(text).split())
    return joined if len(joined) <= limit else joined[: limit - 3] + "..."


def size_text(size_bytes: int) -> str:
    """``size_bytes`` with the binary unit that suits it."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{size_bytes} B"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def time_text(time_s: float) -> str:
    """In whole seconds from a thousand on, else three digits of seconds or milliseconds."""
    if time_s >= 1000:
        return f"{time_s:,.0f} s"
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1e3 * time_s:.3g} ms"
