"""The JAX program: `python -m trainer RECIPE.yaml` runs without the launcher."""
