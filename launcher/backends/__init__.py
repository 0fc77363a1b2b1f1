"""Where a plan can run: a back end starts attempts, which are polled, stopped or hurried to their end."""

from __future__ import annotations

from typing import Protocol

from launcher.exits import AttemptOutcome


class Attempt(Protocol):
    """One attempt of a run, under way."""

    def poll(self) -> AttemptOutcome | None:
        """Moves things on; the outcome once every host has ended. Returns at once."""

    def stop(self) -> None:
        """Asks every host to save and stop, as a preemption notice does."""

    def hurry(self) -> None:
        """Kills what still runs."""


class Backend(Protocol):
    """One place to run in."""

    def begin(self, attempt: int) -> Attempt:
        """Starts the attempt of this number."""
