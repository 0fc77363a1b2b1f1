"""Host rows -> sharded device batch. Each process reads only the rows that its devices need."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from trainer.program import Batch

_Index = tuple[slice, ...] | None
"""Part of an array that one device holds; None for a scalar, which a batch is not."""


class Feed:
    """Places one global batch; ``rows`` says which of its sequences this process must read."""

    def __init__(self, abstract: Batch) -> None:
        leaf = abstract.tokens_abt
        self._shape, self._sharding = leaf.shape, leaf.sharding
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        self.rows: Sequence[int] = sorted({int(row) for index in indices for row in self._rows(index).flat})
        """Indices into the global batch, ascending."""
        self._position = np.full(self._shape[0] * self._shape[1], -1)
        self._position[self.rows] = np.arange(len(self.rows))

    def place(self, sequences: np.ndarray) -> Batch:
        """``sequences``: int32 (len(rows), t + 1), in the order of ``rows``."""
        return Batch(self._put(sequences[:, :-1]), self._put(sequences[:, 1:]))

    def _put(self, tokens: np.ndarray) -> jax.Array:
        def shard(index: _Index) -> np.ndarray:
            positions = self._position[self._rows(index)]
            return np.ascontiguousarray(tokens[positions][..., index[2] if index else slice(None)])

        return jax.make_array_from_callback(self._shape, self._sharding, shard)

    def _rows(self, index: _Index) -> np.ndarray:
        """Rows of the global batch behind one device's part, as (parts, rows of a part)."""
        rows = np.arange(self._shape[0] * self._shape[1]).reshape(self._shape[:2])
        return rows[index[:2]] if index else rows
