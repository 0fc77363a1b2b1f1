"""A program runs only after every process has compiled it."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from trainer.coordination import Peers
from trainer.lockstep import Lockstep


class Meetings:
    """Stands in for the coordination service: notes who was met when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def meet(self, label: str) -> None:
        self.events.append(f"met for {label}")


def test_all_meet_once_before_the_first_run() -> None:
    meetings = Meetings()

    def double(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: meetings.events.append("ran"))
        return 2 * x

    step = Lockstep("double", jax.jit(double), cast(Peers, meetings))
    assert [int(step(jnp.int32(n))) for n in (1, 2)] == [2, 4]
    jax.effects_barrier()
    assert meetings.events == ["met for double", "ran", "ran"]
