"""What the supervisor can do; `launcher.supervise.decide` chooses, `launcher.supervise.loop` carries out.

Each is safe to do twice, and what it did is seen in the next look: so a supervisor can be killed after
any of them, and another goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.supervise.observation import Machines, Option
from launcher.supervise.records import Provision, Trouble
from recipes.contract import ExitCode


@dataclass(frozen=True, kw_only=True, slots=True)
class Create:
    """Claim the number in the ledger if it is not there yet, then ask for the machines."""

    option: Option
    number: int
    is_probe: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    """Note why in the ledger, then have the machines removed."""

    machines: Machines
    trouble: Trouble
    why: str
    code: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Write this state of a provision into the ledger."""

    provision: Provision


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """Nothing of a provision is left: write that, let its hosts' lease go, and end its attempt."""

    provision: Provision


@dataclass(frozen=True, kw_only=True, slots=True)
class AskToStop:
    """Have the hosts save and leave."""

    by: str
    resumes: bool
    """To go on with other machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearStop:
    """The hosts have left: the next may begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Tell people once."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Nothing to do now."""

    why: str
    until_s: float | None = None
    """When to look at the latest; None: at the usual time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Nothing is left of the run's machines, and it needs none any more."""

    exit_code: ExitCode
    reason: str
    hint: str = ""
    host: str = ""


type Action = Create | Delete | Note | Close | AskToStop | ClearStop | Say | Wait | Finish
