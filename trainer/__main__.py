"""Runs one host's trainer: ``python -m trainer RECIPE.yaml [--run-dir DIR]``.

Under the agent the environment says which host of which attempt this is. Alone, it is one process
with all of the recipe's devices.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import yaml

from recipes.check import check
from recipes.contract import METRICS_DIR, RECIPE_HEADER, STACKS_FILE, Env, HostContext
from recipes.errors import RecipeError, UserError
from recipes.load import recipe_from_dict
from recipes.schema import Recipe
from trainer.exits import classify, end_process, leave
from trainer.process import die_with_parent, free_address


def main() -> NoReturn:
    faulthandler.enable()
    scratch_dir = os.environ.get(Env.SCRATCH_DIR)
    _write_stacks_on_signal(scratch_dir)
    arguments = _parse(sys.argv[1:])
    try:
        recipe = read_recipe(arguments.recipe)
        context = _context(recipe, arguments.run_dir)
        scratch_dir = context.scratch_dir
        leave(_run(recipe, context))
    except BaseException as error:
        end_process(classify(error), error, scratch_dir)


def _write_stacks_on_signal(scratch_dir: str | None) -> None:
    """SIGUSR1 writes all stacks to stderr; for an agent, to a file that it finds once the signal is safe."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if scratch_dir is None:
        return
    hidden = Path(scratch_dir, f".{STACKS_FILE}")
    with contextlib.suppress(OSError):
        # The signal's handler keeps it open.
        faulthandler.register(signal.SIGUSR1, hidden.open("wb", buffering=0), all_threads=True)
        hidden.rename(hidden.with_name(STACKS_FILE))


def read_recipe(path: Path) -> Recipe:
    """Reads a resolved recipe, as ``muster show`` prints and the run directory holds.

    Raises:
      UserError: the file cannot be read, is not YAML, or is not a valid recipe.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read recipe {path}: {error}", hint="give a resolved recipe file") from error
    if isinstance(data, dict):
        # `muster show` prints neither: the name of a recipe is its file's.
        data = {"name": path.stem, **data}
        data.pop(RECIPE_HEADER, None)
    recipe = recipe_from_dict(data)
    problems = check(recipe)
    if problems:
        raise RecipeError(recipe.name, problems)
    return recipe


def _run(recipe: Recipe, context: HostContext) -> int:
    # jax takes a second to import; a bad recipe is refused before that.
    import jax

    from trainer.metrics import Reporter
    from trainer.train import train

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    with Reporter(recipe, context) as reporter:
        exit_code = train(recipe, context, reporter)
    jax.distributed.shutdown()
    print(f"{exit_code.name.lower()}: {context.run_dir}", file=sys.stderr)
    return int(exit_code)


def _context(recipe: Recipe, run_dir: str | None) -> HostContext:
    try:
        context = HostContext.from_env(os.environ)
    except ValueError as error:
        raise UserError(f"the agent's environment is incomplete: {error}") from error
    if context is not None:
        die_with_parent()
        return context
    return _standalone(run_dir or recipe.run_dir)


def _standalone(run_dir: str) -> HostContext:
    """One process without an agent: it writes metrics and progress into the run directory itself."""
    if run_dir.startswith("gs://"):
        scratch_dir = tempfile.mkdtemp(prefix="muster-")
        print(f"metrics and progress are in {scratch_dir}", file=sys.stderr)
    else:
        scratch_dir = run_dir
    return HostContext(
        run_dir=run_dir,
        attempt=1 + len(list(Path(scratch_dir, METRICS_DIR).glob("*.jsonl"))),
        slice_id=0,
        num_slices=1,
        host_id=0,
        hosts_per_slice=1,
        coordinator=free_address(),
        grace_period_s=30.0,
        scratch_dir=scratch_dir,
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", type=Path, help="resolved recipe (muster show RECIPE > recipe.yaml)")
    parser.add_argument("--run-dir", help="where to write; <run.root>/<run.name> by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
