"""Reads checkpoints of one store, on all processes together, and proves that they are whole.

What one process sees goes wrong on all of them: damage is raised as Damaged, a checkpoint that is none
of ours as UserError. Nothing in storage is changed, so the store may be another run's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from recipes.errors import UserError
from trainer import integrity
from trainer.checkpoint_faults import agree, decode, encode, on_first, reading_fault
from trainer.checkpoint_store import STATE_ITEM, CheckpointStore
from trainer.coordination import Peers
from trainer.integrity import Damaged, Manifest

State = TypeVar("State")
"""Any pytree of jax.Array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the manifests of a store must name."""

    recipe_fingerprint: str
    data_fingerprint: str | None
    """None: any data will do."""
    hint: str = ""
    """What to do about another model or experiment; empty for what to do about this run's own."""


class Reader:
    """Reads one store. Call it on every process, in the same order."""

    def __init__(self, store: CheckpointStore, peers: Peers, expected: Expected, *, label: str) -> None:
        """``label`` must be new among ``peers``."""
        self._store, self._peers, self._expected, self._label = store, peers, expected, label

    def committed_steps(self) -> list[int]:
        """Newest first."""
        text = on_first(
            self._peers,
            f"{self._label}/steps",
            lambda: json.dumps(self._store.committed_steps()[::-1]),
            doing=f"cannot list {self._store.root}",
        )
        steps: list[int] = json.loads(text)
        return steps

    def read(self, step: int, abstract_state: State) -> State:
        """A committed step with the shardings of ``abstract_state``.

        Raises:
          Damaged: it is not what was saved.
          UserError: it is of another model, other data or another experiment; storage did not answer.
        """
        manifest = Manifest.parse(self._read_manifest(step))
        if manifest.step != step:
            raise Damaged(f"it was saved as step {manifest.step}")
        wanted = integrity.named_leaves(abstract_state)
        self._check_expected(step, wanted, manifest)
        leaves: Mapping[str, jax.Array] = {}
        problem = ""
        try:
            leaves = _read_leaves(self._store, step, wanted)
        except Exception as error:  # damage shows as any exception; the peers must hear of it
            problem = encode(reading_fault(error, "reading it"))
        # Fingerprints are computed together, so first make sure that every process has its arrays.
        agree(self._peers, f"{self._label}/{step}/read", problem)
        bad = integrity.altered(leaves, manifest)
        problem = encode(Damaged(f"altered data in {', '.join(bad[:5])}")) if bad else ""
        agree(self._peers, f"{self._label}/{step}/verified", problem)
        state: State = jax.tree.unflatten(jax.tree.structure(abstract_state), list(leaves.values()))
        return state

    def _read_manifest(self, step: int) -> str:
        def read() -> str:
            try:
                return json.dumps([self._store.read_manifest(step), ""])
            except Exception as error:
                return json.dumps(["", encode(reading_fault(error, "reading its manifest"))])

        label = f"{self._label}/{step}/manifest"
        text, problem = json.loads(on_first(self._peers, label, read, doing="reading"))
        if problem:
            raise decode(problem)
        return str(text)

    def _check_expected(self, step: int, wanted: Mapping[str, Any], manifest: Manifest) -> None:
        found, expected = integrity.differences(wanted, manifest), self._expected
        where = f"checkpoint {self._store.path(step)}"
        if found:
            more = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(
                f"{where} is of another model:\n  " + "\n  ".join(found[:5]) + more,
                hint=expected.hint
                or "start under another run name, or use the recipe that the run began with",
            )
        if expected.data_fingerprint not in (None, manifest.data_fingerprint):
            raise UserError(
                f"the data changed since {where} was saved",
                hint="bring the old data back, or start under another run name",
            )
        if manifest.recipe_fingerprint != expected.recipe_fingerprint:
            raise UserError(
                f"{where} is of another experiment: its recipe has other semantic keys",
                hint=expected.hint or "use the recipe that the run began with, or another run name",
            )


def _read_leaves(store: CheckpointStore, step: int, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays of a checkpoint with the shardings of ``wanted``.

    By the handler alone: the checkpointer around it ends with a barrier, where the others would wait
    for a process that failed.
    """
    tree = integrity.nested(wanted)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    restored = handler.restore(
        store.path(step) / STATE_ITEM, args=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args)
    )
    found = integrity.named_leaves(restored)
    return {path: found[path] for path in wanted}
