"""One asynchronous save at a time, and the proof that it was committed.

Orbax's own account of a save cannot be trusted: after a failed write its manager names the lost step
as the latest. So a thread waits for the save, looks for the commit file, then removes old steps; the
training loop asks for the outcome at every step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainer.checkpoint_faults import SaveFailed, certain_user_error
from trainer.checkpoint_store import MANIFEST_ITEM, STATE_ITEM, CheckpointStore

_log = logging.getLogger(__name__)


class Writer:
    """Saves states to a store. Every process calls it alike."""

    def __init__(self, store: CheckpointStore, *, keep: int) -> None:
        self._store = store
        self._keep = keep
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{
                    STATE_ITEM: ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
                    MANIFEST_ITEM: ocp.JsonCheckpointHandler(),
                }
            ),
            # A folder that cannot be made is then reported at once, not after a timeout.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._waiter: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.committed_step = -1
        """Newest step known to be committed; -1 when none."""
        self.newest_step = -1
        """Newest step committed or being saved."""

    def start(self, step: int, tree: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Begin to save; returns when the arrays may be overwritten."""
        if self._waiter is not None:
            self.wait()
        if jax.process_index() == 0 and self._store.is_committed(step):
            raise SaveFailed(
                f"checkpoint {self._store.path(step)} exists already", hint="is another run writing here?"
            )
        self.newest_step = step
        try:
            self._checkpointer.save(
                self._store.path(step),
                args=ocp.args.Composite(
                    **{STATE_ITEM: ocp.args.PyTreeSave(tree), MANIFEST_ITEM: ocp.args.JsonSave(manifest)}
                ),
                force=True,  # what a killed save left at this step is in the way
            )
        except Exception as error:
            raise self._failed(error) from error
        self._waiter = threading.Thread(
            target=self._await_commit, args=(step,), name="checkpoint-commit", daemon=True
        )
        self._waiter.start()

    def poll(self) -> None:
        """Raise SaveFailed if the save under way has failed; never waits."""
        if self._waiter is not None and not self._waiter.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way and raise SaveFailed if it failed."""
        if self._waiter is None:
            return
        self._waiter.join()
        self._waiter = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise self._failed(failure) from failure
        self.committed_step = self.newest_step

    def close(self) -> None:
        """Wait for the save under way, raise SaveFailed if it failed, and free what is held."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _failed(self, error: BaseException) -> SaveFailed:
        doing = f"saving checkpoint {self._store.path(self.newest_step)}"
        failure = certain_user_error(error, doing, kind=SaveFailed)
        assert isinstance(failure, SaveFailed)
        return failure

    def _await_commit(self, step: int) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if jax.process_index() != 0:
                return  # Orbax lets the others go on only after process 0 has committed
            if not self._store.is_committed(step):
                raise RuntimeError("the save ended without an error, but its commit file is not there")
        except BaseException as error:
            self._failure = error
            return
        try:
            for old in self._store.committed_steps()[: -self._keep]:
                self._store.remove(old)
            self._store.remove_leftovers()
        except Exception as error:  # the new checkpoint is safe; old ones cost space only
            _log.warning("cannot remove old checkpoints: %s", error)
