"""Host rows -> sharded device batch. Each process reads only the rows that its devices need."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from trainer.program import Batch


class Feed:
    """Places one global batch; ``rows`` says which of its sequences this process must read."""

    def __init__(self, abstract: Batch) -> None:
        leaf = abstract.tokens_abt
        self._shape, self._sharding = leaf.shape, leaf.sharding
        _, rows_per_part, _ = leaf.shape
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        wanted = {
            part * rows_per_part + row
            for index in indices
            for part in range(*index[0].indices(self._shape[0]))
            for row in range(*index[1].indices(rows_per_part))
        }
        self.rows: Sequence[int] = sorted(wanted)
        """Indices into the global batch, ascending."""
        self._position = {row: position for position, row in enumerate(self.rows)}

    def place(self, sequences: np.ndarray) -> Batch:
        """``sequences``: int32 (len(rows), t + 1), in the order of ``rows``."""
        return Batch(self._put(sequences[:, :-1]), self._put(sequences[:, 1:]))

    def _put(self, tokens: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...]) -> np.ndarray:
            parts = range(*index[0].indices(self._shape[0]))
            rows = range(*index[1].indices(self._shape[1]))
            wanted = [[self._position[part * self._shape[1] + row] for row in rows] for part in parts]
            return np.ascontiguousarray(tokens[np.array(wanted)][..., index[2]])

        return jax.make_array_from_callback(self._shape, self._sharding, shard)
