"""What a launch elsewhere would apply, byte for byte: a JobSet, or a queued resource."""

from __future__ import annotations

from launcher.gke.manifest import manifest, manifest_bytes
from launcher.gke.validate import problems
from launcher.plan import make_plan
from launcher.tpu.request import preview_bytes
from recipes.errors import RecipeError
from recipes.schema import Recipe


def target_manifest(recipe: Recipe, *, bundle: str | None) -> bytes:
    """For a target that is not local, with all that a launch needs.

    Args:
      recipe: without launch problems.
      bundle: digest of the code that is sent; None when none is.

    Raises:
      RecipeError: it would be no JobSet that could run.
    """
    if recipe.target.kind == "tpu":
        return preview_bytes(recipe, bundle or "").rstrip(b"\n")
    found = manifest(recipe, make_plan(recipe), bundle=bundle)
    if wrong := problems(found):
        raise RecipeError(recipe.name, wrong)
    return manifest_bytes(found)
