"""Programs that no process runs before every process has compiled them."""

from __future__ import annotations

from typing import Any

import jax

from trainer.coordination import Peers


class Lockstep:
    """A jitted function of one signature; every process calls it alike.

    The collectives of CPU devices give up on a peer that is 30 s late, and one process may find in its
    compilation cache what another has to compile: on CPU only process 0 ever does.
    """

    def __init__(self, name: str, function: jax.stages.Wrapped, peers: Peers) -> None:
        self._name, self._function, self._peers = name, function, peers
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._function.lower(*arguments).compile()
            self._peers.meet(self._name)
        return self._compiled(*arguments)
