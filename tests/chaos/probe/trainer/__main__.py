"""The real trainer, watched: what it reads, what it restores, and pauses where a test asks for them.

Nothing that it computes is touched. Environment: PROBE_OUT, a folder; PROBE_STEP_S, seconds to wait for
each batch; PROBE_HOLD, a phase in which to wait until the file ``release`` appears in PROBE_OUT.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import runpy
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax._src import compiler

from recipes.contract import Env, Phase
from trainer.checkpoints import Checkpoints
from trainer.data import BatchStream, Data
from trainer.integrity import named_leaves
from trainer.metrics import Reporter

REAL = Path(__file__).parents[4] / "trainer"
OUT = Path(os.environ["PROBE_OUT"])
STEP_S = float(os.environ["PROBE_STEP_S"])
HOLD = os.environ["PROBE_HOLD"]
WHO = "-".join(os.environ.get(name, "0") for name in (Env.ATTEMPT, Env.SLICE_ID, Env.HOST_ID))


class WatchedBatches(Iterator[Any]):
    """Notes the rows of each step, then hands the batch on."""

    def __init__(self, stream: BatchStream, first: int, rows: Sequence[int]) -> None:
        self._stream, self._steps, self._rows = stream, itertools.count(first), rows
        self._file = (OUT / f"{WHO}.rows.jsonl").open("a", buffering=1)

    def __next__(self) -> Any:
        time.sleep(STEP_S)
        batch = next(self._stream)
        digests = [hashlib.sha256(np.ascontiguousarray(row)).hexdigest()[:16] for row in batch]
        line = {"step": next(self._steps), "rows": dict(zip(self._rows, digests, strict=True))}
        self._file.write(json.dumps(line) + "\n")
        return batch

    def close(self) -> None:
        self._stream.close()


def watch_batches(original: Callable[..., BatchStream]) -> Callable[..., WatchedBatches]:
    def train_batches(self: Data, start_step: int, rows: Sequence[int]) -> WatchedBatches:
        return WatchedBatches(original(self, start_step, rows), start_step + 1, rows)

    return train_batches


def watch_restore(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore(self: Checkpoints, abstract_state: Any) -> Any:
        state = original(self, abstract_state)
        if state is not None:
            shards: dict[str, Any] = {}
            for path, leaf in named_leaves(state).items():
                for shard in leaf.addressable_shards:
                    starts = ",".join(str(index.start or 0) for index in shard.index)
                    shards[f"{path}@{starts}"] = np.asarray(shard.data)
            np.savez(OUT / f"{WHO}.restored.npz", **shards)
        return state

    return restore


def hold_phase(original: Callable[..., None]) -> Callable[..., None]:
    def phase(self: Reporter, phase: Phase) -> None:
        original(self, phase)
        while phase == HOLD and not (OUT / "release").exists():
            time.sleep(0.01)

    return phase


# On CPU each process has its own keys in the compilation cache, but only process 0 writes: let all write,
# so that a restart compiles nothing and the tests take minutes less.
compiler.distributed = types.SimpleNamespace(  # type: ignore[attr-defined,assignment]
    global_state=types.SimpleNamespace(process_id=0, client=None)
)
Data.train_batches = watch_batches(Data.train_batches)  # type: ignore[assignment,method-assign]
Checkpoints.restore = watch_restore(Checkpoints.restore)  # type: ignore[method-assign]
Reporter.phase = hold_phase(Reporter.phase)  # type: ignore[method-assign]
runpy.run_path(str(REAL / "__main__.py"), run_name="__main__")
