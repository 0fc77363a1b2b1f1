"""Where the machines of a run come from, by its target; cloud clients only for those who need them."""

from __future__ import annotations

from launcher.rundir import RunDir
from launcher.supervise.fleet import RunFacts
from launcher.supervise.place import Place
from recipes.errors import UserError
from recipes.schema import Recipe


class Places:
    """Gives each run its place; what clouds list is shared by all runs until it is forgotten."""

    def __init__(self) -> None:
        from launcher.tpu.listing import Listings

        self._listings = Listings()

    def forget(self) -> None:
        """The next look asks the clouds again."""
        self._listings.forget()

    def __call__(self, run: RunDir, facts: RunFacts, recipe: Recipe) -> Place:
        assert facts.order is not None
        if recipe.target.kind == "tpu":
            from launcher.tpu.place import TpuPlace

            also = [each.place for each in facts.provisions if each.ended_s is None]
            return TpuPlace(run=run, recipe=recipe, order=facts.order, listings=self._listings, also=also)
        if recipe.target.kind == "gke":
            from launcher.gke.place import GkePlace

            return GkePlace(run=run, recipe=recipe, order=facts.order)
        raise UserError(
            f"{run.url} runs on this machine", hint="local runs are supervised by `muster launch` itself"
        )
