"""Batches in a global order that depends on seed and step alone, read ahead by Grain.

Row ``row`` of global batch ``step`` is record ``step * global_batch_size + row`` of an endless,
shuffled sequence of epochs. A host asks for its rows; nothing depends on how many hosts there are,
and the only position is the step.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grain
import numpy as np

from recipes.errors import UserError
from trainer.data.corpus import Sequences, Tokens

_MAX_SEQUENCES = 2**32
_MAX_THREADS = 4
_EVAL_ORDER = "held-out"


class BatchStream(Iterator[Tokens]):
    """Batches read ahead by threads, which end with the stream, at ``close`` or at its last batch."""

    def __init__(self, batches: Any, prefetch_batches: int) -> None:
        options = grain.ReadOptions(
            num_threads=min(prefetch_batches, _MAX_THREADS), prefetch_buffer_size=prefetch_batches
        )
        self._batches = iter(batches.to_iter_dataset(options))
        self._closed = False

    def __next__(self) -> Tokens:
        if self._closed:
            raise StopIteration
        try:
            batch: Tokens = next(self._batches)
        except BaseException:
            self.close()
            raise
        return batch

    def close(self) -> None:
        """Stop reading ahead; further batches are not given."""
        self._closed = True
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """One opened data set, as one recipe uses it."""

    fingerprint: str
    """Hex digest of everything that decides which tokens are in which row of which batch."""
    train_tokens: int
    """Tokens predicted in one epoch."""
    eval_tokens: int
    """Held-out tokens that there are to predict."""
    eval_unigram_entropy_nats: float | None
    """Entropy of the held-out byte frequencies: what a model without context can reach. None where
    tokens are not bytes."""
    global_batch_size: int
    eval_num_batches: int
    prefetch_batches: int
    _train: Any = field(repr=False)
    _held_out: Any = field(repr=False)

    def train_batches(self, start_step: int, rows: Sequence[int]) -> BatchStream:
        """Endless global batches from ``start_step`` on, of each the given rows."""
        steps = grain.MapDataset.range(start_step, sys.maxsize)
        return BatchStream(steps.map(self._reader(self._train, rows)), self.prefetch_batches)

    def eval_batches(self, rows: Sequence[int]) -> BatchStream:
        """The held-out batches, of each the given rows; the same at every call and for every seed.

        Where fewer sequences are held out than the batches hold, they come again in another order.
        """
        steps = grain.MapDataset.range(self.eval_num_batches)
        return BatchStream(steps.map(self._reader(self._held_out, rows)), self.prefetch_batches)

    def _reader(self, records: Any, rows: Sequence[int]) -> Callable[[int], Tokens]:
        wrong = [row for row in rows if not 0 <= row < self.global_batch_size]
        if wrong or not rows:
            raise ValueError(f"rows {wrong} of a global batch of {self.global_batch_size}")

        def read(step: int) -> Tokens:
            first = step * self.global_batch_size
            return np.stack([records[first + row] for row in rows])

        return read


def train_order(sequences: Sequences, *, seed: int, shuffle: bool) -> Any:
    """Endless epochs of ``sequences``; each epoch holds every one exactly once.

    Raises:
      UserError: there are more than Grain can shuffle.
    """
    source = _source(sequences)
    return (source.shuffle(seed=_order_seed(str(seed))) if shuffle else source).repeat()


def eval_order(sequences: Sequences) -> Any:
    """Endless epochs of held-out ``sequences`` in an order that no recipe changes.

    Raises:
      UserError: there are more than Grain can shuffle.
    """
    return _source(sequences).shuffle(seed=_order_seed(_EVAL_ORDER)).repeat()


def _source(sequences: Sequences) -> Any:
    # Grain's shuffle takes 32-bit indices, and silently repeats some records beyond them.
    if len(sequences) > _MAX_SEQUENCES:
        raise UserError(
            f"the data hold {len(sequences)} sequences, more than {_MAX_SEQUENCES}",
            hint="use a longer train.sequence_length or less data",
        )
    return grain.MapDataset.source(sequences)


def _order_seed(name: str) -> int:
    # Grain shuffles epoch e with seed + e: neighbouring seeds would share all but one epoch.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
