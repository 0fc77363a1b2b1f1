"""Changes that make a step fit and keep the experiment, the cheapest first. Pure.

Each is tried by compiling it (`launcher/cli/preflight.py`), so the order matters and sizes are not estimated:
parts of the vocabulary cost one percent of the FLOPs, ZeRO-1 an exchange that was there anyway, computing
activations anew about a third more FLOPs, offloading besides traffic with the host, and accumulation another
gathering of all weights for each part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.check import check
from recipes.errors import RecipeError
from recipes.load import flatten, nest, recipe_from_dict, recipe_to_dict
from recipes.parallelism import recipe_mesh
from recipes.schema import Recipe

Changes = Mapping[str, Any]
"""Values by dotted key."""

_VOCAB_CHUNKS = (8, 32)
_MOST_PARTS = 16


def remedies(recipe: Recipe) -> Iterator[tuple[Changes, Recipe]]:
    """Ever more changes to ``recipe``, and the recipe with them; only those that pass its rules."""
    together: dict[str, Any] = {}
    for changes in itertools.chain(
        _vocabulary(recipe), _zero1(recipe), _recomputation(recipe), _accumulation(recipe)
    ):
        changed = changed_recipe(recipe, {**together, **changes})
        if changed is not None:
            together |= changes
            yield dict(together), changed


def changed_recipe(recipe: Recipe, changes: Changes) -> Recipe | None:
    """The recipe with other values; None where its rules are against them."""
    try:
        changed = recipe_from_dict(nest({**flatten(recipe_to_dict(recipe)), **changes}))
    except (RecipeError, ValueError):
        return None
    return None if check(changed) else changed


def override_text(changes: Changes) -> Iterator[str]:
    """``key=value`` for each change; of a mapping one for each entry."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}={entry}" for name, entry in value.items())
        elif isinstance(value, (list, tuple)):
            yield f"{key}=[{','.join(map(str, value))}]"
        else:
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _vocabulary(recipe: Recipe) -> Iterator[Changes]:
    for chunks in _VOCAB_CHUNKS:
        if chunks > recipe.train.vocab_chunks:
            yield {"train.vocab_chunks": chunks}


def _zero1(recipe: Recipe) -> Iterator[Changes]:
    if not recipe.mesh.zero1 and recipe_mesh(recipe).total["data"] > 1:
        yield {"mesh.zero1": True}


def _recomputation(recipe: Recipe) -> Iterator[Changes]:
    train = recipe.train
    if train.remat_policy in ("none", "minimal"):
        yield {"train.remat_policy": "full"}
    if train.remat_policy != "named":
        yield {"train.remat_policy": "named", "train.remat_offload": ["layer_input"]}
    elif train.remat_save:
        moved = dict.fromkeys((*train.remat_offload, *train.remat_save))
        yield {"train.remat_save": [], "train.remat_offload": list(moved)}


def _accumulation(recipe: Recipe) -> Iterator[Changes]:
    parts = recipe.train.grad_accum_steps
    while (parts := 2 * parts) <= _MOST_PARTS:
        yield {"train.grad_accum_steps": parts}
