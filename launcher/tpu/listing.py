"""What is in each zone, listed once for however many runs ask."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.supervise.place import Refusal
from launcher.tpu import names
from launcher.tpu.client import TpuApi
from launcher.tpu.machines import Node, Queued


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """One zone at one moment."""

    queued: Mapping[str, Sequence[Queued]]
    """With their nodes, by the digest of the run's address."""
    orphans: Mapping[str, Sequence[Node]]
    """Nodes of ours without a queued resource, by the same."""
    names: frozenset[str]
    """Of every queued resource, ours or not."""


class Listings:
    """Zones, each asked for once until it is forgotten."""

    def __init__(self, api: TpuApi | None = None) -> None:
        self.api = api or TpuApi()
        self._lock = threading.Lock()
        self._zones: dict[str, Zone | Refusal] = {}

    def forget(self) -> None:
        """The next question asks the service again."""
        with self._lock:
            self._zones = {}

    def zone(self, parent: str) -> Zone:
        """What is there.

        Raises:
          Refusal: the service does not say; the same for all who ask until it is forgotten.
        """
        with self._lock:
            if parent not in self._zones:
                try:
                    self._zones[parent] = self._listed(parent)
                except Refusal as error:
                    self._zones[parent] = error
            found = self._zones[parent]
        if isinstance(found, Refusal):
            raise found
        return found

    def _listed(self, parent: str) -> Zone:
        # Nodes first: a queued resource that is seen later than its nodes has them already.
        nodes, queued = self.api.nodes(parent), self.api.queued(parent)
        by_owner: dict[str, list[Node]] = {}
        for node in nodes:
            by_owner.setdefault(node.owner.rpartition("/")[2], []).append(node)
        ours: dict[str, list[Queued]] = {}
        for each in queued:
            if each.labels.get(names.MANAGED_BY) == names.OWNER:
                own = by_owner.get(each.name.rpartition("/")[2], [])
                whole = dataclasses.replace(each, nodes=tuple(sorted(own, key=lambda node: node.name)))
                ours.setdefault(each.labels.get(names.HOME, ""), []).append(whole)
        there = frozenset(each.name.rpartition("/")[2] for each in queued)
        orphans: dict[str, list[Node]] = {}
        for node in nodes:
            is_ours = node.labels.get(names.MANAGED_BY) == names.OWNER
            if is_ours and node.owner.rpartition("/")[2] not in there:
                orphans.setdefault(node.labels.get(names.HOME, ""), []).append(node)
        return Zone(queued=ours, orphans=orphans, names=there)
