"""What verbs that compile share: limits of the compiler, its progress, and the report of one recipe."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import output
from recipes.errors import UserError
from recipes.hardware import CPU

if TYPE_CHECKING:
    from launcher.preflight.compiler import Limits, Usage
    from launcher.preflight.report import Report
    from recipes.schema import Recipe

_PLAIN_PERIOD_S = 10.0
_GIB = 2**30

type Ask = Callable[[Recipe], Report]
"""What says whether a recipe fits, and how fast it is."""


def limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--time-limit`` and ``--memory-limit``, as ``time_limit_s`` and ``memory_limit_gib``."""
    for option in (
        click.option(
            "--memory-limit",
            "memory_limit_gib",
            metavar="GIB",
            type=click.FloatRange(min=0.25),
            default=8,
            show_default=True,
            help="Stop the compiler when it takes more memory than this.",
        ),
        click.option(
            "--time-limit",
            "time_limit_s",
            metavar="SECONDS",
            type=click.FloatRange(min=1),
            default=3600,
            show_default=True,
            help="Stop the compiler after this long.",
        ),
    ):
        function = option(function)
    return function


def refuse_cpu(recipe: Recipe, verb: str) -> None:
    """Raises a UserError for a recipe that no TPU compiler is for."""
    if recipe.hardware.generation == CPU:
        raise UserError(
            f"{recipe.name} is for CPU devices, and {verb} is for TPUs",
            hint="choose a recipe with a TPU generation: `muster recipes` lists them",
        )


def has_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def compiler(*, time_limit_s: float, memory_limit_gib: float, fresh: bool) -> Ask:
    """The TPU compiler, within limits."""
    from launcher.preflight.compiler import Limits

    limits = Limits(time_s=time_limit_s, memory_bytes=round(memory_limit_gib * _GIB))
    return functools.partial(_compiled, limits=limits, fresh=fresh)


def _compiled(recipe: Recipe, *, limits: Limits, fresh: bool) -> Report:
    from launcher.preflight.compiled import analyze
    from launcher.preflight.compiler import CompileError, compile_step
    from launcher.preflight.report import fitting, not_fitting

    try:
        with _progress(recipe) as watch:
            compiled = compile_step(recipe, limits=limits, watch=watch, fresh=fresh)
    except CompileError as refused:
        if refused.problem.needed_bytes is None:
            raise
        return not_fitting(recipe, refused.problem)
    return fitting(recipe, compiled, analyze(compiled))


@contextlib.contextmanager
def _progress(recipe: Recipe) -> Iterator[Callable[[Usage], None]]:
    """One live line on a terminal, else a line every ten seconds."""
    what = f"compiling {recipe.name} for {recipe.hardware.generation} {recipe.hardware.topology}"
    if output.use_color(sys.stderr):
        from rich.console import Console

        with Console(stderr=True).status(what, spinner="line") as status:
            yield lambda usage: status.update(f"{what}: {_text(usage)}")
        return
    last_s = time.monotonic()

    def say(usage: Usage) -> None:
        nonlocal last_s
        if time.monotonic() >= last_s + _PLAIN_PERIOD_S:
            last_s = time.monotonic()
            with output.not_essential():
                output.say(f"{what}: {_text(usage)}")

    yield say


def _text(usage: Usage) -> str:
    return f"{usage.time_s:.0f} s, {usage.memory_bytes / _GIB:.1f} GiB"
