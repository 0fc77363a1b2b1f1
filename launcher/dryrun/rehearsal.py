"""The run in miniature: once to its end, once with a host killed and brought back, and whether they agree.

Both are `muster launch` of a recipe file, so launcher, agents and trainers are those of any local run.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from launcher.dryrun.checks import Seen, skipped, staged
from launcher.dryrun.children import Child, child
from launcher.dryrun.ends import differences, read_end, summarized
from launcher.dryrun.report import Outcome, Stage
from launcher.orphans import host_processes
from launcher.processes import is_running, signal_process
from launcher.rundir import RunDir, committed_step
from launcher.storage import open_storage
from recipes.contract import ExitCode, host_names
from recipes.errors import UserError
from recipes.hardware import slice_shape
from recipes.load import recipe_to_dict
from recipes.schema import Recipe

WHOLE, CUT = "whole", "cut"
"""Names of the two runs."""
_LOOK_S = 0.01
"""Between two looks for a checkpoint: the rest of such a run may take less than a second."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """Where a rehearsal runs: recipes, run directories and what `muster launch` said lie side by side."""

    recipe: Recipe
    """In miniature."""
    directory: Path
    env: Mapping[str, str]

    def run(self, name: str) -> RunDir:
        return RunDir(open_storage(str(self.directory / name)))

    def launch(self, name: str) -> AbstractContextManager[Child]:
        """`muster launch` of the miniature as the run ``name``."""
        path = self.directory / f"{name}.yaml"
        run = dataclasses.replace(self.recipe.run, name=None, root=str(self.directory))
        keys = recipe_to_dict(dataclasses.replace(self.recipe, run=run))
        keys.pop("name")
        # JSON is YAML in which no text can be taken for a number.
        path.write_text(json.dumps(keys, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return child(["launch", str(path), "--json"], directory=self.directory, name=name, env=self.env)

    @property
    def last_host(self) -> str:
        hosts = slice_shape(self.recipe.hardware).num_hosts
        return host_names(self.recipe.multislice.num_slices, hosts)[-1]


def rehearse(lab: Lab) -> Iterator[Stage]:
    """Each stage when it has ended."""
    whole = staged("run", lambda: _run_whole(lab))
    yield whole
    if whole.outcome != Outcome.OK:
        yield from map(_no, ("kill", "resume", "compare"))
        return
    with lab.launch(CUT) as launch:
        kill = staged("kill", lambda: _kill_last_host(launch, lab))
        yield kill
        was_killed = kill.outcome == Outcome.OK
        resume = staged("resume", lambda: _see_resumed(launch, lab)) if was_killed else _no("resume")
        yield resume
    yield staged("compare", lambda: _compare(lab)) if resume.outcome == Outcome.OK else _no("compare")


def _no(name: str) -> Stage:
    return skipped(name, "what it builds on failed")


def _run_whole(lab: Lab) -> Seen:
    with lab.launch(WHOLE) as launch:
        _check_complete(launch, lab, WHOLE)
    answer = launch.answer()
    number, loss = answer["num_attempts"], answer["loss"]
    at_the_end = f", train loss {loss:.3f} at the end" if isinstance(loss, float) else ""
    # A busy machine may lose a host by itself; what is compared does not depend on it.
    again = f" in {number} attempts" if number != 1 else ""
    return Seen(detail=f"{lab.recipe.train.num_steps} steps{again}{at_the_end}")


def _check_complete(launch: Child, lab: Lab, name: str) -> None:
    code = launch.wait()
    if code == ExitCode.COMPLETE:
        return
    answer = launch.answer()
    if not answer.get("reason"):
        raise launch.error()
    hint = answer.get("hint") or f"`muster logs {lab.directory / name}` shows what it said"
    raise UserError(str(answer["reason"]), hint=str(hint), exit_code=code)


def _kill_last_host(launch: Child, lab: Lab) -> Seen:
    """SIGKILL to agent and trainer, once a checkpoint is committed: a machine that is gone."""
    run = lab.run(CUT)
    while (saved := committed_step(run.storage)) < 0:
        if launch.poll() is not None:
            _check_complete(launch, lab, CUT)
            raise _not_killed()
        time.sleep(_LOOK_S)
    host = lab.last_host
    noted = host_processes(run.storage, max(run.attempts()))[host]
    killed = [each for each in (noted.agent, noted.trainer) if each is not None and is_running(each)]
    for process in killed:
        signal_process(process.pid, signal.SIGKILL)
    if not killed:
        raise _not_killed()
    return Seen(detail=f"{host} killed once step {saved} was saved")


def _not_killed() -> UserError:
    return UserError(
        "the run was over before a host could be killed",
        hint="try again while this machine is less busy",
        exit_code=ExitCode.INFRASTRUCTURE,
    )


def _see_resumed(launch: Child, lab: Lab) -> Seen:
    _check_complete(launch, lab, CUT)
    run = lab.run(CUT)
    number = max(run.attempts())
    start = run.attempt_start(number)
    if number == 1 or start is None:
        raise _not_killed()
    if start.from_step < 0:
        raise UserError(
            "the run began anew though it had a checkpoint",
            hint=f"`muster logs {lab.directory / CUT}` shows why",
            exit_code=ExitCode.EXPERIMENT_FAILED,
        )
    return Seen(detail=f"attempt {number} from step {start.from_step} to {lab.recipe.train.num_steps}")


def _compare(lab: Lab) -> Seen:
    num_steps = lab.recipe.train.num_steps
    whole, cut = (read_end(lab.directory / name, num_steps) for name in (WHOLE, CUT))
    if found := differences(whole, cut):
        raise UserError(
            f"the resumed run is another one: {summarized(found)}",
            hint="whatever differs is not in the checkpoint, or is not a function of seed and step",
            exit_code=ExitCode.EXPERIMENT_FAILED,
        )
    return Seen(detail=f"{len(whole.metrics)} metrics and {len(whole.arrays)} arrays equal bit for bit")
