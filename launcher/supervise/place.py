"""Where machines come from, as the supervisor sees it: ``launcher.tpu`` and ``launcher.gke`` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.supervise.observation import Fault, Machines, Option
from launcher.supervise.records import Provision
from recipes.contract import ExitCode
from recipes.errors import UserError


class Refusal(UserError):
    """The service did not do what it was asked."""

    def __init__(self, what: str, fault: Fault, *, hint: str = "") -> None:
        super().__init__(f"{what}: {fault.sentence}", hint=hint, exit_code=ExitCode.INFRASTRUCTURE)
        self.fault = fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is there of one run."""

    machines: Sequence[Machines]
    unseen: Sequence[str] = ()
    """Places that did not answer."""
    room: int | None = None


class Place(Protocol):
    """Machines of one run. Nothing here waits for a cloud to finish."""

    def look(self) -> Look:
        """Everything of this run that its labels prove ours. Raises nothing for a place that is away."""

    def create(self, option: Option, number: int, *, is_probe: bool) -> None:
        """Asks for machines under the number of a claimed provision; asking twice is the same as once.

        Raises:
          Refusal: the service refuses, or something of that name is there and is not this provision.
        """

    def delete(self, machines: Machines) -> None:
        """Asks for them to be removed with everything on them; they may be gone already.

        Raises:
          Refusal: the service refuses.
        """

    def name(self, option: Option, *, is_probe: bool) -> str:
        """What the machines of an option are called there."""

    def words(self, machines: Machines) -> str:
        """What hosts say of themselves that have not begun an attempt; empty when they say nothing."""

    def left_lease(self, provision: Provision) -> str:
        """Id under which a provision's hosts held the run's lease: of use once they are certainly gone."""
