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
        rows_ab = np.arange(self._shape[0] * self._shape[1]).reshape(self._shape[:2])
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        self.rows: Sequence[int] = sorted({int(row) for i in indices for row in _part(rows_ab, i).flat})
        """Indices into the global batch, ascending."""
        self._positions_ab = np.searchsorted(self.rows, rows_ab)
        """Where each row of the batch is in ``rows``; only rows that are there are asked for."""

    def place(self, sequences: np.ndarray) -> Batch:
        """``sequences``: int32 (len(rows), t + 1), in the order of ``rows``."""
        return Batch(self._put(sequences[:, :-1]), self._put(sequences[:, 1:]))

    def _put(self, tokens: np.ndarray) -> jax.Array:
        def shard(index: _Index) -> np.ndarray:
            positions = _part(self._positions_ab, index)
            return np.ascontiguousarray(tokens[positions][..., index[2] if index else slice(None)])

        return jax.make_array_from_callback(self._shape, self._sharding, shard)


def _part(grid_ab: np.ndarray, index: _Index) -> np.ndarray:
    """What one device holds of a grid of (accumulation parts, rows of a part)."""
    return grid_ab[index[:2]] if index else grid_ab
