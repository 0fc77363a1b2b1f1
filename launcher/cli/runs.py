"""What the verbs that look at runs share: how RUN and --root are understood, and how a run is shown."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from launcher import lease
from launcher.cli import output
from launcher.rundir import RunDir
from launcher.storage import Storage, StorageError, is_remote, open_storage
from launcher.storage_types import Names
from launcher.summary import RunState, RunSummary
from launcher.text import printable
from recipes.contract import is_run_name
from recipes.errors import UserError
from recipes.load import nearest

DEFAULT_ROOT = "runs"
ROOT_VARIABLE = "MUSTER_ROOT"
OVERSEER = ".supervisor.json"
"""In the folder of all runs: who supervises all of them."""


def root_option[F: Callable[..., Any]](function: F) -> F:
    """``--root``, the same for every verb."""
    option = click.option(
        "--root",
        default=lambda: os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT,
        show_default=f"${ROOT_VARIABLE}, else {DEFAULT_ROOT}",
        help="Folder of all runs: a local path or gs://bucket/prefix.",
    )
    return option(function)


def complete_run(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> Names:
    """Names of local runs; TAB does not wait for a bucket."""
    root = ctx.params.get("root") or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT
    if is_remote(root):
        return []
    return [
        name for name in open_storage(root).children() if name.startswith(incomplete) and is_run_name(name)
    ]


def run_argument[F: Callable[..., Any]](function: F) -> F:
    """RUN, the same for every verb."""
    return click.argument("run", shell_complete=complete_run)(function)


def find_run(run: str, root: str) -> RunDir:
    """The run named ``run`` under ``root``, or the run at the address ``run``.

    Raises:
      UserError: there is none; the nearest name is suggested.
    """
    if "/" in run or is_remote(run):
        found = RunDir(open_storage(run))
        if found.exists():
            return found
        raise UserError(
            f"there is no run at {found.url}", hint="`muster ls --root ROOT` lists the runs of a folder"
        )
    if not is_run_name(run):
        raise UserError(
            f"{run!r} is not a run name",
            hint="run names are a-z, 0-9 and hyphens, at most 40; for a path write ./PATH",
        )
    storage = open_storage(root)
    found = RunDir(storage.child(run))
    if found.exists():
        return found
    raise UserError(f"there is no run {run} in {storage.url}", hint=_suggestion(run, storage.children()))


def _suggestion(run: str, names: Sequence[str]) -> str:
    guess = nearest(run, [name for name in names if is_run_name(name)])
    return (
        f"did you mean {guess}?"
        if guess
        else f"`muster ls` lists the runs; {ROOT_VARIABLE} or --root says where"
    )


def asker() -> str:
    """Who asks something of a run: user and machine, as other people will read it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Rounded down to one unit: ``42s``, ``3m``, ``5h``, ``2d``."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(max(0.0, seconds))}s"


def dollars(value: float | None) -> str:
    """With cents below a thousand."""
    return "-" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def overseer(root: Storage, now: float) -> str | None:
    """Who supervises every run of a folder; None: nobody, as far as can be read."""
    with contextlib.suppress(StorageError):
        held = lease.read(root, OVERSEER)
        return held.holder() if held is not None and lease.is_held(held, now) else None
    return None


_COLOURS: Mapping[RunState, str] = {
    RunState.RUNNING: "cyan",
    RunState.COMPLETE: "green",
    RunState.FAILED: "red",
    RunState.STALE: "yellow",
    RunState.WAITING: "yellow",
    RunState.STARTING: "cyan",
}


def heading(summary: RunSummary, state: str = "") -> str:
    """One harmless line: name, state and how far it is. Colour only where a terminal wants it.

    Args:
      summary: of the run directory.
      state: what a cluster says, when it knows better.
    """
    state = state or summary.state.value
    if output.use_color(sys.stdout):
        state = click.style(state, fg=_COLOURS.get(summary.state))
    return f"{printable(summary.name)}: {state}, step {summary.step} of {summary.num_steps}"


def learned(summary: RunSummary) -> str:
    """The newest losses, with what the held-out one is to be compared with; empty before there are any."""
    parts = []
    if summary.eval_loss is not None:
        entropy = summary.eval_unigram_entropy_nats
        beside = "" if entropy is None else f" (unigram entropy {entropy:.2f})"
        parts.append(f"held-out loss {summary.eval_loss:.2f} nats per token{beside}")
    if summary.loss is not None:
        parts.append(f"train loss {summary.loss:.2f}")
    return ", ".join(parts)
