"""What the processes of one attempt tell each other on the host, without touching a device.

Uses the key-value store of JAX's coordination service (always there: the caller initialises
`jax.distributed` even for one process). Every wait is named and timed. A peer that dies ends all
processes through the service's heartbeat, so a wait is never longer than that or its limit.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax._src import distributed  # the store has no public name; Orbax reaches it the same way

WAIT_TIMEOUT_S = 1200.0
"""Longest wait for a peer that is alive; the same as Orbax's own limit for one save."""

_instances = itertools.count()


class Peers:
    """A private corner of the key-value store. Create it on every process, in the same order."""

    def __init__(self, purpose: str) -> None:
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError("call jax.distributed.initialize() first, also for one process")
        self._client: Any = client
        self._root = f"muster/{purpose}/{next(_instances)}"
        self.rank = jax.process_index()
        self.count = jax.process_count()

    def share(self, label: str, value: str | None) -> str:
        """The ``value`` that process 0 gives, on every process; the others wait for it.

        Others pass None. ``label`` must be new.
        """
        key = f"{self._root}/{label}"
        if self.rank == 0:
            assert value is not None
            self._client.key_value_set(key, value)
            return value
        return str(self._client.blocking_key_value_get(key, int(WAIT_TIMEOUT_S * 1000)))

    def gather(self, label: str, value: str) -> list[str]:
        """Every process's ``value`` by rank, on every process. ``label`` must be new."""
        folder = f"{self._root}/{label}"
        self._client.key_value_set(f"{folder}/{self.rank}", value)
        self._client.wait_at_barrier(folder, int(WAIT_TIMEOUT_S * 1000))
        found = self._client.key_value_dir_get(folder)
        by_rank = {int(key.rsplit("/", 1)[1]): text for key, text in found}
        return [by_rank[rank] for rank in range(self.count)]

    def meet(self, label: str) -> None:
        """Wait until every process is here. ``label`` must be new."""
        self._client.wait_at_barrier(f"{self._root}/{label}", int(WAIT_TIMEOUT_S * 1000))

    def forget(self, label: str) -> None:
        """Remove what was shared under ``label``, once every process has it."""
        if self.rank == 0:
            self._client.key_value_delete(f"{self._root}/{label}")
