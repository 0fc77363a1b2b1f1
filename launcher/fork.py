"""Another run from a run's newest checkpoint: what ``muster launch ... --fork NEW`` finds and refuses.

Reads the source, writes nothing: the new run is created by :func:`launcher.rundir.create_or_open`, and
the trainer fetches the state (trainer/checkpoint_fork.py).
"""

from __future__ import annotations

import dataclasses

from launcher.rundir import RunDir, committed_step
from launcher.storage import open_storage
from recipes.contract import Fork, is_run_name
from recipes.errors import UserError
from recipes.fingerprint import changes, fingerprint
from recipes.schema import Recipe


def find_fork(recipe: Recipe, name: str) -> Fork:
    """The newest committed checkpoint of the run that ``recipe`` names, for a new run ``name``.

    Raises:
      UserError: ``name`` is no name for it, or there is no such checkpoint, or nothing left to train.
    """
    if not is_run_name(name):
        raise UserError(
            f"--fork: {name!r} is not a run name", hint="run names are a-z, 0-9 and hyphens, at most 40"
        )
    source = RunDir(open_storage(recipe.run_dir))
    if name == recipe.run_name:
        raise UserError(f"--fork: {name} is the run to begin from", hint="give the new run another name")
    if not source.exists():
        raise UserError(
            f"--fork: there is no run at {source.url} to begin from",
            hint="name the run to begin from with run.name=RUN; --fork names the new one",
        )
    step = committed_step(source.storage)
    if step < 0:
        raise UserError(
            f"--fork: {source.url} has no committed checkpoint yet", hint="wait for one, or start a run anew"
        )
    if step >= recipe.train.num_steps:
        raise UserError(
            f"--fork: {source.url} is at step {step}, train.num_steps={recipe.train.num_steps} is reached",
            hint=f"give the step to train to, for example train.num_steps={step + recipe.train.num_steps}",
        )
    old = source.recipe()
    differing = (change.key for change in changes(old, recipe))
    return Fork(
        source_url=source.url,
        source_run=recipe.run_name,
        step=step,
        source_fingerprint=fingerprint(old),
        changed_keys=tuple(key for key in differing if not key.startswith("run.")),
    )


def renamed(recipe: Recipe, name: str) -> Recipe:
    """The same recipe for the run ``name``."""
    return dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, name=name))
