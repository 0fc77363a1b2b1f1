"""Profiler traces of chosen steps, as XProf and TensorBoard read them.

The first host of each slice takes them: the others run the same program. A trace is written under a hidden
name and renamed once it is complete; the agent ships it (docs/profiling.md). Whatever goes wrong with it
is said and costs traces, never the training.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import jax

from recipes.contract import PROFILES_DIR, HostContext
from recipes.schema import TrainConfig

_SUFFIXES = (".xplane.pb", ".trace.json.gz")
"""Of the profiler's files; before them is the machine's name, which hosts may share."""


class Profiler:
    """Takes the traces that a recipe asks for, of exactly the steps that it names."""

    def __init__(self, config: TrainConfig, context: HostContext) -> None:
        self._config, self._context = config, context
        self._is_on = config.profile_start_step is not None and context.host_id == 0
        self._first_step: int | None = None
        """Of the trace being taken."""

    def before_step(self, step: int, state: object) -> None:
        """Begins a trace if one begins with ``step``; everything up to ``state`` is computed before it."""
        if not self._is_on or not begins_trace(self._config, step):
            return
        # Not below: an error of the training itself is no failure of the trace.
        jax.block_until_ready(state)
        options = jax.profiler.ProfileOptions()
        # The same on all hosts, unlike a time: XProf shows the files of one folder as one run.
        options.session_id = f"attempt_{self._context.attempt:04d}_step_{step:08d}"
        try:
            jax.profiler.start_trace(self._folder(step, hidden=True), profiler_options=options)
            self._first_step = step
        except Exception as error:
            self._give_up(step, error)

    def after_step(self, step: int, state: object) -> None:
        """Ends a trace if it ends with ``step``, once ``state`` is computed."""
        first_step = self._first_step
        if first_step is None or step < first_step + self._config.profile_num_steps - 1:
            return
        jax.block_until_ready(state)
        self._first_step = None
        try:
            jax.profiler.stop_trace()
            self._complete(first_step)
        except Exception as error:
            self._give_up(first_step, error)
        else:
            print(f"profile of steps {first_step} to {step}: taken", file=sys.stderr)

    def _complete(self, first_step: int) -> None:
        hidden, folder = self._folder(first_step, hidden=True), self._folder(first_step, hidden=False)
        for path in [path for path in hidden.rglob("*") if path.is_file()]:
            suffix = next((known for known in _SUFFIXES if path.name.endswith(known)), f".{path.name}")
            path.rename(path.with_name(f"{self._context.host_name}{suffix}"))
        if folder.exists():
            # A trainer without an agent was started again in the same folder.
            shutil.rmtree(folder)
        hidden.rename(folder)

    def _give_up(self, first_step: int, error: Exception) -> None:
        """The profiler may still be running, so there are no traces from here on."""
        self._is_on = False
        shutil.rmtree(self._folder(first_step, hidden=True), ignore_errors=True)
        reason = str(error).partition("\n")[0] or type(error).__name__
        logging.getLogger(__name__).warning("no profile of step %d and later: %s", first_step, reason)

    def _folder(self, first_step: int, *, hidden: bool) -> Path:
        attempt = Path(self._context.scratch_dir, PROFILES_DIR, f"attempt-{self._context.attempt:04d}")
        return attempt / f"{'.' if hidden else ''}step-{first_step:08d}"


def begins_trace(config: TrainConfig, step: int) -> bool:
    """Whether a trace begins with ``step`` and ends before the run does."""
    if config.profile_start_step is None or step + config.profile_num_steps - 1 > config.num_steps:
        return False
    since = step - config.profile_start_step
    interval = config.profile_interval_steps
    return since == 0 or (interval is not None and since > 0 and since % interval == 0)
