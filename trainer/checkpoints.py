"""Saving and restoring the training state, so that no kill, fault or flipped bit loses a run.

Orbax writes and reads the arrays (asynchronously, OCDBT + Zarr3). This module decides what counts: a
save counts when its commit is seen, a checkpoint counts when every fingerprint fits, and a damaged one
is moved to quarantine, never deleted, and the one before it is used. See docs/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.schema import CheckpointConfig
from trainer import integrity
from trainer.checkpoint_faults import SaveFailed, certain_user_error, decode, encode, reading_fault
from trainer.checkpoint_schedule import Schedule
from trainer.checkpoint_store import STATE_ITEM, CheckpointStore
from trainer.checkpoint_writer import Writer
from trainer.coordination import Peers
from trainer.integrity import Damaged, Manifest

_log = logging.getLogger(__name__)

State = TypeVar("State")
"""Any pytree of jax.Array."""


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

        Raises:
          UserError: the checkpoint is of another model or other data, or none of them is good.
        """
        for step in self._committed_steps():
            try:
                state = self._restore_step(step, abstract_state)
            except Damaged as damage:
                self._quarantine(step, str(damage))
                continue
            self._writer.committed_step = self._writer.newest_step = step
            self._schedule.saved(step)
            return state
        self._refuse_to_start_over()
        return None

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

        self._on_first("prepare", prepare, doing=f"cannot write to {self._store.root}")

    def _on_first(self, label: str, do: Callable[[], str], *, doing: str) -> str:
        """What ``do`` gives on process 0, on all of them; its error is an error on all of them."""
        answer = None
        if self._peers.rank == 0:
            try:
                answer = json.dumps([do(), ""])
            except Exception as error:  # the others wait for an answer, whatever happened
                answer = json.dumps(["", encode(certain_user_error(error, doing))])
        text, problem = json.loads(self._peers.share(label, answer))
        if problem:
            raise decode(problem)
        return str(text)

    def _committed_steps(self) -> list[int]:
        """Newest first."""
        doing = f"cannot list {self._store.root}"
        text = self._on_first(
            "restore/steps", lambda: json.dumps(self._store.committed_steps()[::-1]), doing=doing
        )
        steps: list[int] = json.loads(text)
        return steps

    def _refuse_to_start_over(self) -> None:
        """Where there were checkpoints and none is good, starting from scratch is not for us to decide."""

        def look() -> str:
            unfinished = self._store.unfinished()
            if unfinished:
                _log.warning(
                    "starting from step 0: in %s only unfinished saves: %s", self._store.root, unfinished
                )
            return json.dumps(self._store.quarantined())

        moved = json.loads(
            self._on_first("restore/quarantined", look, doing=f"cannot list {self._store.root}")
        )
        if moved:
            raise UserError(
                f"no checkpoint of this run is whole: {len(moved)} were damaged and are kept as "
                + ", ".join(moved),
                hint=f"put a good copy into {self._store.root}, or start again under another run name",
            )

    def _restore_step(self, step: int, abstract_state: State) -> State:
        manifest = Manifest.parse(self._read_manifest(step))
        if manifest.step != step:
            raise Damaged(f"it was saved as step {manifest.step}")
        wanted = integrity.named_leaves(abstract_state)
        self._check_same_run(step, wanted, manifest)
        leaves: Mapping[str, jax.Array] = {}
        problem = ""
        try:
            leaves = _read_leaves(self._store, step, wanted)
        except Exception as error:  # damage shows as any exception; the peers must hear of it
            problem = encode(reading_fault(error, "reading it"))
        # Fingerprints are computed together, so first make sure that every process has its arrays.
        self._agree(f"{step}/read", problem)
        bad = integrity.altered(leaves, manifest)
        problem = encode(Damaged(f"altered data in {', '.join(bad[:5])}")) if bad else ""
        self._agree(f"{step}/verified", problem)
        state: State = jax.tree.unflatten(jax.tree.structure(abstract_state), list(leaves.values()))
        return state

    def _read_manifest(self, step: int) -> str:
        def read() -> str:
            try:
                return json.dumps([self._store.read_manifest(step), ""])
            except Exception as error:
                return json.dumps(["", encode(reading_fault(error, "reading its manifest"))])

        text, problem = json.loads(self._on_first(f"restore/{step}/manifest", read, doing="reading"))
        if problem:
            raise decode(problem)
        return str(text)

    def _agree(self, label: str, problem: str) -> None:
        """Raise on every process what any process reports."""
        for report in self._peers.gather(f"restore/{label}", problem):
            if report:
                raise decode(report)

    def _check_same_run(self, step: int, wanted: Mapping[str, Any], manifest: Manifest) -> None:
        found = integrity.differences(wanted, manifest)
        where = f"checkpoint {self._store.path(step)}"
        if found:
            more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(
                f"{where} is of another model:\n  " + "\n  ".join(found[:5]) + more,
                hint="start under another run name, or use the recipe that the run began with",
            )
        if manifest.data_fingerprint != self._data_fingerprint:
            raise UserError(
                f"the data changed since {where} was saved",
                hint="bring the old data back, or start under another run name",
            )
        if manifest.recipe_fingerprint != self._recipe_fingerprint:
            raise UserError(
                f"{where} is of another experiment: its recipe has other semantic keys",
                hint="use the recipe that the run began with, or another run name",
            )

    def _quarantine(self, step: int, reason: str) -> None:
        def move() -> str:
            note = {"step": step, "found_by_attempt": self._attempt, "reason": reason, "time_s": time.time()}
            return self._store.quarantine(step, self._attempt, note)

        target = self._on_first(f"restore/{step}/quarantine", move, doing="cannot move a damaged checkpoint")
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
        self._writer.start(step, _nested(leaves), manifest.to_dict())
        self._schedule.saved(step)


def _read_leaves(store: CheckpointStore, step: int, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays of a checkpoint with the shardings of ``wanted``.

    By the handler alone: the checkpointer around it ends with a barrier, where the others would wait
    for a process that failed.
    """
    tree = _nested(wanted)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    restored = handler.restore(
        store.path(step) / STATE_ITEM, args=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args)
    )
    found = integrity.named_leaves(restored)
    return {path: found[path] for path in wanted}


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested dicts by path: what is saved does not depend on the classes of the state."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        folder = root
        for key in folders:
            folder = folder.setdefault(key, {})
        folder[name] = leaf
    return root
