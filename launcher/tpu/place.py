"""TPU VMs of one run, as the supervisor sees them: implements :class:`launcher.supervise.place.Place`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from launcher.rundir import RunDir, launched_recipe
from launcher.supervise.observation import GAVE_UP, Fault, Machines, Option
from launcher.supervise.place import Look, Refusal
from launcher.supervise.records import Order, Provision, Trouble
from launcher.supervise.wanted import zone_place
from launcher.tpu import names
from launcher.tpu.client import Gone, Taken
from launcher.tpu.listing import Listings, Zone
from launcher.tpu.machines import machines, orphan
from launcher.tpu.request import Wish, request
from launcher.tpu.vm import NAMESPACE, STATE, lease_owner
from recipes.elastic import with_slices
from recipes.options import choices
from recipes.schema import Recipe

MAX_ASKED = 16
"""Slices whose hosts are asked what they do."""


class TpuPlace:
    """Queued resources and nodes of one run."""

    def __init__(
        self,
        *,
        run: RunDir,
        recipe: Recipe,
        order: Order,
        listings: Listings,
        also: Sequence[str] = (),
    ) -> None:
        """See the class.

        Args:
          run: its run directory.
          recipe: as launched.
          order: the launch.
          listings: what is in each zone, shared by all runs.
          also: places of machines that are not known to be gone, whatever the recipe says now.
        """
        self._run, self._recipe, self._order, self._listings = run, recipe, order, listings
        project = recipe.target.project
        self._options = choices(recipe)
        parents = [zone_place(project, each.zone) for each in self._options]
        self._parents = list(dict.fromkeys([*parents, *also]))

    def look(self) -> Look:
        """See :class:`launcher.supervise.place.Place`."""
        found: list[Machines] = []
        unseen: list[str] = []
        for parent in self._parents:
            try:
                found += self._in_zone(self._listings.zone(parent))
            except Refusal:
                unseen.append(parent)
        return Look(machines=found, unseen=unseen)

    def create(self, option: Option, number: int, *, is_probe: bool) -> None:
        """See :class:`launcher.supervise.place.Place`."""
        path, body = launched_recipe(with_slices(self._recipe, option.num_slices))
        if not is_probe:
            self._run.storage.replace(path, body)
        asked = request(self._recipe, self._run.url, self._wish(option, number, is_probe=is_probe))
        try:
            self._listings.api.create(asked)
        except Taken as error:
            self._listings.forget()
            self._check_ours(error, asked.parent, asked.resource_id, number)
        finally:
            self._listings.forget()

    def delete(self, machines: Machines) -> None:
        """See :class:`launcher.supervise.place.Place`."""
        api = self._listings.api
        kind = "queuedResources" if self._is_queued(machines) else "nodes"
        name = f"{machines.place}/{kind}/{machines.name}"
        with contextlib.suppress(Gone):
            api.delete(name) if kind == "queuedResources" else api.delete_node(name)
        self._listings.forget()

    def name(self, option: Option, *, is_probe: bool) -> str:
        """See :class:`launcher.supervise.place.Place`."""
        return names.resource_id(self._run.url, is_probe=is_probe)

    def words(self, machines: Machines) -> str:
        """See :class:`launcher.supervise.place.Place`."""
        said: list[str] = []
        for slice_id in range(min(machines.num_slices, MAX_ASKED)):
            node = f"{machines.place}/nodes/{machines.name}-{slice_id}"
            # Only a hint: a service that does not say is no reason for anything.
            with contextlib.suppress(Refusal):
                found = self._listings.api.guest_attribute(node, f"{NAMESPACE}/{STATE}")
                said += [_word(f"s{slice_id}-h{host}", text) for host, text in found.items()]
        return next((text for text in said if text.startswith(GAVE_UP)), said[0] if said else "")

    def left_lease(self, provision: Provision) -> str:
        """See :class:`launcher.supervise.place.Place`."""
        return lease_owner(provision.order, provision.number)

    def _in_zone(self, zone: Zone) -> Sequence[Machines]:
        home = names.home(self._run.url)
        found = [machines(each) for each in zone.queued.get(home, ())]
        return [*found, *(orphan(node) for node in zone.orphans.get(home, ()))]

    def _wish(self, option: Option, number: int, *, is_probe: bool) -> Wish:
        target = self._recipe.target
        has_others = is_probe or len(self._options) > 1
        return Wish(
            order=self._order,
            number=number,
            zone=option.place.rpartition("/")[2],
            capacity=option.capacity,
            num_slices=option.num_slices,
            is_probe=is_probe,
            valid_for_s=target.fallback_after_s if has_others else None,
        )

    def _check_ours(self, error: Taken, parent: str, resource_id: str, number: int) -> None:
        """Nothing to do when what is there is this very provision.

        Raises:
          Refusal: it is not.
        """
        zone = self._listings.zone(parent)
        ours = [
            each
            for each in zone.queued.get(names.home(self._run.url), ())
            if each.name.rpartition("/")[2] == resource_id
        ]
        if ours and ours[0].labels.get(names.PROVISION) == str(number):
            return
        if ours or resource_id not in zone.names:
            message = "an earlier one is still there"
            fault = Fault(trouble=Trouble.UNAVAILABLE, code="ALREADY_EXISTS", message=message)
            raise Refusal(f"asking for {resource_id}", fault) from error
        message = f"{parent}/queuedResources/{resource_id} is there and is not this run's"
        fault = Fault(trouble=Trouble.BAD_REQUEST, code="ALREADY_EXISTS", message=message)
        raise Refusal(f"asking for {resource_id}", fault, hint="give another run.name") from error

    def _is_queued(self, there: Machines) -> bool:
        zone = self._listings.zone(there.place)
        return there.name in zone.names


def _word(host: str, text: str) -> str:
    """What a host says, with its name."""
    if text.startswith(GAVE_UP):
        return f"{GAVE_UP} {host}: {text.removeprefix(GAVE_UP).strip()}"
    return f"{host}: {text}"
