"""Saving and restoring the training state, so that no kill, fault or flipped bit loses a run.

Orbax writes and reads the arrays (asynchronously, OCDBT + Zarr3). This module decides what counts: a
save counts when its commit is seen, a checkpoint counts when every fingerprint fits, and a damaged one
is moved to quarantine, never deleted, and the one before it is used. See docs/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from jax.experimental import multihost_utils

from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.schema import CheckpointConfig
from trainer import integrity
from trainer.checkpoint_faults import SaveFailed, on_first
from trainer.checkpoint_fork import read_fork, read_source
from trainer.checkpoint_reader import Expected, Reader, State
from trainer.checkpoint_schedule import Schedule
from trainer.checkpoint_store import CheckpointStore
from trainer.checkpoint_writer import Writer
from trainer.coordination import Peers
from trainer.integrity import Damaged, Manifest

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run. Create and call it on every process, in the same order."""

    def __init__(
        self,
        run_dir: str,
        config: CheckpointConfig,
        *,
        recipe_fingerprint: str,
        data_fingerprint: str,
        attempt: int,
        before_save: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``before_save`` may raise to keep a state from being saved (a loss that is not finite)."""
        self._peers = Peers("checkpoints")
        # Counted apart from the step: a notice during restore would otherwise set the meeting point
        # to the first call ever, which a resumed run has long passed. Raises where there is no manager.
        self._notice_calls = 0
        multihost_utils.reached_preemption_sync_point(self._notice_calls)
        self._store = CheckpointStore(run_dir)
        self._config = config
        self._before_save = before_save
        self._recipe_fingerprint = recipe_fingerprint
        self._data_fingerprint = data_fingerprint
        self._attempt = attempt
        expected = Expected(recipe_fingerprint=recipe_fingerprint, data_fingerprint=data_fingerprint)
        self._reader = Reader(self._store, self._peers, expected, label="restore")
        self._schedule = Schedule(config, self._peers, now)
        self._writer = Writer(self._store, keep=config.keep)
        self._preempted = False
        self._prepare()

    @property
    def committed_step(self) -> int:
        """Newest step whose checkpoint is known to be committed and whole; -1 when none."""
        return self._writer.committed_step

    def restore(self, abstract_state: State) -> State | None:
        """The newest good checkpoint with the shardings of ``abstract_state``; None when there is none.

        A fork that has none yet gets its source's, as its own first checkpoint.

        Raises:
          UserError: the checkpoint is of another model or other data, or none of them is good.
        """
        for step in self._reader.committed_steps():
            try:
                state = self._reader.read(step, abstract_state)
            except Damaged as damage:
                self._quarantine(step, str(damage))
                continue
            self._writer.committed_step = self._writer.newest_step = step
            self._schedule.saved(step)
            return state
        self._refuse_to_start_over()
        return self._begin_fork(abstract_state)

    def preempted(self) -> bool:
        """Whether all processes are to stop now. Call it everywhere or nowhere, for example after
        restoring and after compiling, when there is nothing to save yet."""
        self._notice_calls += 1
        if multihost_utils.reached_preemption_sync_point(self._notice_calls):
            self._preempted = True
        return self._preempted

    def after_step(self, step: int, state: Any, *, last: bool = False) -> bool:
        """Save if it is time; whether the run is preempted (and then ``state`` is committed).

        Raises:
          SaveFailed: an earlier save, or this one, did not reach storage.
        """
        try:
            self._writer.poll()
            preempted = self.preempted()
            due = self._schedule.is_due(step)
            if (due or last or preempted) and step != self._writer.newest_step:
                self._save(step, state)
            if last or preempted:
                self._writer.wait()
        except SaveFailed as failure:
            if self._preempted:
                # A run that was told to stop must not be failed for good.
                failure.exit_code = ExitCode.INFRASTRUCTURE
            raise
        return preempted

    def close(self) -> None:
        """Wait for the save under way; raises SaveFailed if it failed."""
        self._writer.close()

    def _prepare(self) -> None:
        def prepare() -> str:
            self._store.prepare()
            return ""

        on_first(self._peers, "prepare", prepare, doing=f"cannot write to {self._store.root}")

    def _refuse_to_start_over(self) -> None:
        """Where there were checkpoints and none is good, starting from scratch is not for us to decide."""

        def look() -> str:
            unfinished = self._store.unfinished()
            if unfinished:
                _log.warning(
                    "starting again: in %s are only unfinished saves: %s", self._store.root, unfinished
                )
            return json.dumps(self._store.quarantined())

        moved = json.loads(
            on_first(self._peers, "restore/quarantined", look, doing=f"cannot list {self._store.root}")
        )
        if moved:
            raise UserError(
                f"no checkpoint of this run is whole: {len(moved)} were damaged and are kept as "
                + ", ".join(moved),
                hint=f"put a good copy into {self._store.root}, or start again under another run name",
            )

    def _begin_fork(self, abstract_state: State) -> State | None:
        fork = read_fork(self._store, self._peers)
        if fork is None:
            return None
        state = read_source(fork, self._peers, abstract_state)
        # From here on it stands alone: the source may go on, and remove that step.
        self._save(fork.step, state)
        self._writer.wait()
        return state

    def _quarantine(self, step: int, reason: str) -> None:
        def move() -> str:
            note = {"step": step, "found_by_attempt": self._attempt, "reason": reason, "time_s": time.time()}
            return self._store.quarantine(step, self._attempt, note)

        doing = "cannot move a damaged checkpoint"
        target = on_first(self._peers, f"restore/{step}/quarantine", move, doing=doing)
        _log.warning("checkpoint %d is damaged (%s): moved to %s, using an older one", step, reason, target)

    def _save(self, step: int, state: Any) -> None:
        self._before_save()
        self._writer.wait()
        leaves = integrity.named_leaves(state)
        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            recipe_fingerprint=self._recipe_fingerprint,
            data_fingerprint=self._data_fingerprint,
            leaves=integrity.describe(leaves),
        )
        self._writer.start(step, integrity.nested(leaves), manifest.to_dict())
        self._schedule.saved(step)
