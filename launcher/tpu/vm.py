"""What a TPU VM is told by metadata: written by the back end, read by bootstrap and worker on the VM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPEC = "muster-vm"
"""Metadata attribute: :class:`VmSpec` as JSON. Nothing in the startup script itself depends on the run."""
NAMESPACE = "muster"
"""Of the guest attributes."""
STATE = "state"
"""Guest attribute: what the host does, in one line; begins with ``failed:`` when it has given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VmSpec:
    """One run's order to a VM; the same for all hosts of a provision."""

    run_dir: str
    recipe: str
    """The recipe in effect (with this provision's number of slices), relative to the run directory."""
    order: str
    provision: int
    bundle: str
    """``sha256:<hex>`` of the code, below ``<root>/.bundles``."""
    num_slices: int
    hosts_per_slice: int
    devices_per_host: int
    is_cpu: bool
    """A rehearsal on CPU devices."""
    grace_period_s: float
    max_restarts: int
    python: str | None
    """Interpreter that has everything; None: install ``requirements``."""
    requirements: Sequence[str]
    env: Mapping[str, str]
    """The recipe's own variables."""


def lease_owner(order: str, provision: int) -> str:
    """Id under which the hosts of a provision hold the run's lease."""
    return f"tpu-{order}-{provision}"
