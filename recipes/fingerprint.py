"""Which experiment a recipe is: a digest of the keys that change it, and what differs between two."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.load import flatten, keys, recipe_to_dict
from recipes.schema import Recipe
from recipes.schema_key import Effect


def fingerprint(recipe: Recipe) -> str:
    """SHA-256 (hex) of every key whose effect is EXPERIMENT, with its value."""
    flat = flatten(recipe_to_dict(recipe))
    semantic = {path: flat[path] for path, key in keys().items() if key.effect is Effect.EXPERIMENT}
    return hashlib.sha256(json.dumps(semantic, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key that differs between two recipes."""

    key: str
    old: object
    new: object
    effect: Effect


def changes(old: Recipe, new: Recipe) -> Sequence[Change]:
    """The keys that differ, in schema order. The recipe's own name does not count."""
    old_flat, new_flat = flatten(recipe_to_dict(old)), flatten(recipe_to_dict(new))
    return [
        Change(key=path, old=old_flat[path], new=new_flat[path], effect=key.effect)
        for path, key in keys().items()
        if path != "name" and old_flat[path] != new_flat[path]
    ]
