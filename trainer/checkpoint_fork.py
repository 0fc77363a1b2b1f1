"""The first state of a run that was forked from another one: a checkpoint of the other run.

``muster launch ... --fork NEW`` leaves ``fork.json`` in the new run directory, which names it. The
other run is only read.
"""

from __future__ import annotations

import json

from recipes.contract import Fork
from recipes.errors import UserError
from trainer.checkpoint_faults import on_first
from trainer.checkpoint_reader import Expected, Reader, State
from trainer.checkpoint_store import CheckpointStore
from trainer.coordination import Peers
from trainer.integrity import Damaged

HINT = "fork again under another name"


def read_fork(store: CheckpointStore, peers: Peers) -> Fork | None:
    """What the run of ``store`` begins with, on every process; None when it is no fork."""
    text = on_first(
        peers, "fork/read", store.read_fork, doing=f"cannot read what {store.root} was forked from"
    )
    return parse_fork(text) if text else None


def parse_fork(text: str) -> Fork:
    """The body of fork.json.

    Raises:
      UserError: it is not what the launcher wrote.
    """
    try:
        body = json.loads(text)
        return Fork(
            source_url=str(body["source_url"]),
            source_run=str(body["source_run"]),
            step=int(body["step"]),
            source_fingerprint=str(body["source_fingerprint"]),
            changed_keys=tuple(body["changed_keys"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            "fork.json in the run directory is damaged", hint="remove it: the next launch writes it again"
        ) from error


def read_source(fork: Fork, peers: Peers, abstract_state: State) -> State:
    """The state that ``fork`` names, with the shardings of ``abstract_state``.

    Raises:
      UserError: it is gone, damaged, or its arrays are not those of this run's model and optimizer.
    """
    store = CheckpointStore(fork.source_url)
    expected = Expected(
        recipe_fingerprint=fork.source_fingerprint,
        data_fingerprint=None,
        hint="a fork keeps the arrays of model and optimizer as they are; " + HINT,
    )
    reader = Reader(store, peers, expected, label="fork/source")
    if fork.step not in reader.committed_steps():
        raise UserError(
            f"checkpoint {store.path(fork.step)}, which this run begins with, is not there any more",
            hint=HINT,
        )
    try:
        return reader.read(fork.step, abstract_state)
    except Damaged as damage:
        raise UserError(
            f"checkpoint {store.path(fork.step)}, which this run begins with, is damaged: {damage}",
            hint=f"launch {fork.source_run} once more, which moves it out of the way, then {HINT}",
        ) from damage
