"""The command ``muster``; what it does is in :mod:`launcher.cli.app`.

    muster launch quickstart

Imports next to nothing, so that Ctrl-C is answered with one line from the first moment on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launcher.cli.interrupts import INTERRUPTED, ended_by_ctrl_c


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        with ended_by_ctrl_c():
            _open_closed_streams()
            from launcher.cli.app import run
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        return INTERRUPTED


def _open_closed_streams() -> None:
    """After `>&-` the next file to be opened would be taken for the closed stream, by child processes too."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # for as long as the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
