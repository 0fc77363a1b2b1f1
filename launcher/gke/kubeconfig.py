"""Which context of the kubeconfig a cluster's name means. Pure.

``target.cluster`` is a context, or the name N of a GKE cluster with one context ``gke_PROJECT_LOCATION_N``,
which is what gcloud calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.errors import UserError
from recipes.load import nearest

SHOWN = 8


def choose_context(cluster: str | None, contexts: Sequence[str], current: str) -> str:
    """The context to use.

    Args:
      cluster: what the user wrote; None for the current context.
      contexts: all that there are.
      current: the kubeconfig's own choice; may be empty.

    Raises:
      UserError: no context or several are meant.
    """
    if cluster is None:
        return _current(contexts, current)
    if cluster in contexts:
        return cluster
    meant = [context for context in contexts if gke_name(context) == cluster]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UserError(
            f"target.cluster={cluster}: {len(meant)} contexts are for clusters of that name",
            hint=f"name one of them: {_shown(meant)}",
        )
    raise UserError(
        f"target.cluster={cluster}: the kubeconfig has no such context", hint=_hint(cluster, contexts)
    )


def gke_name(context: str) -> str:
    """The cluster's name in a context that gcloud made; empty for another context."""
    parts = context.split("_")
    return parts[3] if len(parts) == 4 and parts[0] == "gke" else ""


def _current(contexts: Sequence[str], current: str) -> str:
    if current in contexts and current:
        return current
    why = (
        f"its current context {current} does not exist"
        if current
        else "the kubeconfig has no current context"
    )
    raise UserError(
        f"no cluster is chosen: {why}",
        hint=f"set target.cluster to one of {_shown(contexts)}" if contexts else _get_credentials(),
    )


def _hint(cluster: str, contexts: Sequence[str]) -> str:
    short = {gke_name(context): context for context in contexts if gke_name(context)}
    guess = nearest(cluster, [*contexts, *short])
    if guess:
        return f"did you mean {guess}?"
    return f"it has {_shown(contexts)}" if contexts else _get_credentials()


def _get_credentials() -> str:
    return "`gcloud container clusters get-credentials NAME --location=LOCATION` makes a context"


def _shown(contexts: Sequence[str]) -> str:
    more = f" and {len(contexts) - SHOWN} more" if len(contexts) > SHOWN else ""
    return ", ".join(contexts[:SHOWN]) + more
