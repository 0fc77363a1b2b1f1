"""Compiles shipped TPU recipes ahead of time: ``python -m benchmarks compiled [RECIPE ...] [--markdown]``.

Each is compiled in a process of its own, as ``python -m trainer.aot`` does, with the flags of the recipe.
What is printed is what the compiler says of one device; docs/compiled.md says what each column is.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from launcher.compose import compose
from launcher.preflight.collectives import traffic
from launcher.preflight.compiled import Analysis, Compiled, analyze, read_compiled
from recipes.errors import UserError
from recipes.flags import libtpu_env
from recipes.hardware import CPU
from recipes.load import recipe_to_dict
from recipes.schema import Recipe

SHIPPED = Path(__file__).resolve().parents[1] / "recipes"
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One recipe: what was compiled, or why it was not."""

    recipe: Recipe
    compiled: Compiled | None = None
    analysis: Analysis | None = None
    problem: str = ""


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    try:
        recipes = [compose(name, []).recipe for name in options.recipes or shipped_tpu_recipes()]
    except UserError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    rows = []
    with tempfile.TemporaryDirectory(prefix="muster-compiled-") as scratch:
        for recipe in recipes:
            print(f"compiling: {recipe.name}", file=sys.stderr)
            row = measure(recipe, Path(options.out or scratch) / recipe.name)
            rows.append(row)
            print("\n".join(described(row)), file=sys.stderr if options.markdown else sys.stdout, flush=True)
    if options.markdown:
        print("\n".join([*markdown(rows), "", *markdown_collectives(rows)]))
    return 1 if any(row.problem for row in rows) else 0


def shipped_tpu_recipes() -> list[str]:
    """Names of the complete recipes that come with Muster and are for TPUs."""
    names = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    return [name for name in names if compose(name, []).recipe.hardware.generation != CPU]


def measure(recipe: Recipe, folder: Path) -> Row:
    """Compiles and analyses one recipe; its two files stay in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recipe.name}.yaml"
    path.write_text(yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "trainer.aot", str(path), "--out", str(folder)]
    done = subprocess.run(
        command,
        env={**os.environ, **libtpu_env(recipe)},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        return Row(recipe=recipe, problem=_problem(done))
    try:
        compiled = read_compiled(folder)
        return Row(recipe=recipe, compiled=compiled, analysis=analyze(compiled))
    except UserError as error:
        return Row(recipe=recipe, problem=error.message)


def described(row: Row) -> Iterator[str]:
    """One recipe in a few lines."""
    yield row.recipe.name
    if row.compiled is None or row.analysis is None:
        yield f"  {row.problem}"
        return
    memory, cost = row.compiled.memory, row.analysis.cost
    yield (
        f"  compiled in {row.compiled.lower_s + row.compiled.compile_s:.0f} s with"
        f" {row.compiled.peak_rss_bytes / _GIB:.1f} GiB"
    )
    yield (
        f"  arguments {_gib(memory.argument_bytes)}, temporaries {_gib(memory.temp_bytes)},"
        f" host {_gib(memory.host_bytes)}; {_gib(row.analysis.hbm_bytes)} of {_usable(row.compiled)} GiB HBM"
    )
    yield f"  {cost.estimated_cycles:.4g} cycles, {cost.matmul_flops:.4g} FLOP outside of kernels"
    for kernel in cost.kernels:
        shapes = ", ".join(map(str, kernel.results))
        yield f"  kernel {kernel.name}: {kernel.count} x {shapes}"
    for (axes, kind), each in traffic(row.analysis.collectives).items():
        yield (
            f"  {axes} {kind}: {each.count} x, {each.total_bytes / _GIB:.3g} GiB,"
            f" {each.sync_bytes / _GIB:.3g} of it synchronous"
        )
    if loops := row.analysis.schedule.uncounted_loops:
        yield f"  loops whose rounds could not be counted: {', '.join(loops)}"


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The table of docs/compiled.md."""
    yield (
        "| recipe | devices | arguments, GiB | temporaries, GiB | host, GiB | HBM, GiB of usable"
        " | matmul FLOP | estimated cycles | to host, from host, GiB | compiled in, s |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        if row.compiled is None or row.analysis is None:
            yield f"| {row.recipe.name} | {row.problem} |" + " |" * 8
            continue
        memory, cost, host = row.compiled.memory, row.analysis.cost, row.analysis.host
        cells = (
            row.recipe.name,
            str(len(row.compiled.mesh.device_ids)),
            _gib(memory.argument_bytes),
            _gib(memory.temp_bytes),
            _gib(memory.host_bytes),
            f"{_gib(row.analysis.hbm_bytes)} of {_usable(row.compiled)}",
            f"{cost.matmul_flops:.3g}",
            f"{cost.estimated_cycles:.3g}",
            f"{_gib(host.to_host_bytes)}, {_gib(host.from_host_bytes)}",
            f"{row.compiled.lower_s + row.compiled.compile_s:.0f}",
        )
        yield f"| {' | '.join(cells)} |"


def markdown_collectives(rows: Sequence[Row]) -> Iterator[str]:
    """The table of collectives by mesh axis in docs/compiled.md."""
    yield "| recipe | axes | collective | executions | GiB | of it synchronous |"
    yield "|---|---|---|---:|---:|---:|"
    for row in rows:
        found = traffic(row.analysis.collectives) if row.analysis else {}
        for (axes, kind), each in found.items():
            sizes = f"{each.total_bytes / _GIB:.3g} | {each.sync_bytes / _GIB:.3g}"
            yield f"| {row.recipe.name} | {axes} | {kind} | {each.count} | {sizes} |"


def _problem(done: subprocess.CompletedProcess[str]) -> str:
    """The error that the compiler's process ended with."""
    lines = done.stderr.splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {done.returncode}: {lines[-1] if lines else ''}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f}"


def _usable(compiled: Compiled) -> str:
    usable = compiled.memory.usable_hbm_bytes
    return "?" if usable is None else _gib(usable)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compiled", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="the shipped TPU recipes by default")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/compiled.md")
    parser.add_argument("--out", help="folder to keep the compiled programs in")
    return parser.parse_args(argv)
